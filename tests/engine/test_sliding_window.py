"""Layers with a sliding window among others: equal to transformers, in memory that does not grow with the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import Checkpoint
from scripted import ScriptedDrafter, finish, scripted_engine
from tiny_models import tiny_alternating, tiny_mistral

from foredraft.cache.groups import Owner
from foredraft.config import EngineConfig
from foredraft.engine.engine import Engine
from foredraft.sampling_params import SamplingParams

WINDOW = 16
BLOCK_SIZE = 4
NUM_NEW_TOKENS = 12
KINDS: dict[str, Callable[..., Path]] = {
    "full and sliding, sliding modules": tiny_alternating,
    "sliding and full, full modules": partial(tiny_alternating, is_sliding_last=False),
    "a window of one row": partial(tiny_mistral, num_modules=3, sliding_window=1),
    "sliding only": partial(tiny_mistral, num_modules=3, sliding_window=WINDOW),
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = KINDS[request.param](tmp_path_factory.mktemp("model") / "checkpoint")
    return Checkpoint.load(directory, num_modules=3)


def engine_of(checkpoint: Checkpoint, budget: int = 32) -> tuple[Engine, ScriptedDrafter]:
    config = EngineConfig(
        num_speculative_tokens=3,
        block_size=BLOCK_SIZE,
        num_blocks=160,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
    )
    return scripted_engine(checkpoint.loaded, config)


def random_prompt(length: int) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def add(
    engine: Engine, drafter: ScriptedDrafter, checkpoint: Checkpoint, prompt: Sequence[int], depth: int, max_tokens: int
) -> str:
    name = f"{len(prompt)} tokens, depth {depth}"
    drafter.continuations[name] = checkpoint.reference.sequence(prompt, max_tokens + 4)
    drafter.num_right[name] = len(prompt) % 4
    params = SamplingParams(max_tokens=max_tokens, num_speculative_tokens=depth, ignore_eos=True)
    engine.add_request(name, prompt, params)
    return name


@pytest.mark.parametrize("depth", [0, 3])
def test_output_equals_transformers_at_every_length(checkpoint: Checkpoint, depth: int) -> None:
    engine, drafter = engine_of(checkpoint)
    requests = {}
    for length in range(8, 81, 3):
        name = add(engine, drafter, checkpoint, random_prompt(length), depth, NUM_NEW_TOKENS)
        requests[name] = next(r for r in engine.scheduler.requests() if r.request_id == name)
    finish(engine)
    for name, request in requests.items():
        assert request.token_ids == drafter.continuations[name][: len(request.prompt_token_ids) + NUM_NEW_TOKENS]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("length", [9, 60])
def test_blocks_behind_the_window_are_given_back(checkpoint: Checkpoint, depth: int, length: int) -> None:
    engine, drafter = engine_of(checkpoint)
    name = add(engine, drafter, checkpoint, random_prompt(length), depth, 100)
    most = [0] * len(engine.cache.pools)

    def watch() -> None:
        if name in engine.scheduler:
            held = engine.cache.num_held_blocks(name)
            for group, count in enumerate(held):
                most[group] = max(most[group], count)

    finish(engine, watch)
    last_row = length + 100 - 1
    for number, group in enumerate(engine.cache.layout.groups):
        if group.owner is Owner.MODULES and depth == 0:
            assert most[number] == 0
        elif group.retention is None:
            assert most[number] >= (last_row - depth - 1) // BLOCK_SIZE
        else:
            # The rows before the next one, and those of one step: a decode's after the prefill, which no step watches.
            assert most[number] <= -(-(group.retention + 2 * (depth + 1)) // BLOCK_SIZE) + 1


@pytest.mark.parametrize("depth", [0, 3])
def test_a_hit_needs_only_the_blocks_of_the_window(checkpoint: Checkpoint, depth: int) -> None:
    engine, drafter = engine_of(checkpoint)
    prompt = random_prompt(64)
    first = add(engine, drafter, checkpoint, prompt, depth, 9)
    finish(engine)
    later = [*drafter.continuations[first][: 64 + 9], 1, 2, 3]
    name = add(engine, drafter, checkpoint, later, depth, 20)
    request = next(r for r in engine.scheduler.requests() if r.request_id == name)
    engine.step()
    assert request.num_cached_tokens == 72
    finish(engine)
    assert request.token_ids == drafter.continuations[name][: len(later) + 20]


def test_memory_of_the_windows_does_not_grow_with_the_sequence(checkpoint: Checkpoint) -> None:
    engine, drafter = engine_of(checkpoint)
    held: dict[int, tuple[int, ...]] = {}
    for length in (80, 230):
        name = add(engine, drafter, checkpoint, random_prompt(length), 3, 8)
        for _ in range(10):
            if name in engine.scheduler:
                engine.step()
                held[length] = engine.cache.num_held_blocks(name) if name in engine.scheduler else held[length]
        finish(engine)
    for number, group in enumerate(engine.cache.layout.groups):
        if group.retention is not None:
            assert abs(held[230][number] - held[80][number]) <= 1
        else:
            assert held[230][number] >= 2.5 * held[80][number]
