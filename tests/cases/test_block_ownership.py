"""Who holds which block, for how long, and that nobody else writes into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases.replay import BLOCK, Replay, assert_unchanged, full_blocks, num_blocks_for, random_prompt
from reference import Checkpoint

from foredraft.errors import RequestError
from foredraft.request import RequestStatus

MIB = 1 / 1024


@pytest.mark.parametrize("length", [6, 7, 8])
def test_a_block_that_is_shared_in_part_is_not_written(checkpoint: Checkpoint, depth: int, length: int) -> None:
    """NVIDIA/Megatron-LM#7061, item 2: B shares 6 tokens with A, which is running; chunks do not end on blocks."""
    budget = 2 * (depth + 1) + 3
    replay = Replay(checkpoint, depth, max_num_seqs=2, max_num_batched_tokens=budget)
    first = replay.add("A", random_prompt(length), 20, num_right=1)
    while first.num_computed_tokens < length:
        replay.step()
    second = replay.add("B", random_prompt(length)[:6] + random_prompt(9, 1), 6, num_right=1)
    tables = replay.engine.cache.block_tables
    while second.finish_reason is None:
        before = replay.counted_rows(first)
        replay.step()
        assert_unchanged(before, replay.counted_rows(first))
        if second.status is RequestStatus.RUNNING:
            assert second.num_cached_tokens == 4
            groups = replay.engine.cache.layout.target_groups
            shared = [set(tables("A")[group]) & set(tables("B")[group]) - {0} for group in groups]
            assert all(len(blocks) <= 1 for blocks in shared)
            assert tables("A")[groups[0]][0] in shared[0]
    assert first.finish_reason is None
    replay.run()
    replay.assert_right(first)
    replay.assert_right(second)
    replay.assert_drafts_right()


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])
def test_blocks_for_a_prompt_with_drafts_across_the_border(
    checkpoints: Callable[[str], Checkpoint], kind: str, length: int, num_right: int
) -> None:
    """NVIDIA/TensorRT-LLM#18554: ceil((n + K) / block) blocks, in order, the first one kept."""
    replay = Replay(checkpoints(kind), 3)
    request = replay.ask("a", random_prompt(length), 20, num_right=num_right)
    largest: list[int] = [0, 0]
    tables: list[tuple[int, ...]] = [(), ()]
    for plan in replay.plans_of("a"):
        num_rows = plan.num_tokens + plan.num_draft_tokens
        assert plan.first_row + len(plan.token_ids) == num_rows
        # Near the end fewer drafts are made. A single module writes a row for each further draft.
        num_drafts = min(3, request.max_total_tokens - plan.num_tokens - 2)
        num_further = max(0, num_drafts - 1) if kind == "glm4_moe" else 0
        num_module_rows = min(num_rows + num_further, request.max_total_tokens) if num_drafts > 0 else 0
        for group, (rows, table) in enumerate(zip((num_rows, num_module_rows), plan.blocks)):
            largest[group] = max(largest[group], num_blocks_for(rows))
            assert len(table) == largest[group]
            assert len(set(table)) == len(table)
            assert 0 not in table
            assert table[: len(tables[group])] == tables[group]
            tables[group] = table
    assert len(replay.plans_of("a")) == 1 + -(-19 // (num_right + 1))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("num_right", [0, 3])
def test_writes_stay_in_a_requests_own_blocks(checkpoint: Checkpoint, length: int, num_right: int) -> None:
    """NVIDIA/TensorRT-LLM#16280: at every length around a border, in a pool without a spare block, each row is
    written to a block of its request (`Replay` looks at every write)."""
    num_blocks = 1 + num_blocks_for(length + 20)
    replay = Replay(checkpoint, 3, num_blocks=num_blocks, max_num_seqs=2)
    request = replay.ask("a", random_prompt(length), 20, num_right=num_right)
    written = {slot for forward in replay.drafter.forwards for slots in forward.slots.values() for slot in slots}
    assert 0 <= min(written) < max(written) < num_blocks * BLOCK
    assert len(request.output_token_ids) == 20


@pytest.mark.parametrize("depth", [0, 3])
def test_usage_over_fifty_requests_in_a_row(checkpoint: Checkpoint, depth: int) -> None:
    """xLLM-AI/xllm#828: used blocks never pass those there are, and are back at none after every request."""
    replay = Replay(checkpoint, depth, num_blocks=12, max_num_seqs=2)
    highest = 0.0
    for index in range(50):
        prompt = random_prompt(9, index % 2) + random_prompt(index % 6, index % 5)
        request = replay.add(f"{index}", prompt, 5, num_right=index % 4)
        while request.finish_reason is None:
            replay.step()
            usage = [1 - free / total for free, total in zip(replay.num_free_blocks(), replay.free_at_start)]
            assert all(0 <= share <= 1 for share in usage)
            highest = max(highest, *usage)
        replay.assert_drained()
        replay.assert_right(request)
    assert 0.3 < highest <= 1
    assert replay.engine.stats.num_cached_tokens > 0


@pytest.mark.parametrize("host", [0, MIB])
def test_two_hundred_requests_leak_no_block(checkpoint: Checkpoint, host: float) -> None:
    """kekzl/imp#1115: stops, limits and aborts over 20 blocks; all are served, and all blocks are free again."""
    replay = Replay(checkpoint, 3, num_blocks=20, max_num_seqs=5, max_num_batched_tokens=32, cpu_cache_gib=host)
    requests = []
    for index in range(200):
        prompt = random_prompt(8, index % 3)[: 3 + index % 6] + random_prompt(index % 4, index % 2)
        continuation = replay.reference.sequence(prompt, 12)[len(prompt) :]
        stops = (continuation[index % 5],) if index % 3 == 0 else ()
        requests.append(replay.add(f"{index}", prompt, 1 + index % 8, num_right=index % 4, stop_token_ids=stops))
    to_abort = iter(range(4, 200, 7))
    while replay.engine.has_unfinished:
        replay.step()
        if replay.engine.stats.num_steps % 2 == 0:
            replay.engine.abort(f"{next(to_abort, -1)}")
    replay.assert_drained()
    reasons = [request.finish_reason for request in requests]
    assert {reason: reasons.count(reason) > 20 for reason in set(reasons)} == {
        "stop": True,
        "length": True,
        "abort": True,
    }
    for request in requests:
        if request.finish_reason != "abort":
            replay.assert_right(request)
    assert replay.engine.stats.num_cached_tokens > 100
    assert replay.engine.stats.num_generated_tokens == sum(len(request.output_token_ids) for request in requests)


@pytest.mark.parametrize("host", [0, MIB])
@pytest.mark.parametrize("depth", [0, 3])
def test_eviction_spares_blocks_in_use(checkpoint: Checkpoint, depth: int, host: float) -> None:
    """Avarok-Cybersecurity/atlas#373: A runs on a cached prefix while B and C need every other block."""
    replay = Replay(checkpoint, depth, num_blocks=17, max_num_seqs=2, cpu_cache_gib=host)
    prefix = random_prompt(16)
    earlier = replay.ask("earlier", prefix + random_prompt(9, 1), 6)
    first = replay.add("A", prefix + random_prompt(2, 2), 12, num_right=0)
    replay.step()
    assert first.num_cached_tokens == 16
    num_found = [replay.num_cached_rows(earlier.token_ids)]
    others = [replay.add(name, random_prompt(17, seed), 7, num_right=1) for seed, name in enumerate("BC")]
    while not all(other.finish_reason for other in others):
        before = [] if first.finish_reason else replay.counted_rows(first)
        replay.step()
        num_found.append(replay.num_cached_rows(earlier.token_ids))
        if first.finish_reason is None:
            assert_unchanged(before, replay.counted_rows(first))
    replay.run()
    # What nobody used is gone from the device, and from the cache if there is no host memory.
    assert (num_found[0], num_found[-1] >= 28) == (28, host > 0)
    nodes = replay.engine.cache.match(earlier.token_ids, None, 0).nodes
    on_device = [all(part.block is not None for part in node.parts.values()) for node in nodes]
    assert False in on_device or host == 0
    for request in (first, *others):
        replay.assert_right(request)
    replay.assert_drafts_right()
    again = replay.ask("again", prefix + random_prompt(9, 1), 6)
    assert again.num_cached_tokens == (24 if host else full_blocks(min(24, num_found[-1])))


@pytest.mark.parametrize("host", [0, MIB])
def test_decoding_takes_cached_blocks(checkpoint: Checkpoint, host: float) -> None:
    """Avarok-Cybersecurity/atlas#1114: with every block cached and free, each step of a decode still finds its room."""
    replay = Replay(checkpoint, 3, num_blocks=17, max_num_seqs=2, cpu_cache_gib=host)
    pools = replay.engine.cache.pools
    index = 0
    # The last blocks of a request are seldom full, and are handed out first.
    while any(len(pool.cached_blocks()) < pool.num_usable_blocks - 2 for pool in pools):
        replay.ask(f"{index}", random_prompt(13 + index % 4, index), 9)
        index += 1
        assert index < 20
    replay.plans.clear()
    prompt = random_prompt(5, 77)
    request = replay.ask("late", prompt, 49)
    assert len(replay.plans) == 1 + 48 // 4
    assert request.stats.mean_acceptance_length == 4.0
    assert replay.engine.stats.num_preemptions == 0
    replay.assert_drafts_right()


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_refused_requests_hold_nothing(checkpoints: Callable[[str], Checkpoint], kind: str) -> None:
    """jundot/omlx#1450: 20 prompts that are cached but too long, and one that has to wait for 20 steps."""
    replay = Replay(checkpoints(kind), 1, num_blocks=13, max_num_seqs=2)
    prompt = random_prompt(24)
    replay.ask("earlier", prompt, 4)
    pools = replay.engine.cache.pools
    cached = [pool.cached_blocks() for pool in pools]
    for index in range(20):
        with pytest.raises(RequestError, match=r"48 tokens; max_model_len=48 leaves room for 47"):
            replay.add(f"long {index}", prompt + random_prompt(24, 1))
        assert [pool.cached_blocks() for pool in pools] == cached
        replay.assert_drained()
    assert replay.engine.stats.num_requests == 1

    running = replay.add("running", random_prompt(23, 2), 24, num_right=0)
    replay.step()
    waiting = replay.add("waiting", prompt + random_prompt(16, 3), 4)
    num_refused = 0
    while waiting.num_cached_tokens is None:
        free = replay.num_free_blocks()
        held = replay.engine.cache.num_held_blocks("running")
        assert free == [total - count for total, count in zip(replay.free_at_start, held)]
        replay.step()
        num_refused += waiting.num_cached_tokens is None
        if running.finish_reason is not None:
            break
    assert num_refused >= 20
    replay.run()
    for request in (running, waiting):
        replay.assert_right(request)
