"""Who holds which blocks: one table of target blocks and one of module blocks for each request."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.cache.block_pool import BlockPool


@dataclass
class BlockTables:
    """The blocks of one request: block b holds rows b * block_size .. (b + 1) * block_size - 1."""

    target: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)


class CacheManager:
    """Gives requests room for their rows. Nothing else touches blocks.

    Target blocks hold the target's KV and its hidden states (h0); module blocks hold the KV of all MTP modules. A
    request that does not draft has no module blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.target_pool = BlockPool(num_blocks)
        self.module_pool = BlockPool(num_blocks)
        self._tables: dict[str, BlockTables] = {}

    @property
    def capacity(self) -> int:
        """Rows that fit in each group."""
        return self.target_pool.num_usable_blocks * self.block_size

    def reserve(self, request_id: str, num_target_rows: int, num_module_rows: int) -> bool:
        """Make room for rows 0..num-1 in both groups; all or nothing. False: not enough free blocks."""
        tables = self._tables.get(request_id, BlockTables())
        more_target = self._missing(tables.target, num_target_rows)
        more_module = self._missing(tables.module, num_module_rows)
        if more_target > self.target_pool.num_free_blocks or more_module > self.module_pool.num_free_blocks:
            return False
        tables.target += self.target_pool.allocate(more_target)
        tables.module += self.module_pool.allocate(more_module)
        self._tables[request_id] = tables
        return True

    def _missing(self, blocks: list[int], num_rows: int) -> int:
        return max(0, -(-num_rows // self.block_size) - len(blocks))

    def release(self, request_id: str) -> None:
        """Give back all that a request holds; a request that holds nothing is fine."""
        tables = self._tables.pop(request_id, None)
        if tables is not None:
            self.target_pool.release(tables.target)
            self.module_pool.release(tables.module)

    def tables(self, request_id: str) -> BlockTables:
        return self._tables[request_id]

    def check_integrity(self) -> None:
        """Prove the books: every block is free or held by exactly the requests that list it."""
        self.target_pool.check_integrity(tables.target for tables in self._tables.values())
        self.module_pool.check_integrity(tables.module for tables in self._tables.values())
