"""How much of a new sequence is cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foredraft.cache.groups import CacheLayout
from foredraft.cache.prefix_index import CachedBlock, PartKey, PrefixNode


@dataclass(frozen=True)
class PrefixMatch:
    """What the cache holds of a sequence.

    num_rows: target rows that need not be computed (whole blocks); num_module_rows: rows of modules 1..module_depth.
    target_parts, module_parts: by group, which cached block serves as which block of the sequence. module_origin: where
    the modules' rows begin. donor: a request with the same first `num_copied_rows` rows. It goes on writing in the
    block where they end, as does the new one, so what was not found of them is copied from its blocks.

    Of a request that another engine has begun nothing is found: begins, by group, is the first block that its rows
    will be written into. is_shared: whether others may find its blocks.
    """

    num_rows: int
    num_module_rows: int
    module_depth: int
    nodes: tuple[PrefixNode, ...]
    target_parts: tuple[dict[int, CachedBlock], ...]
    module_parts: tuple[dict[int, CachedBlock], ...]
    module_origin: int = 0
    donor: str | None = None
    num_copied_rows: int = 0
    begins: Mapping[int, int] = field(default_factory=dict)
    is_shared: bool = True

    @classmethod
    def of_rows(
        cls, layout: CacheLayout, begins: Mapping[int, int], *, module_origin: int, is_shared: bool
    ) -> PrefixMatch:
        """For a request whose rows come from elsewhere."""
        target, modules = (
            tuple[dict[int, CachedBlock], ...]({} for _ in groups)
            for groups in (layout.target_groups, layout.module_groups)
        )
        return cls(0, 0, 0, (), target, modules, module_origin, begins=begins, is_shared=is_shared)

    def without_modules(self, origin: int) -> PrefixMatch:
        """The same for the target; the modules begin anew at row `origin`."""
        none: tuple[dict[int, CachedBlock], ...] = tuple({} for _ in self.module_parts)
        return replace(self, num_module_rows=0, module_depth=0, module_parts=none, module_origin=origin)


def match_prefix(
    layout: CacheLayout, block_size: int, nodes: Sequence[PrefixNode], token_ids: Sequence[int], module_depth: int
) -> PrefixMatch:
    """Choose from the nodes of a sequence's leading blocks; with `module_depth` 0 no module rows are looked for."""
    keys: list[list[PartKey]] = [[(group, ()) for group in layout.target_groups]] * len(nodes)
    num_blocks = _longest(layout, block_size, nodes, keys)
    module_keys = _module_keys(layout, block_size, nodes[:num_blocks], token_ids, module_depth)
    num_module_blocks = _longest(layout, block_size, nodes, module_keys)
    parts: list[dict[int, CachedBlock]] = [{} for _ in layout.groups]
    for count, found in ((num_blocks, keys), (num_module_blocks, module_keys)):
        for position, (group, _) in enumerate(found[0] if found else ()):
            if group == layout.state_group:
                if count:
                    parts[group][count // layout.groups[group].span - 1] = nodes[count - 1].parts[group, ()]
                continue
            first = layout.groups[group].first_kept_row(count * block_size) // block_size
            for index in range(first, count):
                parts[group][index] = nodes[index].parts[found[index][position]]
    depths = [len(block_keys[0][1]) for block_keys in module_keys[:num_module_blocks]]
    return PrefixMatch(
        num_rows=num_blocks * block_size,
        num_module_rows=num_module_blocks * block_size,
        module_depth=min(depths, default=0),
        nodes=tuple(nodes[:num_blocks]),
        target_parts=tuple(parts[group] for group in layout.target_groups),
        module_parts=tuple(parts[group] for group in layout.module_groups),
    )


def _longest(layout: CacheLayout, block_size: int, nodes: Sequence[PrefixNode], keys: Sequence[list[PartKey]]) -> int:
    """The most leading blocks after which each group has all that the next row needs. keys: parts to find, by block."""
    runs = [0] * len(layout.groups)  # cached blocks without a gap that end here, by group
    longest = 0
    for index, (node, block_keys) in enumerate(zip(nodes, keys)):
        is_enough = True
        for key in block_keys:
            group = key[0]
            if group == layout.state_group:
                is_enough &= (index + 1) % layout.groups[group].span == 0 and key in node.parts
                continue
            runs[group] = runs[group] + 1 if key in node.parts else 0
            first = layout.groups[group].first_kept_row((index + 1) * block_size) // block_size
            is_enough &= runs[group] > index - first
        if is_enough:
            longest = index + 1
    return longest


def _module_keys(
    layout: CacheLayout, block_size: int, nodes: Sequence[PrefixNode], token_ids: Sequence[int], depth: int
) -> list[list[PartKey]]:
    """For each block, the parts that hold modules 1..depth, or more; ends where no tokens follow to compare."""
    keys: list[list[PartKey]] = []
    for index, node in enumerate(nodes if depth else ()):
        following = tuple(token_ids[(index + 1) * block_size : (index + 1) * block_size + len(layout.modules)])
        if len(following) < depth:
            break
        for deeper in range(depth, len(following) + 1):
            found = [(group, following[:deeper]) for group in layout.module_groups]
            if found[0] in node.parts:
                break
        keys.append(found)
    return keys
