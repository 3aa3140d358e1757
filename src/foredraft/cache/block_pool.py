"""Fixed-size blocks with reference counts, some of which hold rows that may be shared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Content = TypeVar("Content")

RESERVED_BLOCK = 0
"""Rows that must not be kept are written here, and nothing ever reads them back."""


class BlockPool(Generic[Content]):
    """Hands out block numbers 1..num_blocks-1; block 0 is the reserved one.

    A block that nobody refers to is free. Free blocks without content are handed out first, then those with content,
    least recently used first: `on_evict` is told what is lost, while the block's rows are still there.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Content], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = OrderedDict[int, None].fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self.contents: list[Content | None] = [None] * num_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def has_blank_block(self) -> bool:
        """Whether a block can be had without losing another's content."""
        return bool(self._free) and self.contents[next(iter(self._free))] is None

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. The caller has checked `num_free_blocks`."""
        return [self._allocate() for _ in range(count)]

    def _allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        content = self.contents[block]
        if content is not None:
            self.contents[block] = None
            self._on_evict(content)
        return block

    def take(self, block: int) -> None:
        """Refer once more to a block with content."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block. Of those that become free, the later ones stay longer."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self.contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """A block's content is not to be shared any more."""
        self.contents[block] = None
        if self._references[block] == 0:
            self._free.move_to_end(block, last=False)

    def cached_blocks(self) -> list[int]:
        """Free blocks with content, least recently used first."""
        return [block for block in self._free if self.contents[block] is not None]

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is either free or held, as often as `owners` hold it."""
        held = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                held[block] += 1
        assert held == self._references, f"references {self._references} differ from owners {held}"
        assert held[RESERVED_BLOCK] == 0, "the reserved block is held by a request"
        assert self.contents[RESERVED_BLOCK] is None, "the reserved block is shared"
        free = {block for block in range(1, self.num_blocks) if held[block] == 0}
        assert self._free.keys() == free, "a block is lost, or free although it is held"
