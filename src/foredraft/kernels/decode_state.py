"""What the device keeps of running requests while they decode: a row of numbers and block tables for each slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NOBODY = 0
"""The slot of padded lanes: a request of no tokens and no room for any. Nothing is ever done for it."""

RESERVED_SLOT = 0
"""The cache row that is written where nothing must be kept, and read where it does not matter."""

NUM_TOKENS, NUM_DRAFTS, CYCLE_DEPTH, MAX_TOTAL, ORIGIN, SEED, TOP_K, EXACT = range(8)
"""Columns: n, pending drafts, how many modules made them, where the sequence ends at the latest, the modules' first
row, the seed, top-k; then E_1..E_M (`num_exact_rows`), then the ring of tokens."""

BROKEN = -2
"""Emitted, alone, by a lane whose rows hold numbers that are none; the state stays as it was."""

RING_SIZE = 128
"""Tokens that are kept of a sequence, pending drafts included, by position modulo this; a power of two."""


@dataclass(frozen=True)
class DecodeState:
    """ints [S, columns] int64; tables [G, S, blocks] int32: block tables by cache group and slot.

    num_modules: M. num_positions: positions that the model has; those of padding are clamped to them.
    """

    ints: Tensor
    tables: Tensor
    num_modules: int
    block_size: int
    num_positions: int

    @property
    def ring(self) -> int:
        """The first column of the ring of tokens."""
        return EXACT + self.num_modules


class TargetRows(NamedTuple):
    """The rows that the target runs for B lanes, R each: the newest token and the pending drafts.

    token_ids, positions [B * R] int64; slots [G, B * R] int64: where they lie in each cache group, the reserved slot
    for padding; drafts [B, R-1] int64, -1 padded; first_rows, num_rows, flat_rows [B] int32 as in `Lanes`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    drafts: Tensor
    first_rows: Tensor
    num_rows: Tensor
    flat_rows: Tensor


class DraftWindow(NamedTuple):
    """The windows of B lanes: rows c - W .. c - 1, of which those from s on are real.

    num_drafts [B] int64: how many are made; starts [B] int64: s; hidden_slots [B * W] int64: where h0 lies, the
    reserved slot for padding. size: W.
    """

    num_drafts: Tensor
    starts: Tensor
    hidden_slots: Tensor
    size: int


class PassRows(NamedTuple):
    """The rows of one pass over the windows: W for each lane, or one for a further draft of a single module.

    token_ids, positions [T] int64; slots [T] int64: where keys and values go, the reserved slot for rows that are exact
    already and for padding; first_rows, num_rows, flat_rows, origins [B] int32 as in `Lanes`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    first_rows: Tensor
    num_rows: Tensor
    flat_rows: Tensor
    origins: Tensor
