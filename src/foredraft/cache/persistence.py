"""The cache across restarts: from the host's blocks to a snapshot on disk, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_index import PrefixNode
from foredraft.cache.snapshot import SavedNode, SavedPart, Signature, load_snapshot, save_snapshot
from foredraft.cache.storage import CacheStorage

logger = logging.getLogger(__name__)


def save_cache(directory: Path, signature: Signature, cache: CacheManager, host: CacheStorage) -> int:
    """Write all that the host's blocks hold; returns how many blocks of tokens that were. OSError from the disk."""
    return save_snapshot(directory, signature, _saved_nodes(cache, host))


def _saved_nodes(cache: CacheManager, host: CacheStorage) -> Iterator[SavedNode]:
    numbers: dict[PrefixNode, int] = {}
    for node in cache.cached_nodes():
        numbers[node] = len(numbers)
        parts = tuple(
            SavedPart(part.group, part.key[1], _to_bytes(host, part.group, part.host_block))
            for part in node.parts.values()
            if part.host_block is not None
        )
        parent = -1 if node.parent is None else numbers.get(node.parent, -1)
        yield SavedNode(node.salt, parent, node.token_ids, parts)


def load_cache(directory: Path, signature: Signature, cache: CacheManager, host: CacheStorage) -> int:
    """Take what a snapshot holds into the host's blocks, as far as there is room; returns how many blocks of tokens."""
    nodes: list[PrefixNode] = []
    for saved in load_snapshot(directory, signature):
        parent = nodes[saved.parent] if saved.parent >= 0 else None
        node = cache.add_node(parent, saved.salt, saved.token_ids)
        nodes.append(node)
        for part in saved.parts:
            if part.group < len(host.num_blocks) and part.rows.numel() == _num_bytes(host, part.group):
                block = cache.add_to_host(node, (part.group, part.continuation))
                if block is not None:
                    _from_bytes(host, part.group, block, part.rows)
            else:
                logger.warning("%s: a block of group %d does not fit the cache; it is left out", directory, part.group)
    cache.finish_loading()
    return len(nodes)


def _num_bytes(host: CacheStorage, group: int) -> int:
    return host.layout.bytes_per_block(group, host.block_size)


def _to_bytes(host: CacheStorage, group: int, block: int) -> Tensor:
    """All tensors of a block one after the other, uint8."""
    return torch.cat([rows.contiguous().view(torch.uint8).flatten() for rows in host.block(group, block)])


def _from_bytes(host: CacheStorage, group: int, block: int, data: Tensor) -> None:
    start = 0
    for rows in host.block(group, block):
        end = start + rows.numel() * rows.element_size()
        rows.copy_(data[start:end].clone().view(rows.dtype).view(rows.shape))
        start = end
