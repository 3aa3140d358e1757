"""`foredraft bench peers` with engines in processes of their own, and what it is told to leave out."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.app import main

PEER = """
import json, sys, time
print(json.dumps({"ready": True, "version": "fake 1.0"}), flush=True)
turns = 0
for line in sys.stdin:
    request, started, turns = json.loads(line), time.perf_counter(), turns + 1
    with open(sys.argv[1], "a") as log:
        log.write(json.dumps(request | {"turn": turns}) + chr(10))
    if request["together"] and "--single" in sys.argv:
        print(json.dumps({"error": "no batches"}), flush=True)
        continue
    outputs = [[n] * n for n in request["num_tokens"]]
    print(json.dumps({"outputs": outputs, "seconds": time.perf_counter() - started}), flush=True)
"""


def bench(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "peers", *args, "--num-blocks", "128", "--device", "cpu"])
    assert ended.value.code == code


@pytest.fixture
def peer(tmp_path: Path) -> str:
    """A command whose first argument is a file for its requests."""
    script = tmp_path / "a peer.py"
    script.write_text(PEER)
    return shlex.join([sys.executable, str(script)])


def requests(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_external_engines_take_turns_in_both_workloads(
    model: str, prompts: str, peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, log, other = tmp_path / "peers.json", tmp_path / "log", tmp_path / "other"
    options = ["--model", model, "--prompts", prompts, "--depths", "0", "--num-single", "1", "--max-tokens", "4"]
    options += ["--num-requests", "3", "--whole-prompts", "--transformers", "generate", "--rounds", "2"]
    options += ["--external", f"both={peer} {log}", "--external", f"single={peer} {other} --single"]
    bench(*options, "--output", str(output))
    record = json.loads(output.read_text())
    single, together = record["workloads"]
    assert [each["name"] for each in single["peers"]] == ["foredraft K=0", "both", "single", "transformers generate"]
    assert [each["name"] for each in together["peers"]] == ["foredraft K=0", "both", "single"]
    assert [len(each["tokens_per_second"]) for each in (*single["peers"], *together["peers"])] == [2] * 6 + [0]
    assert record["external"] == {"both": {"version": "fake 1.0"}, "single": {"version": "fake 1.0"}}
    assert record["settings"]["whole_prompts"] is True
    printed = capsys.readouterr().out
    assert printed.count("Failed") == 1
    assert "Failed: single: ForedraftError: no batches" in printed
    # One process did all: a warm-up and two rounds of each workload.
    asked = requests(log)
    assert [each["turn"] for each in asked] == [1, 2, 3, 4, 5, 6]
    assert [each["together"] for each in asked] == [False] * 3 + [True] * 3
    assert {tuple(each["num_tokens"]) for each in asked} == {(4,), (4, 4, 4)}
    assert asked[3]["prompts"][:1] == asked[0]["prompts"]
    assert len({tuple(prompt) for prompt in asked[3]["prompts"]}) == 3
    assert [each["together"] for each in requests(other)] == [False] * 3 + [True]


def test_pieces_of_mixed_lengths_reach_it_as_they_reach_us(
    model: str, prompts: str, peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    options = ["--model", model, "--prompts", prompts, "--depths", "0", "--num-single", "0", "--transformers", "none"]
    options += ["--num-requests", "6", "--prompt-lengths", "3,20", "--new-tokens", "2,6", "--rounds", "1"]
    bench(*options, "--external", f"fake={peer} {log}")
    warm_up, turn = requests(log)
    assert warm_up["prompts"] == turn["prompts"]
    assert len({len(prompt) for prompt in turn["prompts"]}) > 1
    assert all(2 <= number <= 6 for number in turn["num_tokens"])
    printed = capsys.readouterr().out
    assert "transformers" not in printed
    assert "one at a time" not in printed
    assert "| fake " in printed


def test_one_that_takes_too_long_fails_alone(model: str, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", model, "--prompts", prompts, "--depths", "0", "--num-single", "1", "--max-tokens", "2"]
    options += ["--num-requests", "0", "--transformers", "none", "--rounds", "1"]
    bench(*options, "--external", "slow=sleep 600", "--external-timeout", "0.5")
    printed = capsys.readouterr().out
    assert "Failed: slow: ForedraftError: it took longer than 0.5 s" in printed
    assert "| foredraft K=0 " in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--external", "python run.py"], "--external must be NAME=COMMAND"),
        (["--external", "=python run.py"], "--external must be NAME=COMMAND"),
        (["--external", "fake="], "--external must be NAME=COMMAND"),
        (["--external", "fake=python 'run.py"], "--external fake: No closing quotation"),
        (["--external", "fake=/none/python run.py"], "--external fake: there is no executable '/none/python'"),
        (["--external", "fake=true", "--external", "fake=false"], "--external fake is given twice"),
        (["--transformers", "generate,vllm"], "--transformers must be none, or some of generate, static, modules"),
    ],
)
def test_wrong_options_are_refused(
    model: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    bench("--model", model, *options, code=2)
    assert message in capsys.readouterr().err
