"""Hits in the prefix cache: the modules' rows after them are those of the reference, and who shares what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from reference import Checkpoint, RecordingDrafter, recording_engine
from scripted import finish

from foredraft.engine.engine import Engine
from foredraft.request import Request
from foredraft.sampling_params import SamplingParams

BLOCK_SIZE = 4
KINDS = {"llama": 3, "qwen2 sliding": 2, "mistral sliding": 2, "glm4_moe": 3}


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(1000 * length + seed)).tolist()


class Chat:
    """An engine whose drafts are compared with the reference at the end."""

    def __init__(self, checkpoint: Checkpoint, depth: int, budget: int = 64, num_blocks: int = 128) -> None:
        self.reference = checkpoint.reference
        self.engine: Engine
        self.drafter: RecordingDrafter
        self.engine, self.drafter = recording_engine(checkpoint.loaded, depth, 4, budget, num_blocks=num_blocks)
        self.requests: dict[str, Request] = {}

    def ask(self, name: str, prompt: Sequence[int], **params: object) -> Request:
        """Run one request to its end."""
        settings = SamplingParams(**{"max_tokens": 10, "ignore_eos": True} | params)  # type: ignore[arg-type]
        self.drafter.continuations[name] = self.reference.sequence(prompt, 40)
        self.requests[name] = self.engine.add_request(name, prompt, settings)
        finish(self.engine)
        request = self.requests[name]
        assert request.token_ids == self.drafter.continuations[name][: request.num_tokens]
        return request

    def check_drafts(self) -> None:
        self.drafter.assert_equals(self.reference, {name: r.token_ids for name, r in self.requests.items()})

    def target_rows(self) -> Callable[[], int]:
        """Count the rows that the target runs on from now on."""
        count, target = 0, self.engine.runner.target
        forward = target.forward

        def watched(token_ids: torch.Tensor, *others: object) -> torch.Tensor:
            nonlocal count
            count += len(token_ids)
            return forward(token_ids, *others)  # type: ignore[arg-type]

        target.forward = watched  # type: ignore[method-assign, assignment]

        def stop() -> int:
            target.forward = forward  # type: ignore[method-assign]
            return count

        return stop


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("num_equal", range(4))
@pytest.mark.parametrize("budget", [64, 16])
def test_drafts_after_a_hit_whose_continuation_differs_near_the_end_of_a_block(
    checkpoints: Callable[[str], Checkpoint], kind: str, num_equal: int, budget: int
) -> None:
    """The second prompt leaves the first one's text `num_equal` tokens after a block: a module looks further ahead."""
    chat = Chat(checkpoints(kind), KINDS[kind], budget)
    shared, others = random_tokens(20), random_tokens(12)
    chat.ask("first", [*shared, *others])
    different = [(token + 1) % 64 for token in others[num_equal:]]
    second = chat.ask("second", [*shared, *others[:num_equal], *different])
    assert second.num_cached_tokens == 20
    chat.check_drafts()


@pytest.mark.parametrize("first_depth", [0, 1, 3])
@pytest.mark.parametrize("second_depth", [0, 1, 3])
def test_hits_across_depths(
    checkpoints: Callable[[str], Checkpoint], kind: str, first_depth: int, second_depth: int
) -> None:
    """What a request at one depth has left serves one at another: the target's rows always."""
    most = KINDS[kind]
    chat = Chat(checkpoints(kind), most)
    first = chat.ask("first", random_tokens(18), num_speculative_tokens=min(first_depth, most))
    prompt = [*first.token_ids, *random_tokens(5)]
    stop = chat.target_rows()
    second = chat.ask("second", prompt, num_speculative_tokens=min(second_depth, most), max_tokens=3)
    num_rows = stop()
    assert second.num_cached_tokens in (24, 28)  # the newest row may have been computed with accepted drafts, or not
    assert num_rows <= len(prompt) - second.num_cached_tokens + 2 * (most + 1)
    chat.check_drafts()


@pytest.mark.parametrize("length", [4, 8, 20])
def test_a_wholly_cached_prompt_needs_no_forward(
    checkpoints: Callable[[str], Checkpoint], kind: str, length: int
) -> None:
    chat = Chat(checkpoints(kind), KINDS[kind])
    chat.ask("first", random_tokens(length))
    stop = chat.target_rows()
    again = chat.ask("again", random_tokens(length), max_tokens=1)
    assert (stop(), again.num_cached_tokens) == (0, length)
    chat.ask("and again", random_tokens(length))
    chat.check_drafts()


def test_only_equal_salts_share(checkpoints: Callable[[str], Checkpoint]) -> None:
    chat = Chat(checkpoints("llama"), 3)
    prompt = random_tokens(20)
    for name, salt, num_cached in [("a", None, 0), ("b", "x", 0), ("c", "", 0), ("d", "x", 20), ("e", None, 20)]:
        assert chat.ask(name, prompt, cache_salt=salt).num_cached_tokens == num_cached
    chat.engine.reset_prefix_cache()
    assert chat.ask("f", prompt).num_cached_tokens == 0


def test_a_reset_disturbs_nobody(checkpoints: Callable[[str], Checkpoint]) -> None:
    chat = Chat(checkpoints("llama"), 3)
    chat.ask("before", random_tokens(20))
    chat.drafter.continuations["running"] = chat.reference.sequence(random_tokens(20), 40)
    running = chat.engine.add_request("running", random_tokens(20), SamplingParams(max_tokens=20, ignore_eos=True))
    chat.engine.step()
    chat.engine.reset_prefix_cache()
    finish(chat.engine)
    assert running.token_ids == chat.drafter.continuations["running"][:40]
    assert chat.ask("after", random_tokens(20)).num_cached_tokens == 0
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in chat.engine.cache.pools)


def test_sharing_takes_no_more_blocks(checkpoints: Callable[[str], Checkpoint]) -> None:
    """Requests with the same prompt that start together compute it each; only what is published first is kept."""
    chat = Chat(checkpoints("llama"), 3, budget=128)
    prompt = random_tokens(32)
    for name in "abcd":
        chat.drafter.continuations[name] = chat.reference.sequence(prompt, 40)
        chat.engine.add_request(name, prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    chat.engine.step()
    tables = [chat.engine.cache.block_tables(name) for name in "abcd"]
    for group in range(2):
        num_shared = 7 if group else 8  # the last block's modules look beyond the prompt
        assert len({table[group][:num_shared] for table in tables}) == 1
    finish(chat.engine)


def test_nothing_is_shared_if_it_is_switched_off(checkpoints: Callable[[str], Checkpoint]) -> None:
    chat = Chat(checkpoints("llama"), 3)
    chat.engine.cache.is_shared = False
    for name in "ab":
        assert chat.ask(name, random_tokens(20)).num_cached_tokens == 0
