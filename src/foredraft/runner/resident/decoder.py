"""The host's side of resident decoding: which requests have slots, what is sent for a step, what is read back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.kernels.decode_state import BROKEN, NOBODY, RING_SIZE
from foredraft.media import FIRST_MEDIA_ID
from foredraft.plan import AheadRequest, RequestPlan, RequestResult, StepTimes
from foredraft.runner.resident.graphs import GraphCache
from foredraft.runner.resident.mailbox import Mailbox, MailboxSize
from foredraft.runner.resident.shape import (
    GREEDY,
    MAX_WINDOW,
    WINDOW_SIZES,
    DraftShape,
    SamplingKind,
    TargetShape,
    depth_sizes,
    lane_sizes,
    padded,
    window_need,
)
from foredraft.runner.resident.slot_state import SlotLayout, SlotState
from foredraft.runner.resident.step import ResidentModel, run_drafts, run_target


class _Lane(NamedTuple):
    """One request in a step: at most num_rows target rows, num_window rows of its window, `depth` drafts."""

    plan: RequestPlan | AheadRequest
    num_rows: int
    num_window: int
    depth: int


@dataclass
class _Slot:
    """index: its row on the device. tables: the block tables as they are there."""

    index: int
    tables: tuple[tuple[int, ...], ...]


class Flight:
    """A step that was launched; `collect` waits for it."""

    def __init__(self, request_ids: Sequence[str], emitted: Tensor, drafts: Tensor | None, clock: _Clock) -> None:
        self.request_ids = tuple(request_ids)
        self._emitted = emitted
        self._drafts = drafts
        self._clock = clock

    def collect(self) -> dict[str, RequestResult]:
        """What came of each request."""
        self._clock.wait()
        emitted = self._emitted.tolist()
        drafts = self._drafts.tolist() if self._drafts is not None else [()] * len(emitted)
        return {
            request_id: RequestResult.broken(request_id)
            if tokens[0] == BROKEN
            else RequestResult(request_id, _until_padding(tokens), _until_padding(drafted))
            for request_id, tokens, drafted in zip(self.request_ids, emitted, drafts)
        }

    def times(self) -> StepTimes:
        """How long the target (with verification) and the drafts took; after `collect`."""
        return self._clock.times()


class ResidentDecoder:
    """Runs steady decode steps whose state stays on the device.

    A step may be launched from a plan, with the numbers of all its requests sent along, or ahead: before the step under
    way has ended, for the same requests or fewer of them, from the numbers that this step will leave on the device.
    """

    def __init__(
        self, model: ResidentModel, max_num_seqs: int, max_depth: int, max_blocks: int, *, use_graphs: bool
    ) -> None:
        device, layout = model.target.device, model.storage.layout
        num_groups = len(layout.groups)
        probs_width = model.head.num_tokens if model.head is not None else 0
        self._model = model
        self.max_blocks = max_blocks
        self._max_depth = max_depth
        self._lane_sizes = lane_sizes(max_num_seqs) if device.type == "cuda" else tuple(range(1, max_num_seqs + 1))
        self._depths = depth_sizes(max_depth)
        self._state = SlotState(
            SlotLayout(max_num_seqs + 1, len(layout.modules), max_depth, num_groups, max_blocks, probs_width),
            device,
        )
        size = MailboxSize(max_num_seqs, max_depth, 32 + 2 * num_groups * max_num_seqs)
        self._mailbox = Mailbox(size, device)
        self.graphs = GraphCache(device, is_enabled=use_graphs)
        self._slots: dict[str, _Slot] = {}

    def capture(self) -> None:
        """Capture what plain decoding and decoding at the largest depth need, for all numbers of requests.

        Greedy, and drawn without filters; others are captured when they are first needed, as everything is otherwise.
        """
        for num_lanes in reversed(self._lane_sizes):  # the largest first: the others fit the memory that it takes
            for depth in sorted({0, self._max_depth}):
                for kind in (SamplingKind(True), GREEDY):
                    self._mailbox.send([], [], [])
                    self._run(num_lanes, depth + 1, depth + 1, depth, kind)
                    self.graphs.wait()

    def can_run(self, plan: RequestPlan) -> bool:
        """Whether this step of a request is a decode that needs nothing of the host before it ends.

        The caller has seen to it that its options do not change logits and that no log-probabilities are wanted.
        """
        num_drafts = plan.num_draft_tokens
        is_decode = plan.is_sampling and len(plan.token_ids) == num_drafts + 1 and num_drafts <= self._max_depth
        if not is_decode or plan.num_tokens >= plan.terms.max_total_tokens or _reads_media(plan):
            return False
        depth = max(num_drafts, plan.window.depth if plan.window is not None else 0)
        most_rows = max(window_need(plan), depth + 1)
        if most_rows > MAX_WINDOW or most_rows + depth + 2 > RING_SIZE:
            return False
        cycle = plan.window.exact.cycle if plan.window is not None else None
        return cycle is None or (cycle.num_tokens, cycle.num_computed_tokens) == (plan.num_tokens, plan.first_row)

    def launch(self, plans: Sequence[RequestPlan], draft_probs: Sequence[Sequence[Tensor | None]]) -> Flight:
        """Launch a step of requests that `can_run`. draft_probs: what the pending drafts of each were drawn from, where
        that is not in its slot already."""
        for plan, probs in zip(plans, draft_probs):
            if plan.request_id not in self._slots:
                self._slots[plan.request_id] = _Slot(self._free_slots()[0], ())
            for depth, one in enumerate(probs):
                assert one is not None, "drafts are chosen without chance under rules only, and those do not run here"
                self._state.draft_probs[self._slots[plan.request_id].index, depth] = one
        self._state.upload([self._slots[plan.request_id].index for plan in plans], plans)
        lanes = [
            _Lane(plan, plan.num_draft_tokens + 1, window_need(plan), plan.window.depth if plan.window else 0)
            for plan in plans
        ]
        return self._launch(lanes)

    def launch_ahead(self, requests: Sequence[AheadRequest]) -> Flight:
        """Launch the next step of requests that are in the step under way, which is not collected yet."""
        lanes = [_Lane(one, one.num_drafts + 1, max(one.num_drafts + 1, one.depth), one.depth) for one in requests]
        return self._launch(lanes)

    def take_probs(self, request_id: str) -> tuple[Tensor, ...]:
        """What the pending drafts of a request were drawn from, for a step that does not run here.

        Where fewer are pending, or they were chosen without chance, the others hold anything.
        """
        if not self._state.has_draft_probs:
            return ()
        return tuple(self._state.draft_probs[self._slots[request_id].index].clone())

    def surplus(self, plans: Sequence[RequestPlan]) -> list[str]:
        """Requests that must give up their slots so that each of `plans` can have one."""
        ids = {plan.request_id for plan in plans}
        num_missing = len(ids - self._slots.keys()) - len(self._free_slots())
        return [request_id for request_id in self._slots if request_id not in ids][: max(0, num_missing)]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def forget(self, request_id: str) -> None:
        """A request is over. Its slot may be used by the next one at once: work on the device is done in order."""
        self._slots.pop(request_id, None)

    def forget_all(self) -> None:
        self._slots.clear()

    def _free_slots(self) -> list[int]:
        """Worked out anew, so that whatever is broken off can lose none."""
        used = {slot.index for slot in self._slots.values()}
        return [index for index in range(NOBODY + 1, self._state.layout.num_slots) if index not in used]

    def _launch(self, lanes: Sequence[_Lane]) -> Flight:
        num_lanes = padded(len(lanes), self._lane_sizes)
        kind = SamplingKind.of([lane.plan.terms.params for lane in lanes])
        num_rows = 1 + padded(max(lane.num_rows for lane in lanes) - 1, self._depths)
        depth = padded(max(lane.depth for lane in lanes), self._depths)
        steady, most = max(num_rows, depth), max(lane.num_window for lane in lanes)
        window = steady if most <= steady else padded(most, WINDOW_SIZES)
        self._send(lanes)
        clock = self._run(num_lanes, num_rows, window, depth, kind)
        emitted, drafts = self._mailbox.read(num_lanes, num_rows, depth)
        clock.mark()
        count = len(lanes)
        return Flight(
            [lane.plan.terms.request_id for lane in lanes],
            emitted[:count],
            drafts[:count] if drafts is not None else None,
            clock,
        )

    def _run(self, num_lanes: int, num_rows: int, window: int, depth: int, kind: SamplingKind) -> _Clock:
        clock = _Clock(self._model.target.device)
        target = TargetShape(num_lanes, num_rows, kind)
        self.graphs.run(target, lambda: run_target(self._model, self._state, self._mailbox, target))
        clock.mark()
        if depth:
            draft = DraftShape(num_lanes, window, depth, kind)
            self.graphs.run(draft, lambda: run_drafts(self._model, self._state, self._mailbox, draft))
        return clock

    def _send(self, lanes: Sequence[_Lane]) -> None:
        updates: list[tuple[int, int]] = []
        slots = [self._slots[lane.plan.terms.request_id] for lane in lanes]
        for slot, lane in zip(slots, lanes):
            if slot.tables is not lane.plan.blocks:
                updates += self._table_updates(slot, lane.plan.blocks)
                slot.tables = lane.plan.blocks
        most = self._mailbox.size.max_updates
        if len(updates) > most:  # a request that has just come, with all its blocks
            index, entries = torch.tensor(updates[most:], device=self._state.device).T
            self._state.tables.view(-1).index_copy_(0, index, entries.int())
        self._mailbox.send([slot.index for slot in slots], [lane.depth for lane in lanes], updates[:most])

    def _table_updates(self, slot: _Slot, blocks: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
        """Flat indices into the tables, and entries, where what the device has is not `blocks`."""
        layout = self._state.layout
        known = slot.tables or ((),) * len(blocks)
        updates = []
        for group, (old, new) in enumerate(zip(known, blocks)):
            if old is not new and old != new:
                base = (group * layout.num_slots + slot.index) * layout.max_blocks
                same = len(old)
                updates += [(base + i, now) for i, (was, now) in enumerate(zip(old, new)) if was != now]
                updates += [(base + i, new[i]) for i in range(same, len(new))]
        return updates


class _Clock:
    """Marks in the order of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def wait(self) -> None:
        """Return when the last mark is reached."""
        if self._events:
            self._events[-1].synchronize()

    def times(self) -> StepTimes:
        if self._events:
            first, verified, last = self._events
            return StepTimes(first.elapsed_time(verified) / 1e3, 0.0, verified.elapsed_time(last) / 1e3)
        first_time, verified_time, last_time = self._times
        return StepTimes(verified_time - first_time, 0.0, last_time - verified_time)


def _until_padding(row: Sequence[int]) -> tuple[int, ...]:
    end = row.index(-1) if -1 in row else len(row)
    return tuple(row[:end])


def _reads_media(plan: RequestPlan) -> bool:
    """Whether a row of the step, or one of the modules' that it makes, reads what the prompt shows: the device keeps
    tokens."""
    if not plan.terms.media:
        return False
    windowed = plan.window.token_ids if plan.window is not None else ()
    return max((*plan.token_ids, *windowed)) >= FIRST_MEDIA_ID
