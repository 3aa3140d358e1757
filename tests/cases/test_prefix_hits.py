"""What a request finds in the prefix cache, what it must not find, and that a hit changes neither tokens nor drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases.replay import (
    ALL_RIGHT,
    BLOCK,
    VOCAB_SIZE,
    Replay,
    assert_streams_alike,
    full_blocks,
    random_prompt,
)
from reference import Checkpoint
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.exactness import ExactRows
from foredraft.plan import StepPlan, StepResult


@pytest.mark.parametrize("length", [4, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 12])
@pytest.mark.parametrize("num_more", [0, 5], ids=["same again", "after a longer one"])
def test_a_prompt_that_is_wholly_cached(
    checkpoint: Checkpoint, depth: int, length: int, max_tokens: int, num_more: int
) -> None:
    """vllm-project/vllm#53706, InfiniTensor/InfiniLM#381, ml-explore/mlx-lm#1581."""
    prompt = random_prompt(length)
    replay = Replay(checkpoint, depth)
    cold = replay.ask("cold", prompt + random_prompt(num_more), max_tokens)
    assert cold.num_cached_tokens == 0
    replay.drafter.forwards.clear()
    request = replay.add("again", prompt, max_tokens)
    (committed,) = replay.step()
    assert len(committed.token_ids) == 1
    assert request.num_cached_tokens == full_blocks(length)
    targets = [forward.token_ids for forward in replay.drafter.forwards if forward.module is None]
    # The head runs on the cached h0; only a token after the last full block goes through the target.
    assert targets == ([tuple(prompt[8:])] if length == 9 else [])
    replay.run()
    replay.assert_right(request)
    replay.assert_drafts_right()
    assert replay.engine.stats.num_cached_tokens == full_blocks(length)
    assert replay.engine.stats.num_queried_tokens == 2 * length + num_more


@pytest.mark.parametrize("length", [5, 6, 7, 8])
@pytest.mark.parametrize("index", range(5))
def test_the_next_turn_hits_what_was_returned_and_nothing_beyond(llama: Checkpoint, length: int, index: int) -> None:
    """sgl-project/sglang#35694: tokens that were accepted behind a stop are not in the cache."""
    # Token 0 comes from the prefill, 1 to 3 are drafts, 4 is the bonus token.
    prompt = next(p for seed in range(99) if is_distinct(llama, p := random_prompt(length, seed)))
    continuation = llama.reference.sequence(prompt, 12)
    replay = Replay(llama, 3)
    first = replay.ask("first", prompt, 20, stop_token_ids=(continuation[length + index],))
    assert (first.finish_reason, len(first.output_token_ids)) == ("stop", index + 1)
    # The row of an accepted draft has been computed, that of the target's own token has not.
    num_rows = first.num_tokens - (first.token_depths[-1] == 0)
    assert replay.num_cached_rows(continuation) == full_blocks(num_rows)
    second = replay.ask("second", first.token_ids, 5)
    assert second.num_cached_tokens == full_blocks(num_rows)
    replay.assert_drafts_right()


def is_distinct(checkpoint: Checkpoint, prompt: list[int]) -> bool:
    continuation = checkpoint.reference.sequence(prompt, 5)[len(prompt) :][:5]
    return len(set(continuation)) == 5


@pytest.mark.parametrize("length", [5, 6, 8])
@pytest.mark.parametrize("num_right", range(4))
def test_a_rejected_continuation_is_not_found(checkpoint: Checkpoint, length: int, num_right: int) -> None:
    """vllm-project/vllm#18668: what is cached follows from what was verified, at once and to the row."""
    replay = Replay(checkpoint, 3)
    request = replay.add("a", random_prompt(length), 10, num_right=num_right)
    rejected: list[list[int]] = []
    while request.finish_reason is None:
        proposed = [*request.token_ids, *request.draft_token_ids]
        replay.step()
        rejected.append(proposed)
        computed = min(request.num_computed_tokens, request.num_tokens)
        assert replay.num_cached_rows(request.token_ids) == full_blocks(computed)
    for index, proposed in enumerate(rejected):
        agrees = 0
        while agrees < min(len(proposed), computed) and proposed[agrees] == request.token_ids[agrees]:
            agrees += 1
        assert agrees == len(proposed) or num_right < 3
        assert replay.num_cached_rows(proposed) == full_blocks(agrees)
        other = replay.ask(f"other {index}", proposed, 3)
        assert other.num_cached_tokens == full_blocks(agrees)
    replay.assert_drafts_right()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("num_same", "first_depth", "num_module_rows"), [(3, 3, 64), (0, 3, 60), (3, 0, 0)])
def test_drafts_after_a_hit_are_those_of_a_cold_start(
    checkpoint: Checkpoint, depth: int, num_same: int, first_depth: int, num_module_rows: int
) -> None:
    """vllm-project/vllm#47926: draft rows of restored tokens are there, or are computed again from the cached h0."""
    shared = random_prompt(64)
    first, second = shared + random_prompt(6, 1), shared + random_prompt(6, 1)[:num_same] + random_prompt(5, 2)
    drafts, rates = [], []
    for is_warm in (False, True):
        replay = Replay(checkpoint, depth)
        if is_warm:
            replay.ask("first", first, 8, num_speculative_tokens=min(depth, first_depth))
        replay.ask("own", second, 9, own_drafts=True)
        request = replay.ask("scripted", [*second[:-1], (second[-1] + 1) % VOCAB_SIZE], 9)
        replay.assert_drafts_right()
        drafts.append(replay.drafts_of("own"))
        rates.append(request.stats.mean_acceptance_length)
        hit = replay.requests["own"]
        assert hit.num_cached_tokens == (64 if is_warm else 0)
        # Module rows depend on tokens after their own: those of the last shared block may be others.
        needed = replay.engine.cache.layout.rebuild_rows[min(depth, replay.engine.scheduler.num_modules)]
        first_row = num_module_rows or (0 if needed is None else 64 - needed)
        assert replay.windows_of("own")[0].start == (first_row if is_warm else 0)
    assert drafts[0] == drafts[1]
    assert rates == [depth + 1, depth + 1]


@pytest.mark.parametrize("budget", [1024, 12])
@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_of_equal_prompts_in_a_batch(checkpoint: Checkpoint, depth: int, budget: int) -> None:
    """sgl-project/sglang#8726: in one batch `[p1, p2, p1]` draft alike, with shared blocks and without."""
    prompts = {"first": random_prompt(10), "other": random_prompt(10, 1), "again": random_prompt(10)}
    drafts: list[dict[str, list[tuple[int, ...]]]] = []
    for is_cached in (False, True):
        replay = Replay(
            checkpoint, depth, max_num_seqs=3, max_num_batched_tokens=budget, enable_prefix_caching=is_cached
        )
        requests = [replay.add(name, prompt, 9, own_drafts=True) for name, prompt in prompts.items()]
        while not all(request.draft_token_ids for request in requests):
            replay.step()
        shared = [set(replay.engine.cache.block_tables(name)[0][:2]) for name in prompts]
        assert len(shared[0] & shared[2]) == (2 if is_cached else 0)
        assert not shared[0] & shared[1]
        assert requests[2].num_cached_tokens == (8 if is_cached and budget == 12 else 0)
        replay.run()
        for request in requests:
            replay.assert_right(request)
        replay.assert_drafts_right()
        drafts.append({name: replay.drafts_of(name) for name in prompts})
        assert drafts[-1]["first"] == drafts[-1]["again"]
    assert drafts[0] == drafts[1]
    assert all(drafts[0].values())


def test_chats_that_share_the_system_text(checkpoint: Checkpoint, depth: int) -> None:
    """ml-explore/mlx-lm#1292: (S, U1), (S, U2), (S, U1) get 32 tokens each, those of a cold start."""
    system, user = random_prompt(13), [random_prompt(6, 1), random_prompt(7, 2)]
    replay = Replay(checkpoint, depth)
    hits = []
    for turn, index in enumerate((0, 1, 0)):
        request = replay.ask(f"{turn}", system + user[index], 32, ignore_eos=True, num_right=turn)
        assert len(request.output_token_ids) == 32
        hits.append(request.num_cached_tokens)
    assert hits == [0, full_blocks(13), full_blocks(13 + 6)]
    replay.assert_drafts_right()


def test_a_hit_needs_no_more_rows_than_windows_keep(checkpoints: Callable[[str], Checkpoint], depth: int) -> None:
    """vllm-project/vllm#44082, vllm-project/vllm#53951: what is kept is enough for what is looked for."""
    checkpoint = checkpoints("mistral")
    replay = Replay(checkpoint, depth, num_blocks=17, max_num_seqs=1)
    prompt = random_prompt(24)
    for turn in range(5):
        request = replay.ask(f"{turn}", prompt, 8)
        assert request.num_cached_tokens == (24 if turn else 0)
        replay.ask(f"other {turn}", random_prompt(25, turn), 4)
    # Others have taken the places of rows that lie behind the windows, so that whoever looks for them finds none.
    nodes = replay.engine.cache.match(prompt, None, 0).nodes
    cached = [[i for i, node in enumerate(nodes) if (group, ()) in node.parts] for group in (0, 1)]
    assert cached[0] == [0, 1, 2, 3, 4, 5]  # h0
    assert {4, 5} <= set(cached[1]) <= {3, 4, 5}
    first_kept = [group.first_kept_row(24) // BLOCK for group in replay.engine.cache.layout.groups]
    assert first_kept == [0, 4, 4]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_hits_are_counted_once_after_admission(checkpoints: Callable[[str], Checkpoint], kind: str) -> None:
    """NVIDIA/Megatron-LM#6852: neither a refused admission nor a return from preemption counts."""
    replay = Replay(checkpoints(kind), 1, num_blocks=11, max_num_seqs=2)
    long = replay.add("long", random_prompt(30), 10, num_right=0)
    replay.step()
    waiting = replay.add("waiting", random_prompt(30)[:12] + random_prompt(12, 1), 12)
    stats, num_refused = replay.engine.stats, 0
    while waiting.num_cached_tokens is None:
        assert (stats.num_queried_tokens, stats.num_cached_tokens) == (30, 0)
        replay.step()
        num_refused += waiting.num_cached_tokens is None
    assert num_refused > 5
    assert waiting.num_cached_tokens == 12
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (30 + 24, 12)
    replay.engine.scheduler.preempt(waiting)
    replay.run()
    assert waiting.num_cached_tokens == 12
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (30 + 24, 12)
    assert replay.engine.scheduler.num_preemptions == 1
    replay.assert_right(long)
    replay.assert_right(waiting)


class Colliding(int):
    """A token id whose hash is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_no_hit_across_salts_or_collisions(checkpoint: Checkpoint) -> None:
    """vllm-project/vllm#44701, openvinotoolkit/openvino.genai#3722: salts are kept apart, tokens are compared."""
    replay = Replay(checkpoint, 3)
    prompt = random_prompt(12)
    for salt in (None, "X", "", "None", "X\0"):
        cold = replay.ask(f"cold {salt!r}", prompt, 6, cache_salt=salt)
        warm = replay.ask(f"warm {salt!r}", prompt, 6, cache_salt=salt)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 12)
    first, second = ([Colliding(token_id) for token_id in random_prompt(12, seed)] for seed in (1, 2))
    assert hash(tuple(first)) == hash(tuple(second))
    half = first[:4] + second[4:]
    hits = [replay.ask(f"{i}", p, 6).num_cached_tokens for i, p in enumerate((first, second, half, first, second))]
    assert hits == [0, 0, 4, 12, 12]
    replay.assert_drafts_right()


@pytest.mark.parametrize("num_read", [1, 3, 5])
@pytest.mark.parametrize("depth", [0, 3])
def test_the_next_chat_after_a_stream_was_left(tmp_path: Path, depth: int, num_read: int) -> None:
    """madroidmaq/mlx-omni-server#92: the same prompt and a longer one, after a stream that was closed early."""
    settings = {"dtype": "float32", "device": "cpu", "block_size": BLOCK, "num_blocks": 64, "max_num_seqs": 2}
    llm = LLM(tiny_llama(tmp_path), num_speculative_tokens=depth, **settings)
    prompts = [random_prompt(10), random_prompt(10) + random_prompt(9, 1)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    cold = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        cold += llm.generate([prompt], params)
    llm.reset_prefix_cache()
    stream = llm.stream(prompts[0], params)
    read = [next(stream).token_ids for _ in range(num_read)]
    stream.close()
    num_rows = 10 + sum(map(len, read)) - 1
    left = [*prompts[0], *cold[0].token_ids]
    assert llm.engine.cache.match(left, None, 0).num_rows == full_blocks(num_rows)
    for prompt, expected, num_cached in zip(prompts, cold, (8, 8)):
        (output,) = llm.generate([prompt], params)
        assert (output.token_ids, output.num_cached_tokens) == (expected.token_ids, num_cached)
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.cache.pools)
    llm.engine.cache.check_integrity()
    for prompt in prompts:
        assert_streams_alike(llm, prompt, params)


@pytest.mark.parametrize("depth", [0, 3])
def test_nothing_is_read_but_a_requests_own_rows(checkpoint: Checkpoint, depth: int) -> None:
    """ml-explore/mlx-lm#975: after a partial hit, every row that is not of this chat is made unusable."""
    system = random_prompt(14)
    replay = Replay(checkpoint, depth)
    replay.ask("earlier", system + random_prompt(9, 1), 20)
    execute, storage = replay.engine.runner.execute, replay.engine.runner.storage

    def execute_among_ruins(plan: StepPlan) -> StepResult:
        (own,) = plan.requests
        exact = own.window.exact if own.window else ExactRows.none(3)
        # The rows of the last cycle become exact as far as its drafts are accepted, which this step is to find out.
        written = [max(count, exact.cycle.num_computed_tokens if exact.cycle else 0) for count in exact.num_exact_rows]
        rows = [(kv, group, own.first_row) for kv, group in zip(storage.target, storage.layout.group_of_layer)]
        rows += [(kv, group, end) for kv, group, end in zip(storage.modules, storage.layout.group_of_module, written)]
        parts = [(tensor, group, end) for kv, group, end in rows for tensor in (kv.key, kv.value)]
        for tensor, group, end in [*parts, (storage.hidden, storage.layout.hidden_group, own.first_row)]:
            is_foreign = torch.ones(len(tensor), dtype=torch.bool)
            is_foreign[storage.slots(own.blocks[group], end)] = False
            tensor[is_foreign] = torch.nan
        return execute(plan)

    replay.engine.runner.execute = execute_among_ruins  # type: ignore[method-assign]
    request = replay.ask("next", system + random_prompt(8, 2), 20, script=[0, 1, 2, 3, 1, 0])
    assert request.num_cached_tokens == full_blocks(14)
    replay.assert_drafts_right("next")


def test_drafts_all_right_are_accepted_after_any_hit(checkpoint: Checkpoint) -> None:
    """vllm-project/vllm#47926 again, over hits of every length: acceptance is that of a cold start."""
    replay = Replay(checkpoint, 3, num_blocks=200)
    prompt = random_prompt(22)
    replay.ask("cold", prompt, 9)
    for length in range(1, 23):
        request = replay.ask(f"{length}", prompt[:length], 9, num_right=ALL_RIGHT)
        assert request.num_cached_tokens == full_blocks(length)
        assert request.stats.mean_acceptance_length == 4.0
    replay.assert_drafts_right()
