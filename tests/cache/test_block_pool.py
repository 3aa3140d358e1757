"""Blocks: who is handed out first, what is lost, and that the books notice a mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cache.block_pool import RESERVED_BLOCK, BlockPool


def new_pool(num_blocks: int) -> tuple[BlockPool[str], list[str]]:
    """A pool, and what it has evicted so far."""
    evicted: list[str] = []
    return BlockPool(num_blocks, evicted.append), evicted


def fill(pool: BlockPool[str], *contents: str) -> list[int]:
    """Blocks with these contents that nobody refers to, the first one the least recently used."""
    blocks = pool.allocate(len(contents))
    for block, content in zip(blocks, contents):
        pool.contents[block] = content
    pool.release(blocks)
    return blocks


class Model:
    """The rule, said with two lists: blocks without content, and those with one, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.pool, self.evicted = new_pool(num_blocks)
        self.blank = set(range(1, num_blocks))
        self.cached: list[int] = []
        self.held: list[int] = []  # a block as often as somebody refers to it
        self.num_contents = 0

    def allocate(self, number: int) -> None:
        count = number % (self.pool.num_free_blocks + 1)
        before = len(self.evicted)
        expected = [self.pool.contents[block] for block in self.cached[: max(0, count - len(self.blank))]]
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks[: len(self.blank)]) <= self.blank, "a block with content is taken while there is a blank one"
        assert blocks[len(self.blank) :] == self.cached[: len(expected)], "not the least recently used"
        assert self.evicted[before:] == expected
        assert not any(self.pool.contents[block] for block in blocks)
        self.blank -= set(blocks)
        self.cached = self.cached[len(expected) :]
        self.held += blocks

    def publish(self, number: int) -> None:
        if self.held:
            self.num_contents += 1
            self.pool.contents[self.held[number % len(self.held)]] = f"content {self.num_contents}"

    def take(self, number: int) -> None:
        shared = [b for b in range(1, self.pool.num_blocks) if self.pool.contents[b] is not None]
        if shared:
            block = shared[number % len(shared)]
            self.pool.take(block)
            self.held.append(block)
            self.cached = [other for other in self.cached if other != block]

    def release(self, number: int) -> None:
        blocks = self.held[number % (len(self.held) + 1) :][::-1]
        self.pool.release(blocks)
        for block in blocks:
            self.held.remove(block)
            if block not in self.held:
                if self.pool.contents[block] is None:
                    self.blank.add(block)
                else:
                    self.cached.append(block)

    def forget(self, number: int) -> None:
        block = 1 + number % (self.pool.num_blocks - 1)
        self.pool.forget(block)
        if block in self.cached:
            self.cached.remove(block)
            self.blank.add(block)

    def check(self) -> None:
        assert self.pool.num_free_blocks == len(self.blank) + len(self.cached)
        assert self.pool.has_blank_block == bool(self.blank)
        assert self.pool.cached_blocks() == self.cached
        assert [b for b in range(1, self.pool.num_blocks) if self.pool.is_free(b)] == sorted(
            [*self.blank, *self.cached]
        )
        self.pool.check_integrity([self.held])


OPERATIONS: tuple[Callable[[Model, int], None], ...] = (
    Model.allocate,
    Model.publish,
    Model.publish,
    Model.take,
    Model.release,
    Model.forget,
)


@given(
    num_blocks=st.integers(2, 9),
    operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 60)), min_size=5, max_size=40),
)
def test_blank_blocks_go_first_and_then_the_least_recently_used(
    num_blocks: int, operations: list[tuple[Callable[[Model, int], None], int]]
) -> None:
    model = Model(num_blocks)
    for operation, number in operations:
        operation(model, number)
        model.check()


def test_of_blocks_that_are_released_together_the_later_ones_stay_longer() -> None:
    pool, evicted = new_pool(4)
    blocks = pool.allocate(3)
    for block, content in zip(blocks, "abc"):
        pool.contents[block] = content
    pool.release(reversed(blocks))
    pool.allocate(2)
    assert evicted == ["c", "b"]


def test_a_block_is_as_good_as_new_once_it_is_used_again() -> None:
    pool, evicted = new_pool(4)
    first, _, _ = fill(pool, "a", "b", "c")
    pool.take(first)
    pool.release([first])
    pool.allocate(2)
    assert evicted == ["b", "c"]
    assert pool.contents[first] == "a"


def test_a_block_whose_content_is_forgotten_goes_first() -> None:
    pool, evicted = new_pool(4)
    _, _, last = fill(pool, "a", "b", "c")
    pool.forget(last)
    assert pool.has_blank_block
    assert pool.allocate(1) == [last]
    assert not evicted


def test_a_block_that_two_refer_to_is_free_after_both_have_released_it() -> None:
    pool, evicted = new_pool(2)
    (block,) = fill(pool, "a")
    pool.take(block)
    pool.take(block)
    pool.release([block])
    assert not pool.is_free(block)
    assert pool.num_free_blocks == 0
    pool.release([block])
    assert pool.is_free(block)
    assert not evicted


def test_the_content_is_lost_before_the_block_is_handed_out() -> None:
    """So that what it holds can still be copied."""
    seen: list[tuple[str, bool]] = []
    pool: BlockPool[str] = BlockPool(2, lambda content: seen.append((content, pool.contents[1] is None)))
    fill(pool, "a")
    assert pool.allocate(1) == [1]
    assert seen == [("a", True)]


# -- the books -------------------------------------------------------------------------------------------------------


def test_the_reserved_block_is_never_handed_out() -> None:
    pool, _ = new_pool(5)
    assert RESERVED_BLOCK not in pool.allocate(pool.num_usable_blocks)
    assert pool.num_free_blocks == 0


def lose(pool: BlockPool[str], held: list[int]) -> None:
    held.pop()


def release_twice(pool: BlockPool[str], held: list[int]) -> None:
    pool.release([held[0]])
    pool.release([held.pop(0)])


def release_once_too_often(pool: BlockPool[str], held: list[int]) -> None:
    pool.take(held[0])
    held.append(held[0])
    pool.release([held[0], held[0]])
    held.pop(0)


def hold_the_reserved_block(pool: BlockPool[str], held: list[int]) -> None:
    pool.take(held[0])
    held.append(RESERVED_BLOCK)


def share_the_reserved_block(pool: BlockPool[str], held: list[int]) -> None:
    pool.contents[RESERVED_BLOCK] = "a"


@pytest.mark.parametrize(
    "fault", [lose, release_twice, release_once_too_often, hold_the_reserved_block, share_the_reserved_block]
)
def test_a_mistake_in_the_books_is_noticed(fault: Callable[[BlockPool[str], list[int]], None]) -> None:
    pool, _ = new_pool(5)
    held = pool.allocate(2)
    pool.contents[held[0]] = "content"
    pool.check_integrity([held])
    fault(pool, held)
    with pytest.raises(AssertionError):
        pool.check_integrity([held])
