"""The built-in model in float32: whatever the depth, the batch and the chunks, the target's own greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import finish
from transformers import AutoModelForCausalLM

from foredraft.cache.groups import CacheLayout
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.builtin import builtin_checkpoint, builtin_mtp_directory
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.request import Request
from foredraft.sampling_params import SamplingParams

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "data" / "gsm8k_64.jsonl"
NUM_PROMPTS, MAX_TOKENS = 8, 96
CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def num_threads() -> None:
    """All of them: this model is large enough."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_checkpoint(
        builtin_checkpoint(), builtin_mtp_directory(), dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    assert loaded.tokenizer is not None
    prompts = []
    for line in PROMPTS.read_text().splitlines()[:NUM_PROMPTS]:
        messages = [{"role": "user", "content": json.loads(line)["prompt"]}]
        ids: Any = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts.append([int(token_id) for token_id in ids])
    return prompts


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates with the target alone, one prompt at a time."""
    target = AutoModelForCausalLM.from_pretrained(builtin_checkpoint(), dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=0,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    assert sum(len(output) for output in outputs) > 0.9 * NUM_PROMPTS * MAX_TOKENS
    return outputs


def engine_of(loaded: LoadedModel, depth: int, batch: int, is_chunked: bool) -> Engine:
    """`is_chunked`: CHUNK rows a step, or the fewest that `batch` decodes at `depth` can do with."""
    config = EngineConfig(
        num_speculative_tokens=depth,
        max_num_seqs=batch,
        max_num_batched_tokens=max(CHUNK, batch * (depth + 1)) if is_chunked else 2048,
        num_blocks=20 * batch + 1,
        max_model_len=320,
    )
    return build_engine(loaded, config)


def serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [engine.add_request(f"{index}", prompt, params) for index, prompt in enumerate(prompts)]
    finish(engine)
    return requests


def check(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]], depth: int, batch: int, is_chunked: bool
) -> None:
    engine = engine_of(loaded, depth, batch, is_chunked)
    requests = serve(engine, prompts)
    assert [request.output_token_ids for request in requests] == expected[: len(prompts)]
    if depth == 0:
        assert engine.stats.speculation.num_drafts == 0
    else:
        # With wrong KV the modules would guess worse than this.
        assert engine.stats.speculation.mean_acceptance_length > {1: 1.5, 3: 2.2, 8: 2.6}[depth]


@pytest.mark.parametrize(("depth", "is_chunked"), [(0, False), (1, True), (3, True), (3, False), (8, True), (8, False)])
def test_a_batch_of_eight_equals_transformers(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]], depth: int, is_chunked: bool
) -> None:
    check(loaded, prompts, expected, depth, NUM_PROMPTS, is_chunked)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_one_at_a_time_equals_transformers(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]], depth: int
) -> None:
    check(loaded, prompts[:2], expected, depth, 1, is_chunked=True)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("batch", [1, NUM_PROMPTS])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_every_combination_equals_transformers(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]], depth: int, batch: int, is_chunked: bool
) -> None:
    check(loaded, prompts, expected, depth, batch, is_chunked)


def test_cache_memory_per_token(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, 8, batch=1, is_chunked=True)
    layout: CacheLayout = engine.runner.storage.layout
    # Keys and values of 3 heads of 64 numbers, in 30 layers and in 8 modules, and a hidden state of 576 numbers.
    assert layout.bytes_per_token(0) == 4 * (30 * 2 * 3 * 64 + 576) == 48_384
    assert layout.bytes_per_token(1) == 4 * (8 * 2 * 3 * 64) == 12_288
    assert engine.runner.storage.num_bytes == 21 * 16 * (48_384 + 12_288)
