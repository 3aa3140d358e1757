"""Sliding windows without a model: what is given back and what a hit needs follow from one formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_layouts import FakeRequest, make_cache, make_layout, num_cached_rows, run, take_all_free_blocks
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cache.block_pool import RESERVED_BLOCK
from foredraft.cache.groups import CacheLayout
from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_index import CachedBlock

windows = st.integers(1, 12)
some_windows = st.lists(windows, min_size=1, max_size=3)


@st.composite
def long_requests(draw: st.DrawFn) -> tuple[CacheManager, FakeRequest]:
    """A request that has computed its rows in chunks, and gave back after each what is behind all windows."""
    modules = draw(st.lists(windows, max_size=3))
    size = draw(st.integers(1, 5))
    cache = make_cache(draw(some_windows), modules, num_blocks=200, block_size=size)
    depth = draw(st.integers(0, len(modules)))
    request = FakeRequest(cache, "long", range(draw(st.integers(1, 60))), depth=depth)
    end = draw(st.integers(1, len(request.token_ids)))
    assert request.start(end)
    for count in [*sorted(draw(st.lists(st.integers(1, end), max_size=4))), end]:
        request.compute(count)
        request.retain()
        cache.check_integrity()
    return cache, request


@given(long_requests())
def test_a_request_holds_its_windows_and_no_more(case: tuple[CacheManager, FakeRequest]) -> None:
    cache, request = case
    module_row = min(request.exact.num_exact_rows[: request.depth], default=0)
    for group, blocks in enumerate(cache.block_tables("long")):
        retention = cache.layout.groups[group].retention
        assert retention is not None
        next_row = module_row if group in cache.layout.module_groups else request.num_rows
        first_needed = max(0, next_row - retention)
        num_free = next((index for index, block in enumerate(blocks) if block != RESERVED_BLOCK), len(blocks))
        assert num_free * cache.block_size <= first_needed, "a row that is still needed is given back"
        assert (num_free + 1) * cache.block_size > min(first_needed, len(blocks) * cache.block_size - 1), (
            "rows too many"
        )
        assert RESERVED_BLOCK not in blocks[num_free:]


@given(long_requests())
def test_a_hit_exists_after_a_request_that_kept_its_windows_only(case: tuple[CacheManager, FakeRequest]) -> None:
    """All else is lost at once. Up to the end of the last block, if the request ends there; with rows in a further
    block, its windows may have left the last one that is full."""
    cache, request = case
    take_all_free_blocks(cache)
    request.end()
    end = request.num_rows // cache.block_size * cache.block_size
    target_groups = [cache.layout.groups[group] for group in cache.layout.target_groups]
    is_whole = all(
        group.first_kept_row(end) // cache.block_size >= group.first_kept_row(request.num_rows) // cache.block_size
        for group in target_groups
    )
    if is_whole:
        assert num_cached_rows(cache, request.token_ids)[0] == end
    assert is_whole or request.num_rows % cache.block_size


@given(long_requests())
def test_a_hit_exists_as_long_as_nothing_is_lost(case: tuple[CacheManager, FakeRequest]) -> None:
    cache, request = case
    request.end()
    end = request.num_rows // cache.block_size * cache.block_size
    for length in range(end + 1):
        expected = length // cache.block_size * cache.block_size
        assert num_cached_rows(cache, request.token_ids[:length])[0] == expected


@given(long_requests())
def test_modules_find_their_windows_too(case: tuple[CacheManager, FakeRequest]) -> None:
    """The next turn goes on where the modules of the last one had come to."""
    cache, request = case
    if request.depth == 0:
        return
    request.end()
    deepest = request.exact.num_exact_rows[request.depth - 1]
    target_rows, module_rows = num_cached_rows(cache, request.token_ids, depth=request.depth)
    assert module_rows == min(deepest // cache.block_size * cache.block_size, target_rows)


def test_a_hit_refers_to_the_window_only() -> None:
    cache = make_cache([4], [], num_blocks=40)
    run(cache, range(20))
    request = FakeRequest(cache, "next", range(30))
    assert request.start()
    tables = cache.block_tables("next")
    # The next row is 20 and sees rows 17, 18 and 19: blocks 8 and 9 of two rows. h0 keeps one row.
    assert [blocks.count(RESERVED_BLOCK) for blocks in tables] == [9, 8]
    assert cache.num_held_blocks("next") == (6, 7)


@pytest.mark.parametrize(("lost", "num_rows"), [(6, 20), (14, 20), (16, 16), (18, 18), (17, 16)])
def test_a_gap_in_a_window_ends_the_hit_and_one_behind_it_does_not(lost: int, num_rows: int) -> None:
    """The row after 20 sees rows 17 to 19, the one after 18 sees 15 to 17, the one after 16 sees 13 to 15."""
    cache = make_cache([4], [], num_blocks=40)
    run(cache, range(20))
    window = cache.layout.target_groups[1]
    (part,) = (part for part in parts_of(cache, window) if lost in part.node.token_ids)
    assert part.block is not None
    cache.pools[window].forget(part.block)
    cache._index.remove(part)
    assert num_cached_rows(cache, range(20))[0] == num_rows


def parts_of(cache: CacheManager, group: int) -> list[CachedBlock]:
    return [part for node in cache.cached_nodes() for part in node.parts.values() if part.group == group]


# -- modules that began in the middle --------------------------------------------------------------------------------


def first_exact_row(layout: CacheLayout, origin: int, module: int) -> int:
    """From which row on module number `module` (0-based) is exact if all begin at `origin`: windows add up."""
    reaches = [0 if shape.window is None else shape.window - 1 for shape in layout.modules[:module]]
    return origin + sum(reaches)


@given(
    module_windows=st.lists(st.sampled_from((None, 2, 3, 5)), min_size=1, max_size=3),
    size=st.integers(1, 4),
    num_rows=st.integers(8, 40),
    num_more=st.integers(0, 20),
    data=st.data(),
)
def test_rows_that_could_not_see_their_windows_are_not_published(
    module_windows: Sequence[int | None], size: int, num_rows: int, num_more: int, data: st.DataObject
) -> None:
    """After a spell without drafts the modules begin anew, as far back as `rebuild_rows` says."""
    layout = make_layout([None], module_windows)
    finite = [depth for depth in range(1, len(module_windows) + 1) if layout.rebuild_rows[depth] is not None]
    if not finite:
        return
    depth = data.draw(st.sampled_from(finite))
    cache = make_cache([None], module_windows, num_blocks=100, block_size=size)
    request = FakeRequest(cache, "restarted", range(num_rows + num_more), depth=depth)
    assert request.start()
    request.compute(num_rows, depth=0)
    origin = max(0, num_rows - (layout.rebuild_rows[depth] or 0))
    cache.renew_modules("restarted", origin, keep_before=False)
    request.exact = request.exact.restarted(origin, depth)
    request.compute()
    request.end()
    for group in layout.module_groups:
        for part in parts_of(cache, group):
            end = part.node.token_ids[-1] + 1  # tokens are counted
            for module in range(len(part.key[1])):
                if module in layout.groups[group].layers and origin:
                    assert end - size >= first_exact_row(layout, origin, module), "an inexact row is published"


def test_the_formula_of_rebuild_rows() -> None:
    assert make_layout([None], [4, 3, 2]).rebuild_rows == (0, 3 + 1, 3 + 2 + 2, 3 + 2 + 1 + 3)
    assert make_layout([None], [4, None, 2]).rebuild_rows == (0, 4, None, None)
    assert make_layout([4], [4, 3]).groups[0].retention == 3 + 2 + 2
    assert make_layout([4], [None]).groups[0].retention is None
    assert make_layout([4], []).groups[0].retention == 1
