"""The commands of `foredraft bench` about how tokens are chosen, on tiny models: tables and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from byte_models import byte_llama
from tiny_models import tiny_llama

from foredraft.cli.app import main

COMMON = {"benchmark", "date", "command", "machine", "versions", "model", "settings"}


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_llama(tmp_path_factory.mktemp("bytes")))


def bench(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args, "--num-blocks", "256", "--device", "cpu"])
    assert ended.value.code == code


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_verification_compares_methods(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "verification.json"
    options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "10", "--num-seeds", "2"]
    options += ["--methods", "rejection,block,lossy-typical", "--batch-size", "3", "-k", "2"]
    bench("verification", *options, "--output", str(output))
    rows = [line.split("|")[1].strip() for line in lines_of(capsys)]
    assert rows == ["verification", "-" * len(rows[1]), "rejection", "block", "lossy-typical"]
    record: dict[str, Any] = json.loads(output.read_text())
    assert set(record) >= COMMON
    assert record["settings"] == {
        "prompts": "words.jsonl",
        "num_prompts": 4,
        "num_seeds": 2,
        "max_tokens": 10,
        "temperature": 1.0,
        "seed": 0,
        "batch_size": 3,
        "num_speculative_tokens": 2,
    }
    assert [method["name"] for method in record["methods"]] == ["rejection", "block", "lossy-typical"]
    for method in record["methods"]:
        assert len(method["lengths_by_prompt"]) == 4
        assert len(method["tokens_per_second"]) == 2
        assert method["standard_error"] >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "rejection,magic"], "verification must be one of rejection, block, lossy-typical, not 'magic'"),
        (["--num-prompts", "1"], "'--num-prompts': Input should be greater than or equal to 2"),
        (["--temperature", "0"], "'--temperature': Input should be greater than or equal to 0.01"),
    ],
)
def test_verification_refuses_wrong_settings(
    prompts: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    bench("verification", "--prompts", prompts, "--num-prompts", "4", *options, code=2)
    assert message in capsys.readouterr().err


def test_structured_compares_with_free_text(
    byte_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "structured.json"
    options = ["--model", byte_model, "--num-prompts", "5", "--max-tokens", "30", "--depths", "0,2"]
    bench("structured", *options, "--batch-size", "4", "--output", str(output))
    lines = lines_of(capsys)
    titles = ["Structured answers:", "Speed and drafts:", "Decode steps of one batch:"]
    assert [line for line in lines if not line.startswith("|")] == titles
    assert len(lines) == 3 * (1 + 2 + 2)
    record: dict[str, Any] = json.loads(output.read_text())
    assert set(record) >= COMMON
    assert record["settings"] == {"num_prompts": 5, "max_tokens": 30, "temperature": 0.0, "seed": 0, "batch_size": 4}
    assert [depth["depth"] for depth in record["depths"]] == [0, 2]
    for depth in record["depths"]:
        assert depth["num_answers"] == sum(depth["finish_reasons"].values()) == 5
        assert depth["num_valid"] <= depth["finish_reasons"].get("stop", 0)
        assert depth["mask_microseconds"] > 0
        assert depth["slowdown_of_free_text_in_mixed_batch"] > 0
        assert len(depth["free"]["tokens_per_second"]) == 5


def test_structured_needs_jsonschema(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    bench("structured", "--model", "nowhere", code=2)
    assert "pip install jsonschema" in capsys.readouterr().err


@pytest.mark.parametrize("depths", ["1,-1", "many"])
def test_depths_must_be_numbers(capsys: pytest.CaptureFixture[str], depths: str) -> None:
    for command in ("structured", "processors"):
        bench(command, "--model", "nowhere", "--depths", depths, code=2)
        assert "--depths must be numbers from 0 on" in capsys.readouterr().err


def test_processors_times_all_options(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "processors.json"
    options = ["--model", model, "--prompts", prompts, "--batch-size", "4", "--steps", "2", "--repeats", "2"]
    bench("processors", *options, "--depths", "0,3", "--output", str(output))
    lines = lines_of(capsys)
    record: dict[str, Any] = json.loads(output.read_text())
    assert set(record) >= COMMON
    assert record["settings"] == {"prompts": "words.jsonl", "batch_size": 4, "steps": 2, "repeats": 2}
    assert len(record["options"]) == 2 * 13 == len(lines) - 2
    assert [each["depth"] for each in record["options"]] == [0] * 13 + [3] * 13
    for first, second in zip(record["options"][::13], record["options"][1::13], strict=True):
        assert first["ratio_to_greedy"] == second["ratio_to_temperature"] == 1
    assert all(len(each["steps"]) == 4 for each in record["options"])


def test_grammar_times_the_libraries(byte_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "grammar.json"
    bench("grammar", "--model", byte_model, "--repeats", "1", "--output", str(output))
    assert lines_of(capsys)[2].startswith("| llguidance ")
    record: dict[str, Any] = json.loads(output.read_text())
    assert set(record) >= COMMON
    assert record["settings"] == {"repeats": 1}
    assert record["libraries"][0]["num_refused"] == 0


def test_grammar_without_a_tokenizer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("grammar", "--model", str(tiny_llama(tmp_path)), code=1)
    assert "grammars need a tokenizer" in capsys.readouterr().err
