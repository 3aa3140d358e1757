"""What goes between host and device in a step: one copy in, one copy out, from and to fixed places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MailboxSize:
    """max_lanes: most requests in a step; max_depth: most drafts; max_updates: table entries that fit one step."""

    max_lanes: int
    max_depth: int
    max_updates: int


class Mailbox:
    """Device tensors that programs read from and write to.

    inbox [2 * lanes + 2 * updates] int64: the slot and the depth of each lane, then indices into the block tables and
    the entries to put there. outbox: [lanes, rows] emitted tokens, then [lanes, depth] drafts, -1 padded; int64.
    """

    def __init__(self, size: MailboxSize, device: torch.device) -> None:
        self.size = size
        self._inbox = torch.zeros(2 * size.max_lanes + 2 * size.max_updates, dtype=torch.int64, device=device)
        self._emitted = torch.full((size.max_lanes * (size.max_depth + 1),), -1, dtype=torch.int64, device=device)
        self._drafts = torch.full((size.max_lanes * max(1, size.max_depth),), -1, dtype=torch.int64, device=device)
        # A step's buffers are used again by the third one after it: no more than two steps are under way.
        self._sent = itertools.cycle([_host_copy(self._inbox) for _ in range(3)])
        self._read = itertools.cycle([(_host_copy(self._emitted), _host_copy(self._drafts)) for _ in range(3)])

    def slots(self, num_lanes: int) -> Tensor:
        return self._inbox[:num_lanes]

    def depths(self, num_lanes: int) -> Tensor:
        first = self.size.max_lanes
        return self._inbox[first : first + num_lanes]

    def emitted(self, num_lanes: int, num_rows: int) -> Tensor:
        return self._emitted[: num_lanes * num_rows].view(num_lanes, num_rows)

    def drafts(self, num_lanes: int, depth: int) -> Tensor:
        return self._drafts[: num_lanes * depth].view(num_lanes, depth)

    def apply_table_updates(self, tables: Tensor) -> None:
        """Put the entries that came with the step into the block tables. Unused places set an entry of nobody."""
        index, entries = self._inbox[2 * self.size.max_lanes :].view(2, -1)
        tables.view(-1).index_copy_(0, index, entries.int())

    def send(self, slots: Sequence[int], depths: Sequence[int], updates: Sequence[tuple[int, int]]) -> None:
        """Copy a step's orders to the device. updates: at most max_updates, index and entry of each.

        The copy waits for nothing.
        """
        buffer = next(self._sent)
        numbers = buffer.numpy()
        lanes, most = self.size.max_lanes, self.size.max_updates
        numbers.fill(0)
        numbers[: len(slots)] = slots
        numbers[lanes : lanes + len(depths)] = depths
        if updates:
            index, entries = zip(*updates)
            numbers[2 * lanes : 2 * lanes + len(index)] = index
            numbers[2 * lanes + most : 2 * lanes + most + len(entries)] = entries
        self._inbox.copy_(buffer, non_blocking=True)

    def read(self, num_lanes: int, num_rows: int, depth: int) -> tuple[Tensor, Tensor | None]:
        """Copy what was emitted and drafted to the host; it is there once the device has come so far.

        Returns [lanes, rows], and [lanes, depth] if there are drafts.
        """
        emitted, drafts = next(self._read)
        host_emitted = _copied(self.emitted(num_lanes, num_rows), emitted)
        return host_emitted, _copied(self.drafts(num_lanes, depth), drafts) if depth else None


def _copied(tensor: Tensor, buffer: Tensor) -> Tensor:
    return buffer[: tensor.numel()].view_as(tensor).copy_(tensor, non_blocking=True)


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
