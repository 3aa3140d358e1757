"""The drafts of every step equal those of transformers' own MTP layers run over the whole history afresh.

The engine keeps the modules' KV through rejections, chunks, other requests and changes of depth; the reference keeps
nothing. Which drafts are accepted is scripted, since random models accept almost none of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import Checkpoint, RecordingDrafter, recording_engine
from scripted import finish

from foredraft.sampling_params import SamplingParams

MAX_TOKENS = 14
VOCAB_SIZE = 64
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 20)


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(7)
    return {f"{n} tokens": torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths}


def check(checkpoint: Checkpoint, depth: int, max_num_seqs: int, budget: int) -> RecordingDrafter:
    """Serve all prompts with scripted acceptance and compare the tokens and every draft."""
    engine, drafter = recording_engine(checkpoint.loaded, depth, max_num_seqs, budget)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for name, prompt in prompts().items():
        drafter.continuations[name] = checkpoint.reference.sequence(prompt, MAX_TOKENS + depth)
    requests = [engine.add_request(name, prompt, params) for name, prompt in prompts().items()]
    finish(engine)
    for request in requests:
        assert request.token_ids == drafter.continuations[request.request_id][: request.max_total_tokens]
    drafter.assert_equals(checkpoint.reference, {request.request_id: request.token_ids for request in requests})
    for window, drafts in drafter.seen:
        if drafts:
            assert len(drafts) == min(depth, len(prompts()[window.request_id]) + MAX_TOKENS - window.num_tokens - 1)
    accepted = engine.stats.speculation.accepted_by_depth
    assert accepted[-1] > 0
    assert accepted[0] < engine.stats.speculation.num_drafts
    return drafter


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        ("llama", 1),
        ("llama", 2),
        ("llama", 3),
        ("glm4_moe", 1),
        ("glm4_moe", 3),
        ("qwen3", 2),
        ("qwen2 sliding", 2),
        ("mistral sliding", 2),
    ],
)
@pytest.mark.parametrize("budget", ["alone, small chunks", "together, small chunks", "together, whole prompts"])
def test_drafts_equal_the_reference(
    checkpoints: Callable[[str], Checkpoint], kind: str, depth: int, budget: str
) -> None:
    max_num_seqs = 1 if budget.startswith("alone") else 4
    max_num_batched_tokens = 1024 if "whole" in budget else max_num_seqs * (depth + 1)
    check(checkpoints(kind), depth, max_num_seqs, max_num_batched_tokens)


@pytest.mark.parametrize(("kind", "depth"), [("llama", 3), ("glm4_moe", 3), ("mistral sliding", 2)])
def test_drafts_fed_are_the_modules_own(checkpoints: Callable[[str], Checkpoint], kind: str, depth: int) -> None:
    checkpoint = checkpoints(kind)
    engine, drafter = recording_engine(checkpoint.loaded, depth, max_num_seqs=4)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [engine.add_request(name, prompt, params) for name, prompt in prompts((1, 2, 6, 11)).items()]
    finish(engine)
    drafter.assert_equals(checkpoint.reference, {request.request_id: request.token_ids for request in requests})
    for window, drafts in drafter.seen:
        if drafts:
            logits = torch.stack(drafter.logits[window.request_id, window.num_tokens])
            assert drafts == tuple(logits.argmax(-1).tolist())


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "mistral sliding"])
@pytest.mark.parametrize("depths", [(2, 0, 0, 2), (0, 0, 0, 1, 2), (1, 2, 1, 0, 2), (2, 2, 0, 1, 1, 2)])
@pytest.mark.parametrize("budget", [6, 1024])
def test_drafts_equal_the_reference_when_the_depth_changes(
    checkpoints: Callable[[str], Checkpoint], kind: str, depths: tuple[int, ...], budget: int
) -> None:
    checkpoint = checkpoints(kind)
    engine, drafter = recording_engine(checkpoint.loaded, 2, max_num_seqs=2, budget=budget)
    requests = []
    for name, prompt in prompts((1, 13)).items():
        drafter.continuations[name] = checkpoint.reference.sequence(prompt, 32)
        requests.append(engine.add_request(name, prompt, SamplingParams(max_tokens=30)))

    def change_depth() -> None:
        for request in engine.scheduler.requests():
            step = engine.stats.num_steps + request.arrival
            engine.set_num_speculative_tokens(request.request_id, depths[step % len(depths)])

    change_depth()
    finish(engine, after_step=change_depth)
    for request in requests:
        assert request.token_ids == drafter.continuations[request.request_id][: request.max_total_tokens]
    drafter.assert_equals(checkpoint.reference, {request.request_id: request.token_ids for request in requests})
    assert {len(drafts) for _, drafts in drafter.seen} >= set(depths) - {0}


@pytest.mark.parametrize(("kind", "depth"), [("llama", 3), ("glm4_moe", 3), ("mistral sliding", 2)])
@pytest.mark.parametrize("budget", [16, 1024])
def test_drafts_equal_the_reference_after_preemptions(
    checkpoints: Callable[[str], Checkpoint], kind: str, depth: int, budget: int
) -> None:
    checkpoint = checkpoints(kind)
    engine, drafter = recording_engine(
        checkpoint.loaded, depth, max_num_seqs=4, budget=budget, num_blocks=12, max_model_len=40
    )
    requests = []
    for name, prompt in prompts((1, 5, 9, 12, 8)).items():
        drafter.continuations[name] = checkpoint.reference.sequence(prompt, 28)
        requests.append(engine.add_request(name, prompt, SamplingParams(max_tokens=24)))
    finish(engine)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert request.token_ids == drafter.continuations[request.request_id][: request.max_total_tokens]
    drafter.assert_equals(checkpoint.reference, {request.request_id: request.token_ids for request in requests})
