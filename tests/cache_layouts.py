"""Hand-made cache layouts and requests that compute nothing, for tests of the cache without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.cache.block_tables import RowDemand
from foredraft.cache.groups import CacheLayout, KVShape, StoredRows
from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.exactness import ExactRows


def make_layout(target: Sequence[int | None], modules: Sequence[int | None]) -> CacheLayout:
    """Layers and modules with these windows (None: full attention), one number a row each."""
    layers, depths = (
        StoredRows(tuple(KVShape(1, 1, 1, window) for window in windows)) for windows in (target, modules)
    )
    return CacheLayout.build(layers, depths, hidden_size=1, dtype=torch.float32)


def make_cache(
    target: Sequence[int | None] = (None,),
    modules: Sequence[int | None] = (),
    *,
    num_blocks: int = 20,
    block_size: int = 2,
    num_host_blocks: int = 0,
) -> CacheManager:
    """A cache with so many blocks in every group."""
    layout = make_layout(target, modules)
    count = len(layout.groups)
    host = (num_host_blocks,) * count if num_host_blocks else ()
    return CacheManager(layout, (num_blocks,) * count, block_size, num_host_blocks=host)


class FakeRequest:
    """What the scheduler does for a request of `depth` modules, without a model: rows are there once they are said to
    be."""

    def __init__(
        self, cache: CacheManager, name: str, token_ids: Sequence[int], *, depth: int = 0, salt: str | None = None
    ) -> None:
        self.cache = cache
        self.name = name
        self.token_ids = list(token_ids)
        self.depth = depth
        self.salt = salt
        self.num_rows = 0
        self.exact = ExactRows.none(len(cache.layout.modules))

    def match(self) -> PrefixMatch:
        return self.cache.match(self.token_ids, self.salt, self.depth)

    def start(self, end: int | None = None) -> bool:
        """Take what is cached, and room up to row `end` in all groups (the whole sequence if left out)."""
        match = self.match()
        end = max(len(self.token_ids) if end is None else end, match.num_rows)
        module_end = end if self.depth else 0
        is_admitted = self.cache.admit(self.name, self.salt, match, RowDemand(end, module_end, end, module_end))
        if is_admitted:
            self.num_rows = match.num_rows
            self.exact = ExactRows.after_hit(len(self.exact.num_exact_rows), match.num_module_rows, match.module_depth)
        return is_admitted

    def compute(self, end: int | None = None, depth: int | None = None) -> None:
        """All rows up to `end` (those of the whole sequence if left out) are there, and are published."""
        self.num_rows = end = len(self.token_ids) if end is None else end
        depth = self.depth if depth is None else depth
        assert self.cache.reserve(self.name, end, end if depth else 0)
        self.exact = self.exact.after_rows(len(self.token_ids), end, depth)
        self.cache.publish(self.name, self.token_ids, end, self.exact, depth)

    def retain(self) -> None:
        """Give back what is behind all windows."""
        rows = self.exact.num_exact_rows[: self.depth]
        self.cache.retain(self.name, self.num_rows, min(rows, default=0))

    def end(self) -> None:
        self.cache.publish(self.name, self.token_ids, self.num_rows, self.exact, min(1, self.depth))
        self.cache.release(self.name)

    def run(self) -> int:
        """All of it; returns how many rows were cached."""
        assert self.start()
        num_cached = self.num_rows
        self.compute()
        self.end()
        self.cache.check_integrity()
        return num_cached


def run(cache: CacheManager, token_ids: Sequence[int], *, depth: int = 0, salt: str | None = None) -> int:
    """Let a request come and go; returns how many rows were cached."""
    return FakeRequest(cache, "request", token_ids, depth=depth, salt=salt).run()


def num_cached_rows(
    cache: CacheManager, token_ids: Sequence[int], *, depth: int = 0, salt: str | None = None
) -> tuple[int, int]:
    """How many target and module rows a request would find."""
    match = cache.match(token_ids, salt, depth)
    return match.num_rows, match.num_module_rows


def take_all_free_blocks(cache: CacheManager) -> None:
    """What nobody refers to is lost, as if others had needed the room."""
    for pool in cache.pools:
        pool.release(pool.allocate(pool.num_free_blocks))
    cache.take_copies()
    cache.check_integrity()
