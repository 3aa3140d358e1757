"""How many blocks each cache group gets: what requests may ask of it, and what there is memory for."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from foredraft.cache.groups import CacheLayout, Owner
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError

GIB = 1 << 30
CPU_CACHE_BYTES = 2 * GIB
"""Memory of the paged cache where nothing is said and nothing can be measured."""


@dataclass(frozen=True)
class CacheDemand:
    """What requests within the limits of the settings may ask of the cache groups.

    max_depth: the most draft tokens a step (K); max_positions: the longest sequence that the model takes.
    """

    config: EngineConfig
    layout: CacheLayout
    max_depth: int
    max_positions: int

    def num_rows_behind(self, number: int) -> int | None:
        """How many rows before the next one to compute a request may hold in group `number`; None: all of them."""
        group, rebuilt = self.layout.groups[number], self._num_rebuilt_rows(number)
        return None if group.retention is None or rebuilt is None else group.retention + rebuilt

    def _num_rebuilt_rows(self, number: int) -> int | None:
        """How far the modules may lag behind the target; the target's own rows never lag."""
        return self.layout.rebuild_rows[-1] if self.layout.groups[number].owner is Owner.MODULES else 0

    def num_held_blocks(self, number: int, num_requests: int, max_model_len: int) -> int:
        """The most blocks of group `number` that `num_requests` running requests hold at once.

        A request holds the rows behind its next one (c), and those ahead: its share of a step, or what its last step
        left, the rows of K drafts. All shares together are at most max_num_batched_tokens. A single module that drafts
        several tokens writes K - 1 rows beyond its share. Where depth rises again after a spell at 0, a rebuild begins
        with rows further behind; there is room for one of those at a time. n rows that begin and end anywhere lie in at
        most n / block_size + 2 blocks. And nobody holds more than the whole of a longest sequence.
        """
        size = self.config.block_size * self.layout.groups[number].span
        whole = num_requests * -(-max_model_len // size)
        behind, rebuilt = self.num_rows_behind(number), self._num_rebuilt_rows(number)
        if behind is None or rebuilt is None:
            return whole
        is_chained = self.layout.groups[number].owner is Owner.MODULES and self.max_depth > len(self.layout.modules)
        num_pending = self.max_depth + (self.max_depth - 1 if is_chained else 0)
        num_shared_out = max(min(self.config.max_num_batched_tokens, num_requests * max_model_len), rebuilt)
        num_rows = num_requests * (behind + num_pending) + num_shared_out
        return min(whole, num_rows // size + 2 * num_requests)

    def num_useful_blocks(self, number: int, max_model_len: int) -> int | None:
        """How many blocks, the reserved one included, group `number` can make use of; None: as many as there are.

        A prefix is found only where the last rows before its end are there in every window. Blocks for the running
        requests alone would lose those of each request as soon as the next one needs room, and what the other groups
        keep of its prefix would be of no use. So there is as much again: for as many ended requests as run.
        """
        if self.num_rows_behind(number) is None:
            return None
        held = self.num_held_blocks(number, self.config.max_num_seqs, max_model_len)
        return 1 + held * (2 if self.config.enable_prefix_caching else 1)

    def num_blocks(self, most: int) -> tuple[int, ...]:
        """The blocks of each group if none gets more than `most`."""
        max_model_len = self.max_model_len(most)
        useful = (self.num_useful_blocks(number, max_model_len) for number in range(len(self.layout.groups)))
        counts = [most if count is None else min(most, count) for count in useful]
        recurrent = self.layout.recurrent_groups
        # A state is as large as thousands of rows. All of them together take no more memory than the rows do.
        rows_bytes = sum(self._bytes(number, count) for number, count in enumerate(counts) if number not in recurrent)
        for number in recurrent:
            affordable = rows_bytes // (len(recurrent) * self._bytes(number, 1))
            least = 1 + self.num_held_blocks(number, 1, max_model_len)
            counts[number] = min(counts[number], max(least, affordable))
        return tuple(counts)

    def _bytes(self, number: int, count: int) -> int:
        return count * self.layout.bytes_per_block(number, self.config.block_size)

    def max_model_len(self, most: int) -> int:
        """The longest sequence that is admitted if groups get `most` blocks: what was asked, else all that fits.

        Sliding windows alone bound no sequence.
        """
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        return min(self.max_positions, self.capacity(most)) if self.is_bounded else self.max_positions

    @property
    def is_bounded(self) -> bool:
        """Whether any group keeps all rows of a sequence."""
        return any(self.num_rows_behind(number) is None for number in range(len(self.layout.groups)))

    def capacity(self, most: int) -> int:
        """Rows that `most` blocks hold, one of them being reserved."""
        return max(0, (most - 1) * self.config.block_size)

    def num_bytes(self, most: int) -> int:
        """What the blocks of all groups take if none gets more than `most`."""
        return sum(self._bytes(number, count) for number, count in enumerate(self.num_blocks(most)))

    def most_blocks(self, memory_bytes: int) -> int:
        """The largest number of blocks for a group with which all groups fit `memory_bytes`."""
        groups = range(len(self.layout.groups))
        smallest = min(self.layout.bytes_per_block(number, self.config.block_size) for number in groups)
        bound = memory_bytes // smallest
        return bisect_right(range(bound + 1), memory_bytes, key=self.num_bytes) - 1


@dataclass(frozen=True)
class GroupSize:
    """Blocks of one cache group, the reserved one included: the rows that one covers, and the bytes that it takes.

    is_bounded: the group keeps all rows of a sequence, so that its blocks bound the number of tokens.
    """

    name: str
    num_blocks: int
    num_rows: int
    bytes_per_block: int
    is_bounded: bool


@dataclass(frozen=True)
class CacheSize:
    """How large the paged cache is, and the longest sequence that is admitted.

    num_host_blocks: blocks that the host holds of each group; 0: there is no host cache.
    """

    groups: tuple[GroupSize, ...]
    block_size: int
    max_model_len: int
    num_host_blocks: int

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group, the reserved one included."""
        return tuple(group.num_blocks for group in self.groups)

    @property
    def num_tokens(self) -> int | None:
        """How many tokens of all requests the cache holds; None: sliding windows only, of sequences of any length."""
        counts = [group.num_blocks for group in self.groups if group.is_bounded]
        return (min(counts) - 1) * self.block_size if counts else None

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        return sum(group.num_blocks * group.bytes_per_block for group in self.groups)

    @property
    def num_host_bytes(self) -> int:
        """Memory on the host."""
        return sum(group.bytes_per_block for group in self.groups) * self.num_host_blocks

    def lines(self) -> tuple[str, ...]:
        """The same for people to read: a summary, then a line for each group and one for the host."""
        what = "sliding windows" if self.num_tokens is None else f"{self.num_tokens:,} tokens"
        host = f"  host: {self.num_host_blocks:,} blocks of each group, {in_units(self.num_host_bytes)}"
        return (
            f"cache: {what} in {in_units(self.num_bytes)}, sequences of up to {self.max_model_len:,} tokens",
            *(
                f"  {group.name}: {group.num_blocks:,} blocks of {group.num_rows} rows, "
                f"{group.bytes_per_block // group.num_rows:,} bytes a token"
                for group in self.groups
            ),
            *([host] if self.num_host_blocks else []),
        )


def size_cache(demand: CacheDemand, memory_bytes: int | None) -> CacheSize:
    """Choose the number of blocks of each group and the longest sequence.

    memory_bytes: what the cache may take in all; None: the setting num_blocks says how many blocks.
    Any sequence of up to max_model_len tokens fits the cache on its own, pending drafts included, so a request that is
    admitted can always end.
    Raises ConfigError, with the numbers, for settings that contradict each other.
    """
    config, layout = demand.config, demand.layout
    most = config.num_blocks if memory_bytes is None else demand.most_blocks(memory_bytes)
    assert most is not None
    _check(demand, most, memory_bytes)
    groups = tuple(
        GroupSize(
            group.name,
            count,
            config.block_size * group.span,
            layout.bytes_per_block(number, config.block_size),
            demand.num_rows_behind(number) is None,
        )
        for number, (group, count) in enumerate(zip(layout.groups, demand.num_blocks(most)))
    )
    return CacheSize(groups, config.block_size, demand.max_model_len(most), _num_host_blocks(demand))


def _check(demand: CacheDemand, most: int, memory_bytes: int | None) -> None:
    """Refuse a cache in which a request could not end."""
    config, capacity = demand.config, demand.capacity(most)
    more = _how_to_grow(config)
    source = "" if memory_bytes is None else f" (from {memory_bytes} bytes)"
    what = f"{most} blocks of {config.block_size} rows{source}, one of them reserved,"
    wanted = config.max_model_len
    if wanted is not None and wanted > demand.max_positions:
        raise ConfigError(f"max_model_len={wanted} is more than the {demand.max_positions} positions of the model")
    if capacity < 2:
        raise ConfigError(
            f"the cache is too small: {what} hold {capacity} tokens "
            f"({_bytes_of_all(demand)} bytes a block of all groups): {more}"
        )
    if wanted is not None and wanted > capacity and demand.is_bounded:
        raise ConfigError(
            f"max_model_len={wanted} does not fit the cache: {what} hold a sequence of {capacity} tokens: "
            f"{more}, or lower max_model_len"
        )
    for number, count in enumerate(demand.num_blocks(most)):
        needed = 1 + demand.num_held_blocks(number, 1, demand.max_model_len(most))
        if count < needed:
            raise ConfigError(
                f"the cache is too small: {what} are fewer than the {needed} that one request may need in the group "
                f"{demand.layout.groups[number].name!r}: {demand.num_rows_behind(number)} rows behind the next one, "
                f"those of max_num_batched_tokens={config.max_num_batched_tokens} and of {demand.max_depth} drafts: "
                f"{more}, or lower max_num_batched_tokens or max_model_len"
            )


def _bytes_of_all(demand: CacheDemand) -> int:
    """Of one block of every group."""
    groups = range(len(demand.layout.groups))
    return sum(demand.layout.bytes_per_block(number, demand.config.block_size) for number in groups)


def _how_to_grow(config: EngineConfig) -> str:
    for name in ("num_blocks", "kv_cache_memory_bytes"):
        if getattr(config, name) is not None:
            return f"raise {name}"
    return "set a larger kv_cache_memory_bytes or, on a GPU, gpu_memory_utilization"


def _num_host_blocks(demand: CacheDemand) -> int:
    """As many whole blocks, of all groups, as cpu_cache_gib holds."""
    config = demand.config
    if not config.cpu_cache_gib:
        return 0
    bytes_per_block = _bytes_of_all(demand)
    num_blocks = int(config.cpu_cache_gib * GIB) // bytes_per_block
    if num_blocks < 2:
        raise ConfigError(f"cpu_cache_gib={config.cpu_cache_gib} is less than two blocks of {bytes_per_block} bytes")
    return num_blocks


def in_units(num_bytes: int) -> str:
    """2.00 GiB, 13.25 MiB."""
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (1 << 20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"
