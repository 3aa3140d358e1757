"""Where the rows of a request that was begun elsewhere go in a cache of another layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.cache.groups import CacheLayout
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.cache.row_parts import HIDDEN, RowPart, parts_of
from foredraft.cache.storage import CacheStorage


@dataclass(frozen=True, eq=False)
class SentRows:
    """Rows first .. end-1 of one part, [end - first, ...] on the CPU, or one state [1, ...]. window: see `RowPart`."""

    first: int
    rows: Tensor
    window: int | None

    @property
    def end(self) -> int:
        """One more than the number of the last row."""
        return self.first + len(self.rows)


def rows_of(
    storage: CacheStorage,
    tables: Sequence[Sequence[int]],
    held: Sequence[int],
    ends: Sequence[int],
    num_target_rows: int,
    num_state_rows: int,
    origin: int,
    first_rows: Mapping[str, int],
) -> dict[str, SentRows]:
    """Copies of all that a request's blocks hold and another engine can go on from, by part.

    tables, held: its blocks by group, and how many it refers to. ends: how many rows of each module have been computed
    and may be of use. origin: modules have no rows before it. first_rows: the first that came, by part, of a request
    which was begun elsewhere: the rest of their blocks holds nothing.
    """
    found = {}
    for part in parts_of(storage):
        table, size = tables[part.group], storage.block_size
        first, end = (len(table) - held[part.group]) * size, num_target_rows
        if part.is_state:
            block = table[(num_state_rows - 1) // (size * storage.layout.groups[part.group].span)]
            found[part.name] = SentRows(0, part.tensor[block : block + 1].cpu(), None)
            continue
        if part.module is not None:
            first, end = max(first, origin), ends[part.module]
        first = max(first, first_rows.get(part.name, 0))
        if first < end:
            rows = part.read(storage.slots(table, end)[first:])
            found[part.name] = SentRows(first, rows, part.window)
    return found


@dataclass(frozen=True)
class Placement:
    """match: which blocks a request needs for rows that were sent; num_module_rows: up to where modules have some."""

    match: PrefixMatch
    num_module_rows: int
    num_state_rows: int
    sent: Mapping[str, SentRows]

    @classmethod
    def of(
        cls,
        storage: CacheStorage,
        sent: Mapping[str, SentRows],
        num_rows: int,
        num_state_rows: int,
        counts: Sequence[int],
        origin: int,
    ) -> Placement:
        """num_rows: of the target; counts: exact rows of each module of this engine.

        Raises ValueError where rows are not those that the layers here store. Rows of modules that are not here are
        left out.
        """
        size, parts = storage.block_size, parts_of(storage)
        firsts: dict[int, list[int]] = {}
        num_module_rows = 0
        for part in parts:
            own = sent.get(part.name)
            if own is None:
                if part.module is None or (part.window is None and counts[part.module]):
                    raise ValueError(f"there are no rows of {part.name}")
                continue
            _check_part(part, own)
            if part.is_state:
                continue
            if part.module is None and own.end != num_rows:
                raise ValueError(f"{part.name} has rows up to {own.end}, not {num_rows}")
            if part.module is not None:
                if own.end < counts[part.module]:
                    raise ValueError(f"{part.name} has rows up to {own.end}, not {counts[part.module]}")
                num_module_rows = max(num_module_rows, own.end)
            firsts.setdefault(part.group, []).append(own.first)
        known = {part.name for part in parts}
        if surplus := [name for name in sent if name not in known and not name.startswith("module.")]:
            raise ValueError(f"there is no {surplus[0]:.60} here")
        begins = {group: min(own) // size for group, own in firsts.items()}
        is_whole = all(
            max(own) <= begins[group] * size or (group in storage.layout.module_groups and max(own) == origin)
            for group, own in firsts.items()
        )
        if (states := storage.layout.state_group) is not None:
            begins[states] = (num_state_rows - 1) // (size * storage.layout.groups[states].span)
        match = PrefixMatch.of_rows(storage.layout, begins, module_origin=origin, is_shared=is_whole)
        return cls(match, num_module_rows, num_state_rows, sent)

    def lacks_hidden(self, layout: CacheLayout, num_rows: int) -> bool:
        """Whether modules here may need h0 of rows that were not sent."""
        return self.sent[HIDDEN].first > layout.groups[layout.hidden_group].first_kept_row(num_rows)

    def fill(self, storage: CacheStorage, tables: Sequence[Sequence[int]]) -> None:
        """Write the rows into the blocks that the request has got."""
        for part in parts_of(storage):
            own = self.sent.get(part.name)
            if own is None:
                continue
            table = tables[part.group]
            if part.is_state:
                index = (self.num_state_rows - 1) // (storage.block_size * storage.layout.groups[part.group].span)
                part.tensor[table[index]].copy_(own.rows[0])
            else:
                part.write(storage.slots(table, own.end)[own.first :], own.rows)


def _check_part(part: RowPart, own: SentRows) -> None:
    shape, dtype = tuple(own.rows.shape[1:]), own.rows.dtype
    if shape != part.row_shape or dtype != part.dtype:
        raise ValueError(f"{part.name} has {list(shape)} of {dtype}, and here {list(part.row_shape)} of {part.dtype}")
    if part.name == HIDDEN or part.is_state:  # of h0, how much is kept depends on the modules
        return
    if own.window != part.window and not part.is_replayed:
        raise ValueError(f"{part.name} looks back over {own.window} rows, and here over {part.window}")
    if part.window is None and own.first != 0:
        raise ValueError(f"{part.name} has no rows before {own.first}")
