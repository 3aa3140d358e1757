"""`foredraft bench` on a tiny model: tables, JSON, and transformers as a peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.app import main


def bench(*args: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args, "--num-blocks", "128", "--device", "cpu"])
    assert ended.value.code == 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_speed_compares_all_variants(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], batch_size: int
) -> None:
    output = tmp_path / "results" / "speed.json"
    options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "10"]
    options += ["--depths", "1,3", "--peers", "transformers-dynamic,transformers-static"]
    bench("speed", *options, "--batch-size", str(batch_size), "--output", str(output))
    captured = capsys.readouterr()
    assert captured.out.strip().startswith("| variant ")
    assert captured.out.endswith("All outputs identical: yes\n")
    record: dict[str, Any] = json.loads(output.read_text())
    names = [variant["name"] for variant in record["variants"]]
    assert names == ["foredraft plain", "foredraft K=1", "foredraft K=3", "transformers-dynamic", "transformers-static"]
    for variant in record["variants"]:
        assert variant["median_tokens_per_second"] > 0
        assert variant["num_identical"] == 4
        assert len(variant["tokens_per_second"]) == (4 if batch_size == 1 else 2)
    assert record["variants"][0]["ratio_to_plain"] == 1
    assert record["is_identical"] is True
    assert {"benchmark", "date", "command", "machine", "versions", "model", "settings"} <= set(record)
    assert record["machine"]["cores"] >= 1
    assert record["settings"] == {"prompts": "words.jsonl", "max_tokens": 10, "batch_size": batch_size, "rounds": 1}


def test_speed_refuses_an_unknown_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speed", "--peers", "megatron"])
    assert ended.value.code == 2
    assert "unknown peers megatron; known are transformers-dynamic, transformers-static" in capsys.readouterr().err


def test_acceptance_counts_all_prompts(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "acceptance.json"
    options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "10", "--ignore-eos"]
    bench("acceptance", *options, "-k", "2", "--temperature", "1", "--output", str(output))
    assert "Mean acceptance length" in capsys.readouterr().out
    record: dict[str, Any] = json.loads(output.read_text())
    assert record["num_tokens"] == 40
    assert record["settings"]["num_speculative_tokens"] == 2
    assert len(record["accepted_rates"]) == len(record["conditional_rates"]) == 2
    assert record["num_accepted_tokens"] == sum(record["accepted_by_depth"])


SMALL = ["--prefix-tokens", "40", "--repeats", "2", "--steps", "3", "--index-blocks", "100,250", "--running", "1,4"]


def test_cache_measures_first_tokens_index_and_scheduler(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cache.json"
    options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", *SMALL]
    bench("cache", *options, "-k", "2", "--output", str(output))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    titles = [line for line in lines if not line.startswith("|")]
    assert titles == ["Time to first token, prompts of 48 tokens:", "Prefix index:", "Scheduler, decode steps:"]
    assert len(lines) == len(titles) + 2 * 3 + 6 + 2 + 4  # a heading and a rule for each table, then its rows
    record: dict[str, Any] = json.loads(output.read_text())
    kinds = [(times["depth"], times["case"], times["num_cached_tokens"]) for times in record["first_token"]]
    cases = (("nothing", 0), ("the prefix", 32), ("the whole prompt", 48))
    assert kinds == [(depth, *case) for depth in (0, 2) for case in cases]
    assert all(len(times["seconds"]) == 2 for times in record["first_token"])
    assert [times["ratio_to_nothing_cached"] for times in record["first_token"][::3]] == [1, 1]
    assert [cost["num_blocks"] for cost in record["index"]] == [125, 250]
    assert [(cost["num_running"], cost["depth"]) for cost in record["steps"]] == [(1, 0), (1, 3), (4, 0), (4, 3)]
    assert all(len(cost["milliseconds"]) == 3 for cost in record["steps"])
    assert {"benchmark", "date", "command", "machine", "versions", "model", "settings"} <= set(record)
    assert record["settings"] == {
        "prompts": "words.jsonl",
        "num_prompts": 4,
        "prefix_tokens": 40,
        "repeats": 2,
        "steps": 3,
        "block_size": 16,
        "max_num_batched_tokens": 1024,
    }


def test_cache_without_prefix_caching_is_an_error(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cache.json"
    options = [
        "--model",
        model,
        "--prompts",
        prompts,
        "--num-prompts",
        "4",
        *SMALL,
        "--num-blocks",
        "64",
        "--device",
        "cpu",
        "--no-enable-prefix-caching",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "cache", *options, "--output", str(output)])
    captured = capsys.readouterr()
    assert ended.value.code == 1
    assert "0 tokens were cached instead of 32: is prefix caching on" in captured.err
    assert "|" not in captured.out
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefix-tokens", "15"], "prefix_tokens=15 must be at least block_size=16"),
        (["--repeats", "1"], "'--repeats': Input should be greater than or equal to 2"),
        (["--steps", "0"], "'--steps': Input should be greater than or equal to 1"),
        (["--running", "1,0"], "--running must be numbers from 1 on"),
        (["--index-blocks", "many"], "--index-blocks must be numbers from 1 on"),
    ],
)
def test_cache_refuses_wrong_settings(
    prompts: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "cache", "--model", "nowhere", "--prompts", prompts, "--num-prompts", "4", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_chats_find_the_earlier_turns_and_draft_the_same(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "chats.json"
    options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "12", "--block-size", "4"]
    bench("chats", *options, "--num-turns", "3", "--output", str(output))
    assert capsys.readouterr().out.endswith("All answers identical: yes\n")
    record: dict[str, Any] = json.loads(output.read_text())
    turns = record["turns"]
    assert [(turn["turn"], turn["prefix_cache"]) for turn in turns] == [
        (number, is_on) for number in (1, 2, 3) for is_on in (True, False)
    ]
    for on, off in zip(turns[::2], turns[1::2], strict=True):
        assert on["num_prompt_tokens"] == off["num_prompt_tokens"]
        assert on["speculation"]["accepted_by_depth"] == off["speculation"]["accepted_by_depth"]
        assert off["num_cached_tokens"] == 0
    assert turns[2]["num_cached_tokens"] > 0
    assert turns[4]["num_cached_tokens"] > turns[2]["num_cached_tokens"]
