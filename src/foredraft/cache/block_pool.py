"""Fixed-size blocks with reference counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

RESERVED_BLOCK = 0
"""Rows that must not be kept are written here, and nothing ever reads them back."""


class BlockPool:
    """Hands out block numbers 1..num_blocks-1; block 0 is the reserved one. Freed blocks are reused oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. The caller has checked `num_free_blocks`."""
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; those without any left become free."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless every block is either free or held, as often as `owners` hold it."""
        held = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                held[block] += 1
        assert held == self._references, f"references {self._references} differ from owners {held}"
        assert held[RESERVED_BLOCK] == 0, "the reserved block is held by a request"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {block for block in range(1, self.num_blocks) if held[block] == 0}, "a block is lost or shared"
