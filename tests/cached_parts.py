"""What the cache of an engine holds, part by part: names that outlive blocks and processes, and the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.cache.prefix_index import CachedBlock
from foredraft.engine.engine import Engine

PartName = tuple[str | None, tuple[int, ...], int, tuple[int, ...]]
"""What names a part for good: its salt, all tokens up to its end, its group, and the tokens after it that count."""


@dataclass(frozen=True)
class Part:
    """A cached part at some moment. By place: the block that it was in, and the bytes of what is defined of it."""

    name: PartName
    identity: CachedBlock
    blocks: dict[str, int]
    bytes: dict[str, bytes]


def cached_parts(engine: Engine) -> Iterator[Part]:
    """All parts that the cache holds."""
    paths: dict[object, tuple[int, ...]] = {}
    for node in engine.cache.cached_nodes():
        path = paths[node] = paths.get(node.parent, ()) + node.token_ids
        for (group, continuation), part in node.parts.items():
            blocks = {p: b for p, b in (("device", part.block), ("host", part.host_block)) if b is not None}
            rows = {place: b"".join(map(to_bytes, part_rows(engine, part, place))) for place in blocks}
            yield Part((node.salt, path, group, continuation), part, blocks, rows)


def part_rows(engine: Engine, part: CachedBlock, place: str) -> Sequence[Tensor]:
    """What is defined of a part's block: the rows of modules deeper than the tokens that count are not."""
    group, continuation = part.key
    storage, block = engine.runner.storage, part.block
    if place == "host":
        assert engine.runner.host_storage is not None
        storage, block = engine.runner.host_storage, part.host_block
    assert block is not None
    if group not in engine.cache.layout.module_groups:
        return storage.block(group, block)
    num_defined = sum(layer < len(continuation) for layer in engine.cache.layout.groups[group].layers)
    return storage.block(group, block)[: 2 * num_defined]


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def tokens_of(part: CachedBlock) -> tuple[int, ...]:
    """All tokens up to the end of a part."""
    tokens, node = part.node.token_ids, part.node.parent
    while node is not None:
        tokens, node = node.token_ids + tokens, node.parent
    return tokens
