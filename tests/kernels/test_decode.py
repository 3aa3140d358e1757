"""The functions between forward passes: those of Triton against those of torch, and both against the rule itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decode_cases import DEVICE, DecodeCase, Events, assert_alike, decode_cases, run_cycle, run_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.exactness import DraftCycle, ExactRows
from foredraft.kernels.decode_ops import DecodeKernels, decode_kernels_named, decode_kernels_of
from foredraft.kernels.decode_state import (
    BROKEN,
    CYCLE_DEPTH,
    EXACT,
    MAX_TOTAL,
    NOBODY,
    NUM_DRAFTS,
    NUM_TOKENS,
    ORIGIN,
    RING_SIZE,
    DraftWindow,
)
from foredraft.kernels.ops import KernelsName

pytest.importorskip("triton")

REFERENCE = decode_kernels_named("torch")
SEEDS = st.integers(0, 2**31)
Run = Callable[[DecodeKernels, DecodeCase, Events], dict[str, Tensor]]


def target_rows(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    return kernels.target_rows(case.state, case.lanes, case.num_rows)._asdict()


def commit_greedy(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    drafts = REFERENCE.target_rows(case.state, case.lanes, case.num_rows).drafts
    emitted = torch.full_like(events.own, -7)
    kernels.commit_greedy(case.state, case.lanes, drafts, events.choices(drafts), emitted, events.row_sums)
    return {"emitted": emitted}


def commit_tokens(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    """As many as `agrees` says; those of a lane at its end are dropped."""
    is_emitted = events.agrees.cumprod(dim=1).bool()
    is_emitted[:, 0] = True
    emitted = events.own.masked_fill(~is_emitted, -1)
    kernels.commit_tokens(case.state, case.lanes, emitted, events.row_sums)
    return {"emitted": emitted}


def draft_window(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    results = kernels.draft_window(case.state, case.lanes, events.depths, case.size, case.max_depth, case.group)
    assert results.size == case.size
    return {"num_drafts": results.num_drafts, "starts": results.starts, "hidden_slots": results.hidden_slots}


def window_of(case: DecodeCase, events: Events) -> DraftWindow:
    return REFERENCE.draft_window(case.state, case.lanes, events.depths, case.size, case.max_depth, case.group)


def pass_rows(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    window = window_of(case, events)
    results: dict[str, Tensor] = {}
    for index in range(case.max_depth):
        rows = kernels.pass_rows(case.state, case.lanes, window, index, case.group)
        results |= {f"{name} of pass {index}": tensor for name, tensor in rows._asdict().items()}
    return results


def record_draft(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    window = window_of(case, events)
    drafts = torch.full((len(case.lanes), case.max_depth), -7, device=DEVICE)
    for index in reversed(range(0, case.max_depth, 2)):  # the other columns stay as they are
        kernels.record_draft(case.state, case.lanes, window, index, events.chosen[index], drafts)
    return {"drafts": drafts}


def finish_window(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    window = window_of(case, events)
    kernels.finish_window(case.state, case.lanes, window)
    return {}


@pytest.mark.parametrize("run", [target_rows, commit_greedy, commit_tokens])
@given(case=decode_cases(), seed=SEEDS)
@settings(max_examples=40)
def test_the_target_and_its_tokens(run: Run, case: DecodeCase, seed: int) -> None:
    assert_alike(case, Events.random(case, torch.Generator().manual_seed(seed)), run)


@pytest.mark.parametrize("run", [draft_window, pass_rows, record_draft, finish_window, run_passes])
@given(case=decode_cases(num_modules=(1, 3, 8)), seed=SEEDS)
@settings(max_examples=30)
def test_drafts(run: Run, case: DecodeCase, seed: int) -> None:
    assert_alike(case, Events.random(case, torch.Generator().manual_seed(seed)), run)


@given(case=decode_cases(), seed=SEEDS)
@settings(max_examples=8)
def test_many_cycles(case: DecodeCase, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    all_events = [Events.random(case, generator, is_sampled=cycle % 3 == 1) for cycle in range(12)]

    def run(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for cycle, events in enumerate(all_events):
            results |= {f"{name}, cycle {cycle}": each for name, each in run_cycle(kernels, case, events).items()}
        return results

    assert_alike(case, all_events[0], run)


class Request:
    """What the host would know of one lane."""

    def __init__(self, case: DecodeCase, lane: int) -> None:
        self.lane = lane
        self.slot = int(case.lanes[lane])
        self.num_modules, self.ring = case.state.num_modules, case.state.ring
        columns = case.state.ints[self.slot].tolist()
        self.num_tokens, self.end = columns[NUM_TOKENS], columns[MAX_TOTAL]
        self.tokens = columns[self.ring :]
        depth = columns[CYCLE_DEPTH]
        cycle = DraftCycle(self.num_tokens, self.num_tokens - 1, depth) if depth else None
        self.exact = ExactRows(tuple(columns[EXACT : self.ring]), cycle, columns[ORIGIN])

    def take(self, results: dict[str, Tensor]) -> None:
        """Go through the cycle that had these results."""
        first = int(results["emitted"][self.lane, 0])
        emitted = [token for token in results["emitted"][self.lane].tolist() if token >= 0]
        assert (bool(emitted) or first == BROKEN) == (self.slot != NOBODY and self.num_tokens < self.end)
        self._place(emitted)
        self.exact = self.exact.after_verify(len(emitted) - 1) if emitted else self.exact._replace(cycle=None)
        self.num_tokens += len(emitted)
        drafts = results["new drafts"][self.lane].tolist()
        drafts = [token for token in drafts if token >= 0]
        self._place(drafts)
        depth, self.exact = min(len(drafts), self.num_modules), self.exact._replace(cycle=None)
        if drafts:
            self.exact = self.exact.after_draft(self.num_tokens, self.num_tokens - 1, depth)
        self.numbers = [self.num_tokens, len(drafts), depth, self.end]

    def _place(self, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, self.num_tokens):
            self.tokens[position % RING_SIZE] = token


@pytest.mark.parametrize("name", ["torch", "triton"])
@given(case=decode_cases(num_modules=(1, 3, 8)), seed=SEEDS)
@settings(max_examples=10)
def test_cycles_keep_the_rule_of_exactness(name: KernelsName, case: DecodeCase, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = [Request(case, lane) for lane in range(len(case.lanes))]
    for _ in range(4):
        results = run_cycle(decode_kernels_named(name), case, Events.random(case, generator))
        for request in requests:
            request.take(results)
            columns = case.state.ints[request.slot].tolist()
            assert [columns[each] for each in (NUM_TOKENS, NUM_DRAFTS, CYCLE_DEPTH, MAX_TOTAL)] == request.numbers
            assert tuple(columns[EXACT : request.ring]) == request.exact.num_exact_rows
            assert columns[request.ring :] == request.tokens


def test_the_device_chooses() -> None:
    assert decode_kernels_of(torch.device("cpu")) is decode_kernels_named("torch")
    assert decode_kernels_of(torch.device("cuda", 0)) is decode_kernels_named("triton")
