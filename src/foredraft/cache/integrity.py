"""Proof of the books: who holds which blocks, and what lies where."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.cache.block_pool import BlockPool
from foredraft.cache.block_tables import BlockTables
from foredraft.cache.prefix_index import CachedBlock, PrefixIndex


def check_integrity(
    pools: Sequence[BlockPool[CachedBlock]],
    host_pools: Sequence[BlockPool[CachedBlock]],
    tables: Sequence[BlockTables],
    index: PrefixIndex,
) -> None:
    """Raises AssertionError unless every block is free or held by exactly the requests that list it, and every cached
    part is where the index says. pools: by group, as are the blocks of a request."""
    for group, pool in enumerate(pools):
        assert all(not any(table.blocks[group][: table.first[group]]) for table in tables)
        pool.check_integrity(table.blocks[group][table.first[group] :] for table in tables)
    for host in host_pools:
        host.check_integrity(())
    parts = [part for node in index.nodes() for part in node.parts.values()]
    assert all(part.block is not None or part.host_block is not None for part in parts), "a part is nowhere"
    for group, pool in enumerate(pools):
        _check_contents(pool, [(part.block, part) for part in parts if part.group == group and part.block])
    for group, host in enumerate(host_pools):
        _check_contents(host, [(part.host_block, part) for part in parts if part.group == group and part.host_block])


def _check_contents(pool: BlockPool[CachedBlock], parts: list[tuple[int, CachedBlock]]) -> None:
    contents = {block: part for block, part in enumerate(pool.contents) if part is not None}
    assert contents == dict(parts), "the index and the pool disagree about what a block holds"
    assert len(contents) == len(parts), "two parts are said to lie in one block"
