"""Recurrent layers over paged rows: the state at a known row, and the inputs of the rows after it.

A state is kept after some row of committed tokens, never after a draft. The rows behind it whose drafts were accepted
are replayed from their inputs, which are cached row by row like keys and values; then follow the rows of the pass. So
nothing is rolled back, and no state is kept for every row: it may be tens of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.plan import RequestPlan

Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the inputs [B, earlier + L, width] of L rows and of those before them (zeros before a sequence), which of the L
rows are real [B, L], and states [B, ...], to outputs [B, L, out] and the states after the rows. Rows that are not real
come last; they change no state."""


@dataclass(frozen=True)
class _Run:
    """Rows first..end-1 of a sequence, from one state to the next; that is kept in `block`, if there is one."""

    first: int
    end: int
    block: int | None


@dataclass(frozen=True)
class _Stage:
    """One run of several requests each, padded to B requests of L rows.

    members [B]: which requests. rows [B, L]: in their sequences; is_real [B, L]: which are no padding. outputs: where
    in the flat batch outputs go, and which of the B * L rows they are, [n] both. kept: of which members the state after
    the run is kept, and in which blocks, [m] both.
    """

    members: Tensor
    rows: Tensor
    is_real: Tensor
    outputs: tuple[Tensor, Tensor]
    kept: tuple[Tensor, Tensor]


class RecurrentRows:
    """What recurrent layers do in one pass of the target over the rows of `plans`."""

    def __init__(self, plans: Sequence[RequestPlan], storage: CacheStorage, device: torch.device) -> None:
        layout, self._block_size, self._device = storage.layout, storage.block_size, device
        group = layout.state_group
        assert group is not None
        size = self._block_size * layout.groups[group].span
        begins = [plan.num_state_rows for plan in plans]
        reads = [plan.blocks[group][(begin - 1) // size] if begin else 0 for plan, begin in zip(plans, begins)]
        self._reads = torch.tensor(reads).to(device)
        self._is_fresh = torch.tensor([begin == 0 for begin in begins]).to(device)
        self._first_rows = torch.tensor([plan.first_row for plan in plans])
        ends = list(accumulate(len(plan.token_ids) for plan in plans))
        self._flat_rows = torch.tensor([end - len(plan.token_ids) for end, plan in zip(ends, plans)])
        self._num_rows = ends[-1]
        runs = [_runs(plan, plan.blocks[group], size) for plan in plans]
        self._stages = [stage for number in range(max(map(len, runs))) for stage in self._stages_of(number, runs)]
        self._tables = self._input_tables(plans, storage)
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _stages_of(self, number: int, runs: Sequence[Sequence[_Run]]) -> Iterator[_Stage]:
        """The same run of all requests, those of about one length together, so that less than half is padding."""
        by_length: dict[int, list[int]] = {}
        for index, own in enumerate(runs):
            if len(own) > number:
                length = own[number].end - own[number].first
                by_length.setdefault((length - 1).bit_length(), []).append(index)
        return (self._stage(number, runs, chosen) for chosen in by_length.values())

    def _stage(self, number: int, runs: Sequence[Sequence[_Run]], chosen: Sequence[int]) -> _Stage:
        own = [runs[index][number] for index in chosen]
        first, end = torch.tensor([(run.first, run.end) for run in own]).unsqueeze(2).unbind(1)
        rows = first + torch.arange(int((end - first).max()))
        is_real = rows < end
        members = torch.tensor(chosen)
        offsets = rows - self._first_rows[members].unsqueeze(1)
        is_output = is_real & (offsets >= 0)
        flat = (self._flat_rows[members].unsqueeze(1) + offsets)[is_output]
        kept = torch.tensor([(i, run.block) for i, run in enumerate(own) if run.block is not None], dtype=torch.int64)
        positions, blocks = kept.view(-1, 2).to(self._device).unbind(1)
        outputs = flat.to(self._device), is_output.flatten().nonzero().squeeze(1).to(self._device)
        to = self._device
        return _Stage(members.to(to), rows.to(to), is_real.to(to), outputs, (positions, blocks))

    def _input_tables(self, plans: Sequence[RequestPlan], storage: CacheStorage) -> Tensor:
        """Block tables of the group that holds the inputs, [requests, blocks]."""
        layout = storage.layout
        number = next(number for number in layout.recurrent_groups if number != layout.state_group)
        tables = [torch.tensor(plan.blocks[number]) for plan in plans]
        return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(self._device)

    def _where(self, earlier: int) -> list[tuple[Tensor, Tensor]]:
        """By stage: the slots of its rows and of the `earlier` ones before them, [B, earlier + L], and which exist."""
        found = self._seen.get(earlier)
        if found is None:
            found = self._seen[earlier] = []
            for stage in self._stages:
                before = stage.rows[:, :1] + torch.arange(-earlier, 0, device=self._device)
                exists = torch.cat((before >= 0, stage.is_real), dim=1)
                rows = torch.cat((before, stage.rows), dim=1).clamp(0, self._tables.shape[1] * self._block_size - 1)
                blocks = self._tables[stage.members.unsqueeze(1), rows // self._block_size]
                found.append((blocks * self._block_size + rows % self._block_size, exists))
        return found

    def run(self, inputs: Tensor, states: Tensor, earlier: int, rule: Rule) -> Tensor:
        """Apply a layer's rule to the rows of the pass: outputs [T, out].

        inputs [num_slots, width]: of all rows, those of the pass included. states [num_blocks, ...]: read, and written
        after committed rows. earlier: how many rows before its own the rule looks at in a row's inputs.
        """
        state = states.index_select(0, self._reads)
        state[self._is_fresh] = 0.0
        output: Tensor | None = None
        for stage, (slots, exists) in zip(self._stages, self._where(earlier)):
            seen = inputs[slots]
            seen = torch.where(exists.unsqueeze(2), seen, seen.new_zeros(()))
            outputs, after = rule(seen, stage.is_real, state[stage.members])
            if output is None:
                output = outputs.new_empty(self._num_rows, outputs.shape[2])
            flat, chosen = stage.outputs
            output[flat] = outputs.flatten(0, 1)[chosen]
            state[stage.members] = after
            positions, blocks = stage.kept
            states[blocks] = after[positions]
        assert output is not None
        return output


def _runs(plan: RequestPlan, table: Sequence[int], size: int) -> list[_Run]:
    """The rows from a request's state to the last of the pass, cut after every row whose state is kept: the last of a
    block of `size` rows, and the last committed one."""
    begin, committed, end = plan.num_state_rows, plan.next_state_rows, plan.first_row + len(plan.token_ids)
    cuts = [begin, *range((begin // size + 1) * size, committed, size), committed]
    runs = [_Run(first, last, table[(last - 1) // size]) for first, last in pairwise(cuts) if first < last]
    return runs if end == committed else [*runs, _Run(committed, end, None)]
