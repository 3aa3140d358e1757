"""How many blocks each cache group gets."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.cache.groups import CacheLayout
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError


@dataclass(frozen=True)
class CacheSize:
    """num_blocks of each group, the reserved one included, and the longest sequence that is admitted."""

    num_blocks: tuple[int, ...]
    max_model_len: int


def size_cache(config: EngineConfig, layout: CacheLayout, max_positions: int) -> CacheSize:
    """Choose the number of blocks and the longest sequence.

    Any sequence of up to max_model_len tokens fits the cache on its own, pending drafts included, so a request that is
    admitted can always end.
    Raises ConfigError, with the numbers, for settings that contradict each other.
    """
    bytes_per_block = layout.bytes_per_token() * config.block_size
    num_blocks = config.num_blocks or config.kv_cache_memory_bytes // bytes_per_block
    capacity = (num_blocks - 1) * config.block_size
    what = f"{num_blocks} blocks of {config.block_size} rows, one of them reserved,"
    if capacity < 2:
        raise ConfigError(
            f"the cache is too small: {what} hold {max(0, capacity)} tokens "
            f"({bytes_per_block} bytes a block): raise num_blocks or kv_cache_memory_bytes"
        )
    wanted = config.max_model_len
    if wanted is not None and wanted > max_positions:
        raise ConfigError(f"max_model_len={wanted} is more than the {max_positions} positions of the model")
    if wanted is not None and wanted > capacity:
        raise ConfigError(
            f"max_model_len={wanted} does not fit the cache: {what} hold a sequence of {capacity} tokens: "
            f"raise num_blocks or kv_cache_memory_bytes, or lower max_model_len"
        )
    return CacheSize((num_blocks,) * len(layout.groups), wanted or min(max_positions, capacity))
