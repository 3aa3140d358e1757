"""The host's blocks without a model: what moves there and back, in which order, and that there are never too many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_layouts import FakeRequest, make_cache, num_cached_rows, run
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cache.block_tables import RowDemand
from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_index import CachedBlock, PrefixNode
from foredraft.plan import CopyKind

A, B, C, D = ([letter * 10 + number for number in range(10)] for letter in (1, 2, 3, 4))
"""Sequences of five blocks that have nothing in common."""


class Labels:
    """What lies in each block, on the device and on the host: a label in place of rows."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.device: dict[tuple[int, int], object] = {}
        self.host: dict[tuple[int, int], object] = {}

    def copy(self) -> None:
        """Make the copies that the next step would make, in order. Blocks without content may then hold anything."""
        for copy in self.cache.take_copies():
            source, destination = (copy.group, copy.source), (copy.group, copy.destination)
            if copy.kind is CopyKind.TO_HOST:
                self.host[destination] = self.device[source]
            else:
                self.device[destination] = self.host[source]
        for group, pool in enumerate(self.cache.pools):
            for block in range(pool.num_blocks):
                if pool.contents[block] is None:
                    self.device.pop((group, block), None)

    def compute(self) -> None:
        """Whatever was published since is written. A block that was there before holds what it did."""
        for part in parts(self.cache):
            if part.block is not None:
                self.device.setdefault((part.group, part.block), label(part))

    def check(self) -> None:
        self.cache.check_integrity()
        for part in parts(self.cache):
            if part.block is not None:
                assert self.device[part.group, part.block] == label(part)
            if part.host_block is not None:
                assert self.host[part.group, part.host_block] == label(part)


def parts(cache: CacheManager) -> list[CachedBlock]:
    return [part for node in cache.cached_nodes() for part in node.parts.values()]


def label(part: CachedBlock) -> object:
    """What tells a part from all others."""
    path: list[tuple[int, ...]] = []
    node: PrefixNode | None = part.node
    while node is not None:
        path.append(node.token_ids)
        node = node.parent
    return part.node.salt, tuple(path), part.key


def on_host(cache: CacheManager, token_ids: Sequence[int]) -> list[bool]:
    """For each block of a sequence that is cached, whether it is on the host only."""
    match = cache.match(token_ids, None, 0)
    return [part.block is None for part in match.target_parts[0].values()]


def squeeze(cache: CacheManager, num_blocks: int) -> None:
    """A request takes so many blocks and goes, and nobody will ask for what it had."""
    rows = num_blocks * cache.block_size
    assert cache.admit("squeeze", None, cache.match([], None, 0), RowDemand(rows, 0, rows, 0))
    cache.release("squeeze")


# -- there and back --------------------------------------------------------------------------------------------------


def test_what_is_evicted_moves_to_the_host_and_comes_back_on_a_hit() -> None:
    cache = make_cache(num_blocks=6, num_host_blocks=10)
    run(cache, A)
    assert cache.take_copies() == ()
    squeeze(cache, 3)
    spilled = cache.take_copies()
    assert [copy.kind for copy in spilled] == [CopyKind.TO_HOST] * 3
    assert on_host(cache, A) == [False, False, True, True, True]
    request = FakeRequest(cache, "hit", A)
    assert request.start()
    assert request.num_rows == 10
    restored = cache.take_copies()
    assert [copy.kind for copy in restored] == [CopyKind.TO_DEVICE] * 3
    assert {copy.source for copy in restored} == {copy.destination for copy in spilled}
    assert on_host(cache, A) == [False] * 5
    request.end()
    cache.check_integrity()


def test_a_block_that_the_host_has_is_not_copied_again() -> None:
    cache = make_cache(num_blocks=6, num_host_blocks=10)
    run(cache, A)
    for _ in range(3):
        squeeze(cache, 5)
        assert num_cached_rows(cache, A)[0] == 10
        run(cache, A)
    to_host = [copy for copy in cache.take_copies() if copy.kind is CopyKind.TO_HOST]
    assert len(to_host) == 5


def test_without_a_host_nothing_is_copied() -> None:
    cache = make_cache(num_blocks=6)
    run(cache, A)
    squeeze(cache, 5)
    cache.spill_cached()
    assert cache.take_copies() == ()
    assert num_cached_rows(cache, A)[0] == 0


def test_a_hit_on_the_host_needs_as_much_room_as_fresh_blocks() -> None:
    cache = make_cache(num_blocks=6, num_host_blocks=10)
    run(cache, A)
    squeeze(cache, 5)
    assert FakeRequest(cache, "other", B[:2]).start()
    cache.take_copies()
    assert not FakeRequest(cache, "hit", A).start()
    assert cache.take_copies() == ()
    cache.check_integrity()
    assert num_cached_rows(cache, A)[0] == 10
    assert FakeRequest(cache, "shorter", A[:8]).start()
    assert len(cache.take_copies()) == 4


def test_bringing_a_block_back_does_not_evict_another_of_the_same_hit() -> None:
    """The first blocks are on the host, the last ones on the device and the least recently used there."""
    cache = make_cache(num_blocks=7, num_host_blocks=10)
    labels = Labels(cache)
    run(cache, A)
    labels.compute()
    squeeze(cache, 5)
    labels.copy()
    assert on_host(cache, A) == [False, True, True, True, True]
    assert FakeRequest(cache, "hit", A).start()
    labels.copy()
    labels.check()
    assert on_host(cache, A) == [False] * 5


def test_a_block_computed_again_is_on_the_device_and_on_the_host() -> None:
    """Two start together; what the first one publishes is on the host by the time the second one has it too."""
    cache = make_cache(num_blocks=16, num_host_blocks=10)
    first, second = (FakeRequest(cache, name, A) for name in ("first", "second"))
    assert first.start()
    assert second.start()
    first.compute()
    first.end()
    squeeze(cache, 10)
    assert on_host(cache, A) == [True] * 5
    second.compute()
    second.end()
    cache.check_integrity()
    assert on_host(cache, A) == [False] * 5
    assert all(part.host_block is not None for part in parts(cache))


# -- what the host loses ---------------------------------------------------------------------------------------------


def test_the_host_never_holds_more_than_its_blocks_and_loses_the_least_recently_used() -> None:
    cache = make_cache(num_blocks=6, num_host_blocks=11)
    for tokens in (A, B, C):
        run(cache, tokens)
    squeeze(cache, 5)
    assert [num_cached_rows(cache, tokens)[0] for tokens in (A, B, C)] == [0, 10, 10]
    run(cache, B)  # from the host: now the latest
    run(cache, D)
    squeeze(cache, 5)
    assert [num_cached_rows(cache, tokens)[0] for tokens in (B, C, D)] == [10, 0, 10]
    assert sum(part.host_block is not None for part in parts(cache)) == 10


def test_a_use_on_the_device_counts_on_the_host_as_well() -> None:
    """A came to the host before B, and was used on the device after it."""
    cache = make_cache(num_blocks=11, num_host_blocks=11)
    run(cache, A)
    squeeze(cache, 10)
    run(cache, A)
    run(cache, B)
    run(cache, A)
    squeeze(cache, 10)
    assert on_host(cache, A) == on_host(cache, B) == [True] * 5
    run(cache, C)
    squeeze(cache, 10)
    assert [num_cached_rows(cache, tokens)[0] for tokens in (A, B, C)] == [10, 0, 10]


def test_a_block_in_both_places_is_lost_only_when_it_is_in_neither() -> None:
    cache = make_cache(num_blocks=6, num_host_blocks=6)
    run(cache, A)
    squeeze(cache, 5)
    run(cache, A)
    assert all(part.block is not None and part.host_block is not None for part in parts(cache))
    (host,) = cache._host_pools
    host.release(host.allocate(5))
    cache.check_integrity()
    assert num_cached_rows(cache, A)[0] == 10
    squeeze(cache, 5)
    assert num_cached_rows(cache, A)[0] == 10, "it moves to the host once more"
    cache.check_integrity()


def test_all_that_is_cached_can_be_moved_to_the_host() -> None:
    cache = make_cache(modules=[None], num_blocks=20, num_host_blocks=30)
    run(cache, A, depth=1)
    running = FakeRequest(cache, "running", B, depth=1)
    assert running.start()
    running.compute()
    cache.spill_cached()
    cache.check_integrity()
    assert on_host(cache, A) == [True] * 5
    assert on_host(cache, B) == [False] * 5
    assert len(cache.take_copies()) == 5 + 4
    assert all(pool.has_blank_block for pool in cache.pools)


# -- from a snapshot -------------------------------------------------------------------------------------------------


def load(cache: CacheManager, token_ids: Sequence[int], salt: str | None = None) -> list[int | None]:
    """Enter target parts for all blocks of a sequence, as a snapshot does; returns their host blocks."""
    node: PrefixNode | None = None
    blocks: list[int | None] = []
    for start in range(0, len(token_ids), 2):
        node = cache.add_node(node, salt, tuple(token_ids[start : start + 2]))
        blocks.append(cache.add_to_host(node, (0, ())))
        assert cache.add_to_host(node, (0, ())) is None, "it is there already, or there is no room"
    return blocks


def test_loaded_parts_are_found_as_far_as_there_is_room() -> None:
    cache = make_cache(num_blocks=20, num_host_blocks=4)
    blocks = load(cache, A, "x")
    assert sorted(block for block in blocks[:3] if block) == [1, 2, 3]
    assert blocks[3:] == [None, None]
    cache.finish_loading()
    cache.check_integrity()
    assert len(list(cache.cached_nodes())) == 3
    assert num_cached_rows(cache, A, salt="x")[0] == 6
    assert num_cached_rows(cache, A)[0] == 0


def test_of_what_was_loaded_the_end_is_lost_before_the_beginning() -> None:
    cache = make_cache(num_blocks=20, num_host_blocks=6)
    assert None not in load(cache, A)
    cache.finish_loading()
    left = []
    for num_blocks in range(6):
        (host,) = cache._host_pools
        host.release(host.allocate(num_blocks))
        left.append(num_cached_rows(cache, A)[0])
    assert left == [10, 8, 6, 4, 2, 0]


# -- any history -----------------------------------------------------------------------------------------------------


@given(
    num_blocks=st.integers(8, 12),
    num_host_blocks=st.sampled_from((2, 3, 6, 12)),
    window=st.sampled_from((None, 3, 4)),
    requests=st.lists(
        st.tuples(
            st.sampled_from((A, B, C)), st.integers(1, 10), st.lists(st.integers(0, 1), max_size=4), st.integers(0, 2)
        ),
        max_size=14,
    ),
    num_together=st.integers(1, 2),
)
def test_the_right_rows_lie_where_the_index_says(
    num_blocks: int,
    num_host_blocks: int,
    window: int | None,
    requests: list[tuple[list[int], int, list[int], int]],
    num_together: int,
) -> None:
    cache = make_cache([None, window], [window] * 2, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    labels = Labels(cache)
    for first in range(0, len(requests), num_together):
        started = []
        for number, (begin, length, tail, depth) in enumerate(requests[first : first + num_together]):
            request = FakeRequest(cache, f"r{first + number}", [*begin[:length], *tail], depth=depth)
            if request.start():
                started.append(request)
        labels.copy()
        for request in started:
            request.compute()
        labels.compute()
        labels.check()
        for request in started:
            request.end()
        labels.compute()
        labels.check()
        for group in range(len(cache.pools)):
            assert sum(p.host_block is not None for p in parts(cache) if p.group == group) < num_host_blocks
    cache.spill_cached()
    labels.copy()
    labels.check()


def test_copies_in_another_order_would_be_wrong() -> None:
    """The test above can fail: a block is copied out, handed out and filled from the host in one step."""
    cache = make_cache(num_blocks=6, num_host_blocks=6)
    labels = Labels(cache)
    for tokens in (A, B):
        assert FakeRequest(cache, "request", tokens).start()
        labels.copy()
        cache.publish("request", tokens, 10, FakeRequest(cache, "", tokens).exact, 0)
        labels.compute()
        cache.release("request")
    assert FakeRequest(cache, "again", A).start()
    cache._copies.reverse()
    labels.copy()
    with pytest.raises(AssertionError):
        labels.check()
