"""Random requests in the midst of decoding and what happens to them in a step, to run `DecodeKernels` on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels.decode_ops import DecodeKernels, decode_kernels_named
from foredraft.kernels.decode_state import (
    CYCLE_DEPTH,
    EXACT,
    MAX_TOTAL,
    NOBODY,
    NUM_DRAFTS,
    NUM_TOKENS,
    ORIGIN,
    RING_SIZE,
    DecodeState,
)
from foredraft.speculation.verifier import verify_greedy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_POSITIONS = 320
MAX_TOKENS = 280
VOCAB_SIZE = 1000


@dataclass(frozen=True)
class DecodeCase:
    """A state and the lanes of a step. At most `max_depth` drafts are made, over windows of `size` rows.

    group: where the modules and h0 lie.
    """

    state: DecodeState
    lanes: Tensor
    max_depth: int
    size: int
    group: int

    @property
    def num_rows(self) -> int:
        return self.max_depth + 1

    def clone(self) -> DecodeCase:
        return replace(self, state=replace(self.state, ints=self.state.ints.clone(), tables=self.state.tables.clone()))


@dataclass(frozen=True)
class Events:
    """What models and requests bring to one step of B lanes.

    own [B, R]: the target's tokens, where it does not agree with the draft (agrees [B, R]). depths [B]: drafts that are
    asked for. chosen [D, B]: those that are made. row_sums [B, R]: here and there not finite. is_sampled:
    `commit_tokens` takes the tokens, not `commit_greedy`.
    """

    own: Tensor
    agrees: Tensor
    depths: Tensor
    chosen: Tensor
    row_sums: Tensor
    is_sampled: bool = False

    @classmethod
    def random(cls, case: DecodeCase, generator: torch.Generator, *, is_sampled: bool = False) -> Events:
        shape = len(case.lanes), case.num_rows
        own = torch.randint(VOCAB_SIZE, shape, generator=generator)
        agrees = torch.rand(shape, generator=generator) < 0.8
        depths = torch.randint(case.max_depth + 2, shape[:1], generator=generator)
        chosen = torch.randint(VOCAB_SIZE, (case.max_depth, shape[0]), generator=generator)
        sums, kinds = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
        sums = sums.masked_fill(kinds < 0.01, torch.nan).masked_fill(kinds > 0.99, torch.inf)
        own, agrees, depths, chosen, sums = (each.to(DEVICE) for each in (own, agrees, depths, chosen, sums))
        return cls(own, agrees, depths, chosen, sums, is_sampled)

    def choices(self, drafts: Tensor) -> Tensor:
        """The target's own tokens [B, R] where `drafts` [B, R-1] are pending."""
        padded = F.pad(drafts, (0, 1), value=-1)
        return torch.where(self.agrees & (padded >= 0), padded, self.own)

    def copy_(self, other: Events) -> None:
        for name in ("own", "agrees", "depths", "chosen", "row_sums"):
            getattr(self, name).copy_(getattr(other, name))


def run_cycle(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    """One decode step of all lanes; returns what the functions returned, by name."""
    state, lanes = case.state, case.lanes
    rows = kernels.target_rows(state, lanes, case.num_rows)
    results = rows._asdict()
    own = events.choices(rows.drafts)
    results["emitted"] = torch.full_like(own, -7)
    if events.is_sampled:
        results["emitted"].copy_(verify_greedy(rows.drafts, own))
        kernels.commit_tokens(state, lanes, results["emitted"], events.row_sums)
    else:
        kernels.commit_greedy(state, lanes, rows.drafts, own, results["emitted"], events.row_sums)
    return results | run_passes(kernels, case, events) if case.max_depth else results


def run_passes(kernels: DecodeKernels, case: DecodeCase, events: Events) -> dict[str, Tensor]:
    """The second half of a step, which makes drafts."""
    state, lanes, group = case.state, case.lanes, case.group
    window = kernels.draft_window(state, lanes, events.depths, case.size, case.max_depth, group)
    drafts = torch.full((len(lanes), case.max_depth), -7, device=lanes.device)
    results = {"num_drafts": window.num_drafts, "starts": window.starts, "hidden_slots": window.hidden_slots}
    for index, chosen in enumerate(events.chosen):
        rows = kernels.pass_rows(state, lanes, window, index, group)
        results |= {f"{name} of pass {index}": tensor for name, tensor in rows._asdict().items()}
        kernels.record_draft(state, lanes, window, index, chosen, drafts)
    kernels.finish_window(state, lanes, window)
    return results | {"new drafts": drafts}


def assert_alike(
    case: DecodeCase, events: Events, run: Callable[[DecodeKernels, DecodeCase, Events], dict[str, Tensor]]
) -> None:
    """Triton's kernels give what torch's give, and leave the same state."""
    ours, theirs = case.clone(), case.clone()
    results = run(decode_kernels_named("triton"), ours, events)
    assert_equal(results, run(decode_kernels_named("torch"), theirs, events))
    assert torch.equal(ours.state.ints, theirs.state.ints)
    assert torch.equal(ours.state.tables, case.state.tables)


def assert_equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """In their numbers, dtypes and shapes."""
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(results[name], tensor, rtol=0, atol=0, msg=f"{name}: {results[name]}, not {tensor}")


@st.composite
def decode_cases(draw: st.DrawFn, num_modules: Sequence[int] = (0, 1, 3, 8)) -> DecodeCase:
    """Requests by the rule of exactness: just begun, at their ends, or with rows that were left out; and nobody."""
    modules = draw(st.sampled_from(num_modules))
    max_depth = draw(st.integers(2, 5)) if modules == 1 else modules
    requests = draw(st.lists(_requests(modules, max_depth), min_size=1, max_size=4))
    slots = draw(st.permutations(range(1, len(requests) + 1)))
    num_nobodies = draw(st.integers(0, 2))
    lanes = draw(st.permutations(slots[draw(st.integers(0, len(slots) - 1)) :] + [NOBODY] * num_nobodies))
    block_size, num_groups = draw(st.sampled_from([4, 16])), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    ints = torch.zeros(len(requests) + 1, EXACT + modules + RING_SIZE, dtype=torch.int64)
    ints[1:, : EXACT + modules] = torch.tensor(requests)
    ints[1:, EXACT + modules :] = torch.randint(VOCAB_SIZE, (len(requests), RING_SIZE), generator=generator)
    num_blocks = -(-NUM_POSITIONS // block_size) + 1
    tables = torch.randperm(num_groups * len(ints) * num_blocks, generator=generator).int() + 1
    tables = tables.view(num_groups, len(ints), num_blocks)
    tables[:, NOBODY] = 0
    return DecodeCase(
        DecodeState(ints.to(DEVICE), tables.to(DEVICE), modules, block_size, NUM_POSITIONS),
        torch.tensor(lanes, device=DEVICE),
        max_depth,
        draw(st.sampled_from([max(max_depth + 1, 3), 16, 24, 64])),
        draw(st.integers(0, num_groups - 1)),
    )


@st.composite
def _requests(draw: st.DrawFn, num_modules: int, max_depth: int) -> list[int]:
    """The columns of one request up to E_M."""
    n = draw(st.integers(1, 12) | st.integers(13, MAX_TOKENS))
    num_drafts = draw(st.integers(0, max_depth))
    columns = [0] * EXACT
    columns[NUM_TOKENS] = n
    columns[NUM_DRAFTS] = num_drafts
    columns[CYCLE_DEPTH] = min(num_drafts, num_modules)
    columns[MAX_TOTAL] = min(n + draw(st.integers(0, 4) | st.integers(5, 30)), NUM_POSITIONS)
    exact, last = [], n
    for k in range(1, num_modules + 1):
        last = max(0, min(last - draw(st.integers(0, 3)), n - k))
        exact.append(last)
    columns[ORIGIN] = draw(st.integers(0, min(exact, default=0)))
    return columns + exact
