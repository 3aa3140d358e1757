"""Sampling options on a CUDA device: the same tokens as on the CPU, at every K, and outputs that follow a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama

from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutput, TokenHistory

pytestmark = pytest.mark.gpu

PROMPTS = [[1 + (i * 7 + j) % 60 for j in range(length)] for i, length in enumerate((1, 5, 17, 30))]
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_speculative_tokens": 3, "max_num_seqs": 16}


class Lift:
    """Makes one token likelier with every token that is written."""

    is_stateful = False

    def process(self, history: TokenHistory, logits: torch.Tensor) -> torch.Tensor:
        logits[5] += 0.01 * len(history.output_token_ids)
        return logits


OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bans": {"bad_words": [[17], [5, 6], [3, 4, 5]], "logit_bias": {9: 0.5, 11: -0.5}},
    "allowed": {"allowed_token_ids": list(range(8, 40)), "logprobs": 2},
    "end": {"min_tokens": 9, "stop_token_ids": list(range(20, 40)), "prompt_logprobs": 1},
    "own": {"logits_processors": [Lift()], "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_tokens_of_the_cpu(tmp_path: Path, name: str) -> None:
    path = tiny_llama(tmp_path / "model")
    plain = SamplingParams(max_tokens=24, num_speculative_tokens=0, **OPTIONS[name])
    on_cpu = LLM(path, device="cpu", **SETTINGS).generate(PROMPTS, plain)
    gpu = LLM(path, device="cuda", **SETTINGS)
    for depth in (0, 1, 3):
        params = SamplingParams(max_tokens=24, num_speculative_tokens=depth, **OPTIONS[name])
        for ours, theirs in zip(gpu.generate(PROMPTS, params), on_cpu, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert_logprobs_close(ours, theirs)


def assert_logprobs_close(ours: RequestOutput, theirs: RequestOutput) -> None:
    for one, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
        assert (one is None) == (other is None)
        for mine, yours in zip(one or (), other or (), strict=True):
            assert (mine is None) == (yours is None)
            if mine is not None and yours is not None:
                assert mine.logprob == pytest.approx(yours.logprob, abs=1e-4)


@pytest.mark.parametrize("verification", ["rejection", "block", "lossy-typical"])
@pytest.mark.parametrize("draft_sampling", ["probabilistic", "greedy"])
def test_sampled_choices_are_the_same_alone_and_in_a_batch(
    tmp_path: Path, verification: str, draft_sampling: str
) -> None:
    path = tiny_llama(tmp_path / "model")
    llm = LLM(path, device="cuda", verification=verification, draft_sampling=draft_sampling, **SETTINGS)
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95}
    params = [
        SamplingParams(max_tokens=16, temperature=1.0, seed=index, n=2, **(filters if index % 2 else {}))  # type: ignore[arg-type]
        for index in range(len(PROMPTS))
    ]
    together = llm.generate(PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompt], one)
        assert [choice.token_ids for choice in alone.choices] == [choice.token_ids for choice in output.choices]


def test_structured_output_parses_at_every_depth() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "legs": {"type": "integer", "minimum": 0, "maximum": 8},
            "kind": {"enum": ["mammal", "bird", "fish"]},
        },
        "required": ["name", "legs", "kind"],
        "additionalProperties": False,
    }
    llm = LLM(dtype="float32", device="cuda")
    prompts = [[{"role": "user", "content": f"Describe a {animal} as JSON."}] for animal in ("cat", "duck", "trout")]
    texts = []
    for depth in (0, 3, 8):
        params = SamplingParams(
            max_tokens=128, structured_output=StructuredOutput(json_schema=schema), num_speculative_tokens=depth
        )
        outputs = llm.chat(prompts, params)
        assert all(json.loads(output.text)["kind"] in ("mammal", "bird", "fish") for output in outputs)
        texts.append([output.text for output in outputs])
    assert texts[0] == texts[1] == texts[2]
