"""`foredraft bench` on a tiny model: tables, JSON, and transformers as a peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft.cli.app import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3, eos_token_id=17, tokenizer=True))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    texts = ["w1 w2 w3", "w9", "w4 w5 w6 w7 w8", "w11 w12"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(file)


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
    assert record["settings"] == {"prompts": "words.jsonl", "max_tokens": 10, "batch_size": batch_size}


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
