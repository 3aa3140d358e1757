"""`foredraft bench floor`, `trace` and `peers` on a tiny model: tables, reports, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.app import main


def bench(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args, "--num-blocks", "128", "--device", "cpu"])
    assert ended.value.code == code


def report(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text())
    assert {"benchmark", "date", "command", "machine", "versions", "model", "settings"} <= set(record)
    return record


def test_floor(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.bench.floor.COPY_BYTES", {"cpu": 1 << 16})
    output = tmp_path / "results" / "floor.json"
    options = ["--model", model, "--depths", "0,2", "--batch-sizes", "1,2", "--context", "20", "--steps", "3"]
    options += ["--repeats", "2", "--synthetic-acceptance", "1", "--draft-vocab-size", "32"]
    bench("floor", *options, "--output", str(output))
    printed = capsys.readouterr().out
    assert "NOT the model's own output: acceptance by chance: synthetic 1" in printed
    assert "| batch | depth |" in printed
    assert "GB/s, read and written by a large copy in the same run" in printed
    record = report(output)
    assert [(cell["batch_size"], cell["depth"]) for cell in record["cells"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert [cell["tokens_per_cycle"] for cell in record["cells"]] == [1, 3, 1, 3]
    assert all(len(cell["spans"]) == 2 for cell in record["cells"])
    assert record["settings"]["draft_vocab_size"] == 32
    assert record["marks"] == ["acceptance by chance: synthetic 1"]
    assert [file.name for file in output.parent.iterdir()] == ["floor.json"]


def test_trace(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, chrome = tmp_path / "trace.json", tmp_path / "steps.json.gz"
    options = ["--model", model, "--depth", "2", "--batch-size", "2", "--context", "20", "--steps", "2"]
    bench("trace", *options, "--chrome", str(chrome), "--output", str(output))
    printed = capsys.readouterr().out
    assert "Operations, part by part:" in printed
    assert "| aten::linear " in printed
    record = report(output)
    assert record["num_steps"] == 2
    assert record["busy_share"] + record["idle_share"] == pytest.approx(1)
    assert chrome.stat().st_size > 0


def test_peers(model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "peers.json"
    options = ["--model", model, "--prompts", prompts, "--depths", "0,2", "--num-single", "2", "--max-tokens", "6"]
    options += ["--num-requests", "4", "--prompt-lengths", "3,20", "--new-tokens", "2,6", "--rounds", "1"]
    bench("peers", *options, "--output", str(output))
    printed = capsys.readouterr().out
    assert "Failed" not in printed
    assert "Left out" not in printed
    single, together = report(output)["workloads"]
    assert [peer["name"] for peer in single["peers"]] == [
        "foredraft K=0",
        "foredraft K=2",
        "transformers generate",
        "transformers generate, static cache",
        "transformers generate, 2 MTP modules",
    ]
    assert [peer["name"] for peer in together["peers"]][2] == "transformers continuous batching"
    for peer in (*single["peers"], *together["peers"]):
        assert peer["num_equal"] == peer["num_compared"] > 0


def test_peers_by_chance_are_without_transformers_modules(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "peers.json"
    options = ["--model", model, "--random-tokens", "5", "--depths", "0,2", "--num-single", "1", "--max-tokens", "4"]
    bench("peers", *options, "--num-requests", "0", "--synthetic-acceptance", "0.5", "--output", str(output))
    assert "Left out: transformers' generate with MTP modules" in capsys.readouterr().out
    record = report(output)
    assert len(record["workloads"]) == 1
    assert record["marks"] == ["acceptance by chance: synthetic 0.5"]
    assert not any("modules" in peer["name"] or peer["num_compared"] for peer in record["workloads"][0]["peers"])


def test_ours_is_measured_where_a_second_copy_cannot_be_loaded(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", model, "--random-tokens", "5", "--depths", "1", "--num-single", "1", "--max-tokens", "4"]

    def refused(*args: object, **others: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("foredraft.models.loader.load_checkpoint", refused)
    bench("peers", *options, "--num-requests", "0")
    printed = capsys.readouterr().out
    assert "Left out: transformers, RuntimeError: CUDA out of memory" in printed
    assert "| foredraft K=1 " in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["floor", "--batch-sizes", "65"], "65 requests are to run at once, but max_num_seqs=64"),
        (["floor", "--depths", "3", "-k", "2"], "depth 3 asked for, but num_speculative_tokens=2"),
        (["floor", "--depths", "x"], "--depths must be numbers from 0 on"),
        (["trace", "--chrome", "trace.txt"], "a trace is a file that ends in .json or .json.gz, not trace.txt"),
        (["peers", "--new-tokens", "5,2"], "--new-tokens must be two numbers, the lower first"),
        (["peers", "--num-single", "65"], "65 prompts asked for, but"),
    ],
)
def test_wrong_settings_are_refused(
    model: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    command, *rest = options
    bench(command, "--model", model, *rest, code=2)
    assert message in capsys.readouterr().err
