"""Recurrent layers over paged rows, with a rule whose outcome can be said of every row.

The state after row r is the sum of DECAY ** (r - i) times input i over all rows i up to r. All that a pass has no
business with is NaN: states of other blocks, inputs of rows further back, the reserved block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foredraft.cache.groups import NO_KV, CacheLayout, InputShape, StateShape, StoredRows
from foredraft.cache.storage import CacheStorage
from foredraft.models.recurrence import RecurrentRows
from foredraft.plan import RequestPlan, RequestTerms
from foredraft.sampling_params import SamplingParams

DECAY = 0.9
WIDTH = 3
BLOCK_SIZE, SPAN, EARLIER, MAX_DRAFTS = 2, 2, 2, 3
SIZE = BLOCK_SIZE * SPAN
"""Rows from one state that is kept to the next."""


def rule(seen: Tensor, is_real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's output is the state after it, and the inputs that it sees, the oldest first."""
    assert bool(seen.isfinite().all())
    num_rows = is_real.shape[1]
    states = []
    for row in range(num_rows):
        after = DECAY * state + seen[:, row - num_rows]
        state = torch.where(is_real[:, row, None], after, state)
        states.append(state)
    windows = seen.unfold(1, seen.shape[1] - num_rows + 1, 1).transpose(2, 3).flatten(2)
    return torch.cat((torch.stack(states, dim=1), windows), dim=2), state


def state_after(inputs: Tensor, num_rows: int) -> Tensor:
    """inputs: of the rows of a request, [R, WIDTH]."""
    return (DECAY ** torch.arange(num_rows - 1, -1, -1.0).unsqueeze(1) * inputs[:num_rows]).sum(0)


def output_at(inputs: Tensor, row: int, earlier: int) -> Tensor:
    padded = torch.cat((torch.zeros(earlier, WIDTH), inputs))
    return torch.cat((state_after(inputs, row + 1), padded[row : row + earlier + 1].flatten()))


@dataclass
class Request:
    """inputs [R, WIDTH]: of all its rows. The next pass computes rows first_row..end-1, of which those of num_tokens
    tokens are committed. input_blocks, state_blocks: its block tables."""

    inputs: Tensor
    num_state_rows: int
    first_row: int
    end: int
    num_tokens: int
    input_blocks: list[int] = field(default_factory=list)
    state_blocks: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_state_rows: int, first_row: int, end: int, num_tokens: int) -> Request:
        generator = torch.Generator().manual_seed(1000 * num_state_rows + 10 * end + num_tokens)
        return cls(torch.randn(end, WIDTH, generator=generator), num_state_rows, first_row, end, num_tokens)

    @property
    def plan(self) -> RequestPlan:
        terms = RequestTerms("", (0,), SamplingParams(), 0, 100, frozenset(), 0)
        return RequestPlan(
            terms,
            token_ids=(0,) * (self.end - self.first_row),
            first_row=self.first_row,
            num_draft_tokens=max(0, self.end - self.num_tokens),
            num_tokens=self.num_tokens,
            is_sampling=self.end >= self.num_tokens,
            blocks=((), tuple(self.input_blocks), tuple(self.state_blocks)),
            window=None,
            num_state_rows=self.num_state_rows,
        )

    @property
    def kept(self) -> dict[int, int]:
        """By block: how many rows the state in it has seen, of all that a pass must write."""
        last = min(self.end, self.num_tokens)
        counts = [count for count in range(self.num_state_rows + 1, last) if count % SIZE == 0]
        return {self.state_blocks[(count - 1) // SIZE]: count for count in [*counts, last]}


class Pool:
    """A cache of which every number is NaN that nobody has written."""

    def __init__(self) -> None:
        stored = StoredRows(
            (NO_KV,), (InputShape(0, "", WIDTH, EARLIER + 1, is_replayed=True),), (StateShape(0, (WIDTH,)),)
        )
        layout = CacheLayout.build(stored, StoredRows(), 1, torch.float32, MAX_DRAFTS, SPAN)
        assert [bool(group.states) for group in layout.groups] == [False, False, True]
        self.storage = CacheStorage(layout, [64] * 3, BLOCK_SIZE, torch.device("cpu"))
        self.inputs, self.states = self.storage.target_inputs[0, ""].rows, self.storage.states[0]
        self.inputs.fill_(torch.nan)
        self.states.fill_(torch.nan)
        self._free = random.Random(0).sample(range(1, 64), 63)

    def hold(self, request: Request) -> None:
        """Give it blocks, as far as a pass needs any, and write its state."""
        first = max(0, request.num_state_rows - EARLIER)
        request.input_blocks = request.input_blocks or [0] * (first // BLOCK_SIZE)  # given back
        while len(request.input_blocks) * BLOCK_SIZE < request.end:
            request.input_blocks.append(self._free.pop())
        is_new = not request.state_blocks
        if is_new:
            request.state_blocks = [0] * (max(0, request.num_state_rows - 1) // SIZE)
        while len(request.state_blocks) * SIZE < request.end:
            request.state_blocks.append(self._free.pop())
        if is_new and request.num_state_rows:
            block = request.state_blocks[(request.num_state_rows - 1) // SIZE]
            self.states[block] = state_after(request.inputs, request.num_state_rows)
        self.write(request, first)

    def write(self, request: Request, first: int) -> None:
        slots = self.storage.slots(request.input_blocks, request.end)
        self.inputs[slots[first:]] = request.inputs[first : request.end]

    def run(self, requests: list[Request]) -> None:
        """A pass over some requests: everything that it must do and leave alone is checked."""
        recurrent = RecurrentRows([request.plan for request in requests], self.storage, torch.device("cpu"))
        inputs = self.inputs.clone()
        for earlier in (0, EARLIER):  # of two layers, on the same states
            states = self.states.clone()
            outputs = recurrent.run(self.inputs, states, earlier, rule)
            wanted = [output_at(one.inputs, row, earlier) for one in requests for row in range(one.first_row, one.end)]
            torch.testing.assert_close(outputs, torch.stack(wanted))
            kept = {block: state_after(one.inputs, n) for one in requests for block, n in one.kept.items()}
            torch.testing.assert_close(states[list(kept)], torch.stack(list(kept.values())))
            others = [block for block in range(len(states)) if block not in kept]
            assert torch.equal(states[others].view(torch.int32), self.states[others].view(torch.int32))
        assert torch.equal(inputs.view(torch.int32), self.inputs.view(torch.int32))
        self.states.copy_(states)


PASSES = {
    "fresh": (0, 0, 3, 9),
    "fresh, one row": (0, 0, 1, 1),
    "fresh, up to a state": (0, 0, SIZE, 9),
    "fresh, across two states": (0, 0, 11, 11),
    "a chunk from a state on": (SIZE, SIZE, 7, 9),
    "a chunk across a state": (6, 6, 10, 13),
    "a chunk across three states": (5, 5, 18, 18),
    "one row": (9, 9, 10, 10),
    "one row, to a state": (11, 11, 12, 12),
    "one row, from a state": (8, 8, 9, 9),
    "drafts": (5, 5, 8, 6),
    "drafts behind a state": (7, 7, 11, 8),
    "replayed rows": (5, 7, 8, 8),
    "replayed rows and drafts": (9, 11, 14, 12),
    "replayed rows and drafts across a state": (3, 6, 9, 7),
    "replayed rows of all accepted drafts": (6, 9, 13, 10),
    "a chunk after replayed rows": (6, 7, 12, 20),
}
"""By what is in them: rows the state has seen, first row and end of the pass, committed tokens."""


@pytest.mark.parametrize("name", PASSES)
def test_a_request_alone(name: str) -> None:
    pool, request = Pool(), Request.new(*PASSES[name])
    pool.hold(request)
    pool.run([request])


@pytest.mark.parametrize("seed", range(8))
def test_requests_together(seed: int) -> None:
    chosen = random.Random(seed).sample(list(PASSES.values()), 2 + seed // 2)
    pool, requests = Pool(), [Request.new(*one) for one in chosen]
    for request in requests:
        pool.hold(request)
    pool.run(requests)


def test_a_state_that_requests_share_is_left_alone() -> None:
    """Two go on from the state after the same rows, a third has computed some more of its own."""
    pool, first = Pool(), Request.new(SIZE, SIZE, 10, 10)
    pool.hold(first)
    others = [Request.new(SIZE, SIZE, 7, 5), Request.new(SIZE, 6, 7, 7)]
    for other in others:
        other.inputs[:SIZE] = first.inputs[:SIZE]
        other.state_blocks = first.state_blocks[:1]
        other.input_blocks = first.input_blocks[: SIZE // BLOCK_SIZE]
        pool.hold(other)
    shared = first.state_blocks[0]
    before = pool.states[shared].clone()
    assert all(shared not in one.kept and one.state_blocks[0] == shared for one in (first, *others))
    pool.run([first, *others])
    assert torch.equal(pool.states[shared], before)


@pytest.mark.parametrize("seed", range(6))
def test_steps_with_drafts(seed: int) -> None:
    """Requests that run for some steps, whose drafts are accepted in any number; rejected ones leave nothing behind."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = Pool()
    requests = [Request.new(0, 0, length, length) for length in (1, 6, 9)]
    seen = set()
    for _ in range(8):
        for one in requests:
            pool.hold(one)
        pool.run(requests)
        for one in requests:
            one.num_state_rows = min(one.end, one.num_tokens)
            num_accepted = chance.randint(0, one.end - one.num_tokens)
            seen.add((one.end - one.num_tokens, num_accepted))
            one.num_tokens += num_accepted + 1
            one.first_row, num_drafts = one.num_tokens - 1, chance.randint(0, MAX_DRAFTS)
            one.end = one.num_tokens + num_drafts
            fresh = torch.randn(one.end - one.first_row, WIDTH, generator=generator)
            one.inputs = torch.cat((one.inputs[: one.first_row], fresh))
    assert any(accepted == drafts > 0 for drafts, accepted in seen)
    assert any(0 < accepted < drafts for drafts, accepted in seen)
    assert any(accepted == 0 < drafts for drafts, accepted in seen)
