"""Perplexity of several formats of the weights: the figures, and the command on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM

from foredraft import LLM
from foredraft.bench.perplexity import FormatResult, PerplexityResult, format_config, score_texts
from foredraft.cli.app import main
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError

TEXTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_modules=1, tokenizer=True)


def test_figures_are_over_the_tokens_of_all_texts() -> None:
    first = FormatResult("a", [[math.log(0.5)] * 3, [math.log(0.25)]], [[1, 2, 3], [4]])
    other = FormatResult("b", [[math.log(0.25)] * 3, [math.log(0.5)]], [[1, 2, 9], [4]])
    result = PerplexityResult([first, other])
    assert first.num_tokens == 4
    assert first.perplexity == pytest.approx(2 ** (5 / 4))
    assert first.perplexities == pytest.approx([2, 4])
    assert result.ratio(other) == pytest.approx(2 ** (2 / 4))
    assert result.agreement(other) == 0.75
    assert (result.ratio(first), result.agreement(first)) == (1, 1)


def test_perplexity_is_that_of_transformers(model: Path) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses, best = [], []
    with torch.inference_mode():
        for text in TEXTS:
            logprobs = reference(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
            losses += (-logprobs[range(len(text) - 1), text[1:]]).tolist()
            best.append(logprobs.argmax(-1).tolist())
    with LLM(model, num_blocks=16, num_speculative_tokens=0, device="cpu") as llm:
        result = score_texts("float32", llm, TEXTS)
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert result.best == best


def test_a_text_that_cannot_be_scored_is_named(model: Path) -> None:
    with LLM(model, num_blocks=16, max_model_len=8, device="cpu") as llm:
        with pytest.raises(ForedraftError, match="text 1 cannot be scored"):
            score_texts("float32", llm, [[1, 2], [3] * 20])
        with pytest.raises(ForedraftError, match="text 0 cannot be scored: it has no second token"):
            score_texts("float32", llm, [[1]])


def test_a_format_stands_for_settings() -> None:
    config = format_config(EngineConfig(num_blocks=16, dtype="bfloat16"), "int8")
    assert (config.dtype, config.quantization, config.num_speculative_tokens) == ("float32", "int8", 0)
    assert config.num_blocks == 16
    with pytest.raises(ConfigError, match="a format must be one of float32, bfloat16, int8, not 'int3'"):
        format_config(EngineConfig(), "int3")


def test_the_command_compares_formats(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = tmp_path / "words.jsonl", tmp_path / "perplexity.json"
    prompts.write_text('{"prompt": "w1 w2 w3 w4"}\n{"prompt": "w9 w8"}\n')
    options = ["--model", str(model), "--prompts", str(prompts), "--num-prompts", "2", "--output", str(output)]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "perplexity", *options, "--num-blocks", "16", "--device", "cpu"])
    assert ended.value.code == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.split("|")[1].strip() for line in lines][2:] == ["float32", "bfloat16", "int8"]
    record = json.loads(output.read_text())
    assert record["benchmark"] == "perplexity"
    assert record["settings"] == {
        "prompts": "words.jsonl",
        "num_prompts": 2,
        "formats": ["float32", "bfloat16", "int8"],
    }
    assert [each["name"] for each in record["formats"]] == ["float32", "bfloat16", "int8"]
    for each in record["formats"]:
        assert each["num_tokens"] == 4
        assert 0.5 < each["ratio_to_first"] < 2
        assert len(each["perplexities"]) == 2
    assert len({each["perplexity"] for each in record["formats"]}) == 3
    assert record["model"]["quantization"] == "int8"
