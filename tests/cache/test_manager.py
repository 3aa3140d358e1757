"""The cache manager without a model: room, sharing, what is lost first, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_layouts import FakeRequest, make_cache, num_cached_rows, run, take_all_free_blocks
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cache.block_pool import RESERVED_BLOCK
from foredraft.cache.block_tables import RowDemand
from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_index import PrefixNode
from foredraft.cache.prefix_match import PrefixMatch

A, B, C = ([letter * 10 + number for number in range(10)] for letter in (1, 2, 3))
"""Three sequences of five blocks that have nothing in common."""


def state(cache: CacheManager) -> object:
    """All that an event could change."""
    pools = (*cache.pools, *cache._host_pools)
    return (
        [(pool.num_free_blocks, pool.has_blank_block, pool.cached_blocks(), list(pool.contents)) for pool in pools],
        [[pool.is_free(block) for block in range(pool.num_blocks)] for pool in pools],
        [(node, node.num_users, {k: (p.block, p.host_block) for k, p in node.parts.items()}) for node in nodes(cache)],
        {name: cache.block_tables(name) for name in cache._tables},
        list(cache._copies),
    )


def nodes(cache: CacheManager) -> list[PrefixNode]:
    return list(cache.cached_nodes())


# -- room: all or nothing --------------------------------------------------------------------------------------------

windows = st.sampled_from((None, 1, 3, 4))
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@st.composite
def used_caches(draw: st.DrawFn) -> CacheManager:
    """A small cache in which requests have come and gone, and some still run."""
    cache = make_cache(
        draw(st.lists(windows, min_size=1, max_size=2)),
        draw(st.lists(windows, max_size=2)),
        num_blocks=draw(st.integers(8, 14)),
        num_host_blocks=draw(st.sampled_from((0, 3, 9))),
    )
    most = len(cache.layout.modules)
    for number in range(draw(st.integers(0, 5))):
        request = FakeRequest(cache, f"r{number}", draw(prompts), depth=draw(st.integers(0, most)))
        if request.start():
            request.compute()
            request.retain()
            if draw(st.booleans()):
                request.end()
    cache.take_copies()
    return cache


def num_wanted(cache: CacheManager, match: PrefixMatch, demand: RowDemand, group: int) -> int:
    """Blocks of a group that a request must get which are free now."""
    is_module = group in cache.layout.module_groups
    parts = dict(
        zip((*cache.layout.target_groups, *cache.layout.module_groups), (*match.target_parts, *match.module_parts))
    )
    keeps_all = cache.layout.groups[group].retention is None
    rows = [demand.target_end, demand.target_total, demand.module_end, demand.module_total][2 * is_module + keeps_all]
    num_matched = match.num_module_rows if is_module else match.num_rows
    num_fresh = max(0, -(-rows // cache.block_size) - num_matched // cache.block_size)
    is_held = [part.block is not None and not cache.pools[group].is_free(part.block) for part in parts[group].values()]
    return num_fresh + len(is_held) - sum(is_held)


@given(
    cache=used_caches(),
    prompt=prompts,
    depth=st.integers(0, 2),
    ends=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
def test_a_request_gets_all_that_it_needs_or_changes_nothing(
    cache: CacheManager, prompt: list[int], depth: int, ends: list[int]
) -> None:
    depth = min(depth, len(cache.layout.modules))
    match = cache.match(prompt, None, depth)
    demand = RowDemand(ends[0], ends[1], ends[0] + ends[2], ends[1] + ends[3])
    groups = range(len(cache.pools))
    has_room = all(num_wanted(cache, match, demand, g) <= cache.pools[g].num_free_blocks for g in groups)
    before = state(cache)
    assert cache.admit("new", None, match, demand) == has_room
    if has_room:
        tables = cache.block_tables("new")
        for group in cache.layout.target_groups:
            assert len(tables[group]) * cache.block_size >= max(demand.target_end, match.num_rows)
        for group in cache.layout.module_groups:
            assert len(tables[group]) * cache.block_size >= max(demand.module_end, match.num_module_rows)
    else:
        assert state(cache) == before
    cache.check_integrity()


@given(cache=used_caches(), ends=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_a_running_request_gets_all_the_room_that_it_asks_for_or_none(
    cache: CacheManager, ends: tuple[int, int]
) -> None:
    for name in list(cache._tables):
        before, tables = state(cache), cache.block_tables(name)
        wanted = [
            max(0, -(-ends[group in cache.layout.module_groups] // cache.block_size) - len(blocks))
            for group, blocks in enumerate(tables)
        ]
        has_room = all(count <= pool.num_free_blocks for count, pool in zip(wanted, cache.pools))
        assert cache.reserve(name, *ends) == has_room
        after = cache.block_tables(name)
        if has_room:
            assert [len(blocks) for blocks in after] == [len(old) + count for old, count in zip(tables, wanted)]
            assert all(new[: len(old)] == old for new, old in zip(after, tables))
        else:
            assert state(cache) == before
        cache.check_integrity()


def test_one_group_without_room_keeps_the_others_as_they_are() -> None:
    cache = make_cache(modules=[None], num_blocks=6)
    hungry = FakeRequest(cache, "hungry", A[:4], depth=1)
    assert cache.admit("hungry", None, hungry.match(), RowDemand(4, 10, 4, 10))
    before = state(cache)
    assert cache.pools[0].num_free_blocks == 3
    assert not FakeRequest(cache, "second", B[:4], depth=1).start()
    assert not cache.reserve("hungry", 6, 12)
    assert state(cache) == before
    assert FakeRequest(cache, "second", B[:4], depth=0).start()


def test_cached_blocks_that_a_hit_uses_are_not_counted_as_room() -> None:
    cache = make_cache(num_blocks=6)
    run(cache, A[:8])
    assert not FakeRequest(cache, "more", [*A[:8], *B[:4]]).start(), "four cached blocks and two more are six of five"
    assert FakeRequest(cache, "one", [*A[:8], *B[:2]]).start()
    assert cache.pools[0].num_free_blocks == 0


def test_blocks_that_others_hold_cost_no_room() -> None:
    cache = make_cache(num_blocks=6)
    first = FakeRequest(cache, "first", A[:8])
    assert first.start()
    first.compute()
    assert cache.pools[0].num_free_blocks == 1
    assert FakeRequest(cache, "second", [*A[:8], *B[:2]]).start()
    assert FakeRequest(cache, "third", A[:8]).start()
    cache.check_integrity()


# -- what is lost first ----------------------------------------------------------------------------------------------


def squeeze(cache: CacheManager, num_blocks: int) -> None:
    """A request takes so many blocks and goes, and nobody will ask for what it had."""
    assert cache.admit("squeeze", None, cache.match([], None, 0), RowDemand(num_blocks * 2, 0, num_blocks * 2, 0))
    cache.release("squeeze")


def test_the_end_of_a_sequence_is_lost_before_its_beginning() -> None:
    cache = make_cache(num_blocks=6)
    run(cache, A)
    left = []
    for num_blocks in range(6):
        squeeze(cache, num_blocks)
        left.append(num_cached_rows(cache, A)[0])
    assert left == [10, 8, 6, 4, 2, 0]


def test_the_least_recently_used_is_lost_first() -> None:
    cache = make_cache(num_blocks=11)
    run(cache, A)
    run(cache, B)
    squeeze(cache, 5)
    assert (num_cached_rows(cache, A)[0], num_cached_rows(cache, B)[0]) == (0, 10)
    assert run(cache, C) == 0
    assert run(cache, B) == 10  # B is now the latest
    squeeze(cache, 5)
    assert (num_cached_rows(cache, B)[0], num_cached_rows(cache, C)[0]) == (10, 0)


def test_blocks_that_hold_nothing_of_use_go_first() -> None:
    cache = make_cache(num_blocks=11)
    run(cache, A)
    squeeze(cache, 5)
    assert num_cached_rows(cache, A)[0] == 10
    squeeze(cache, 6)
    assert num_cached_rows(cache, A)[0] == 8


def test_what_a_running_request_holds_is_not_lost() -> None:
    cache = make_cache(num_blocks=11)
    request = FakeRequest(cache, "running", A)
    assert request.start()
    request.compute()
    run(cache, B)
    take_all_free_blocks(cache)
    assert (num_cached_rows(cache, A)[0], num_cached_rows(cache, B)[0]) == (10, 0)


# -- salts and modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [None, "", "x", "y"])
def test_only_requests_of_the_same_salt_share(salt: str | None) -> None:
    cache = make_cache(modules=[None])
    run(cache, A, depth=1, salt=salt)
    for other in (None, "", "x", "y"):
        assert num_cached_rows(cache, A, depth=1, salt=other) == ((10, 8) if other == salt else (0, 0))


@pytest.mark.parametrize("published", [1, 2, 3])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_deeper_module_blocks_serve_shallower_requests_and_not_the_other_way(published: int, wanted: int) -> None:
    cache = make_cache(modules=[None] * 3, num_blocks=40)
    tokens = [*A, *B]
    run(cache, tokens, depth=published)
    target_rows, module_rows = num_cached_rows(cache, tokens, depth=wanted)
    assert target_rows == 20
    assert module_rows == (0 if wanted > published else (20 - max(wanted, 1)) // 2 * 2)
    if module_rows:
        assert cache.match(tokens, None, wanted).module_depth >= wanted


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_agreeing", range(5))
def test_module_blocks_need_as_many_equal_tokens_after_them_as_modules_run(depth: int, num_agreeing: int) -> None:
    """Blocks end at rows 2, 4, 6, 8; the sequences part after row 4 + num_agreeing."""
    cache = make_cache(modules=[None] * 3)
    run(cache, A, depth=depth)
    end = 4 + num_agreeing
    target_rows, module_rows = num_cached_rows(cache, [*A[:end], *C], depth=depth)
    assert target_rows == end // 2 * 2
    assert module_rows == (end - depth) // 2 * 2


def test_two_continuations_of_one_block_are_kept_side_by_side() -> None:
    cache = make_cache(modules=[None] * 2)
    run(cache, [*A[:4], *B[:4]], depth=2)
    run(cache, [*A[:4], *C[:4]], depth=2)
    for other in (B, C):
        assert num_cached_rows(cache, [*A[:4], *other[:4]], depth=2) == (8, 6)
    (first, second) = (cache.match([*A[:4], *other[:4]], None, 2).module_parts[0][1] for other in (B, C))
    assert first is not second
    assert first.block != second.block


def test_modules_are_not_looked_for_where_none_run() -> None:
    cache = make_cache(modules=[None] * 2)
    run(cache, A, depth=2)
    match = cache.match(A, None, 0)
    assert (match.num_rows, match.num_module_rows, match.module_depth) == (10, 0, 0)
    assert match.module_parts == ({},)


def test_a_request_without_drafts_leaves_the_target_s_rows_only() -> None:
    cache = make_cache(modules=[None] * 2)
    run(cache, A, depth=0)
    assert num_cached_rows(cache, A, depth=2) == (10, 0)


# -- sharing ---------------------------------------------------------------------------------------------------------


def together(cache: CacheManager, count: int, tokens: Sequence[int], depth: int) -> list[FakeRequest]:
    """Requests that start before any of them has computed a row."""
    requests = [FakeRequest(cache, f"r{number}", tokens, depth=depth) for number in range(count)]
    assert all(request.start() for request in requests)
    return requests


def test_rows_that_two_requests_have_computed_are_kept_once() -> None:
    cache = make_cache(modules=[None] * 2)
    first, second = together(cache, 2, A, depth=2)
    assert not {*cache.block_tables("r0")[0]} & {*cache.block_tables("r1")[0]}
    free_before = [pool.num_free_blocks for pool in cache.pools]
    for request in (first, second):
        request.compute()
        cache.check_integrity()
    assert cache.block_tables("r0")[0] == cache.block_tables("r1")[0]
    assert cache.block_tables("r0")[1][:4] == cache.block_tables("r1")[1][:4]
    assert [pool.num_free_blocks for pool in cache.pools] == [free_before[0] + 5, free_before[1] + 4]
    first.end()
    second.end()
    cache.check_integrity()
    assert num_cached_rows(cache, A, depth=2) == (10, 8)


def test_a_rise_in_depth_takes_fresh_blocks_in_place_of_shared_ones() -> None:
    cache = make_cache(modules=[None] * 2)
    request, other = together(cache, 2, A, depth=1)
    request.compute()
    other.compute()
    assert cache.num_shared_module_rows("r0") == 8
    before = cache.block_tables("r0")[1]
    assert cache.renew_modules("r0", 3, keep_before=True) == 2
    assert cache.block_tables("r0")[1] == before[:1]
    assert cache.num_shared_module_rows("r0") == 2
    assert cache.reserve("r0", 10, 10)
    assert not {*cache.block_tables("r0")[1][1:]} & {*cache.block_tables("r1")[1]}
    assert cache.block_tables("r1")[1][:4] == before[:4]
    cache.check_integrity()


def test_modules_that_begin_anew_hold_nothing_before_that() -> None:
    cache = make_cache([3], [3], num_blocks=20)
    (request,) = together(cache, 1, A, depth=1)
    request.compute()
    module_group = cache.layout.module_groups[0]
    assert cache.renew_modules("r0", 5, keep_before=False) == 4
    assert cache.block_tables("r0")[module_group] == (RESERVED_BLOCK, RESERVED_BLOCK)
    assert cache.num_held_blocks("r0")[module_group] == 0
    assert cache.reserve("r0", 10, 10)
    assert RESERVED_BLOCK not in cache.block_tables("r0")[module_group][2:]
    cache.check_integrity()


# -- nothing is left behind ------------------------------------------------------------------------------------------


@given(
    requests=st.lists(st.tuples(prompts, st.sampled_from((None, "x", "y", "z")), st.integers(0, 2)), max_size=12),
    num_host_blocks=st.sampled_from((0, 4)),
    window=st.sampled_from((None, 3)),
)
def test_nothing_is_left_of_many_prompts_once_all_are_lost(
    requests: list[tuple[list[int], str | None, int]], num_host_blocks: int, window: int | None
) -> None:
    cache = make_cache([window], [window] * 2, num_host_blocks=num_host_blocks)
    for prompt, salt, depth in requests:
        run(cache, prompt, depth=depth, salt=salt)
    take_all_free_blocks(cache)
    for host in cache._host_pools:
        host.release(host.allocate(host.num_free_blocks))
    cache.check_integrity()
    assert nodes(cache) == []
    assert cache._index._roots == {}
    assert cache._tables == {}


def test_a_running_request_keeps_its_place_in_the_tree_only_as_long_as_it_runs() -> None:
    cache = make_cache([2], [], num_blocks=6)
    request = FakeRequest(cache, "long", [*A, *B, *C])
    assert request.start(2)
    for end in range(2, 31, 2):
        request.compute(end)
        request.retain()
        squeeze(cache, 3)
        cache.check_integrity()
    assert num_cached_rows(cache, [*A, *B, *C])[0] == 30
    request.end()
    take_all_free_blocks(cache)
    assert nodes(cache) == []
    assert cache._index._roots == {}


def test_a_reset_forgets_all_but_takes_nothing_from_those_that_run() -> None:
    cache = make_cache(modules=[None], num_host_blocks=30)
    run(cache, B, depth=1)
    take_all_free_blocks(cache)
    (request,) = together(cache, 1, A, depth=1)
    request.compute(6)
    tables = cache.block_tables("r0")
    cache.reset()
    cache.check_integrity()
    assert cache.block_tables("r0") == tables
    assert num_cached_rows(cache, A, depth=1) == num_cached_rows(cache, B, depth=1) == (0, 0)
    request.compute()
    assert num_cached_rows(cache, A, depth=1) == (0, 0), "rows from before the reset are found again"
    run(cache, A, depth=1)
    request.end()
    cache.check_integrity()
    assert num_cached_rows(cache, A, depth=1) == (10, 8)
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in cache.pools)


def test_without_sharing_nothing_is_kept() -> None:
    cache = make_cache(modules=[None])
    cache.is_shared = False
    run(cache, A, depth=1)
    assert run(cache, A, depth=1) == 0
    assert nodes(cache) == []
