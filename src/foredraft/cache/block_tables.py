"""Which blocks a request holds, and how many rows it wants room for."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.cache.prefix_index import PrefixNode


@dataclass
class BlockTables:
    """The blocks of one request: entry b of a table holds rows b * block_size .. (b + 1) * block_size - 1.

    first: by group, the first entry that is held; those before it were given back, and name the reserved block.
    nodes: the leading blocks that are in the prefix index. Module blocks below num_shared_module_blocks may be shared
    and are never written, nor the first num_shared_states of states. frozen: the tables as tuples, until they change;
    target_end, module_end: rows that fit them.
    """

    salt: str | None
    blocks: list[list[int]]
    first: list[int]
    num_shared_module_blocks: int = 0
    num_shared_states: int = 0
    nodes: list[PrefixNode] = field(default_factory=list)
    is_published: bool = True
    frozen: tuple[tuple[int, ...], ...] | None = None
    target_end: int = 0
    module_end: int = 0


@dataclass(frozen=True)
class RowDemand:
    """Rows that a request wants room for: up to row `target_end` and `module_end` in all groups, and in those that
    keep all rows up to `target_total` and `module_total`, so that it can go on."""

    target_end: int
    module_end: int
    target_total: int
    module_total: int
