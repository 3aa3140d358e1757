"""The oracle for decodes whose state stays on the device, while the step after each runs already.

A state machine adds requests, makes steps in which drafts are accepted by chance, changes depths, preempts, aborts and
resets the prefix cache. After every step it compares the rows that are counted as computed or exact with a fresh
prefill, and the counts with an account of which tokens each row was computed from. Deliberate faults in the arithmetic
on the device show that it notices.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from handing import move_all, soil
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prefill_oracle import Account, compare_with_prefill, model
from torch import Tensor

from foredraft.cache.block_tables import RowDemand
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.kernels.decode_state import NUM_TOKENS, RESERVED_SLOT, RING_SIZE, DecodeState, DraftWindow, PassRows
from foredraft.kernels.torch import decode
from foredraft.request import Request, RequestStatus
from foredraft.runner.resident.decoder import ResidentDecoder
from foredraft.sampling.sampler import SamplingTensors
from foredraft.sampling.sampling_state import SamplingState
from foredraft.sampling_params import SamplingParams
from foredraft.speculation.drafter import Drafter, Drafts, Window

MAX_NEW_TOKENS = 24
MAX_LEN = 40
ORACLE = settings(
    max_examples=20,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class Passes:
    """The module passes of a step on the device: number, positions and slots of the rows of each."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(decode, name)

    def pass_rows(self, state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, group: int) -> PassRows:
        rows = decode.pass_rows(state, lanes, window, index, group)
        self.seen.append((index, rows.positions.tolist(), rows.slots.tolist()))
        return rows


class Names:
    """A name for each token of a request: that of the draft it was, or one of its own.

    A draft may be refused by chance and then be the target's own choice: an account by tokens would take its rows for
    right, which nobody could know.
    """

    def __init__(self, count: Iterator[int], num_tokens: int) -> None:
        self._count = count
        self.known = self._fresh(num_tokens)
        self.pending: list[int] = []

    def _fresh(self, number: int) -> list[int]:
        return [next(self._count) for _ in range(number)]

    def grow(self, num_tokens: int) -> None:
        """Pending drafts and one further token are committed, if there are more tokens than before."""
        if num_tokens > len(self.known):
            num_accepted = num_tokens - len(self.known) - 1
            self.known += [*self.pending[:num_accepted], *self._fresh(1)]

    def draft(self, number: int) -> list[int]:
        """All names, with those of so many new drafts."""
        self.pending = self._fresh(number)
        return [*self.known, *self.pending]


class ResidentOracle(RuleBasedStateMachine):
    """One engine whose steps overlap, with a small budget and a small pool: chunks and preemptions happen too."""

    kind: ClassVar[str] = "llama"
    max_depth: ClassVar[int] = 4
    happened: ClassVar[set[str]] = set()

    @initialize(budget=st.integers(10, 20), num_blocks=st.integers(13, 24))
    def start(self, budget: int, num_blocks: int) -> None:
        self.engine = self.new_engine(budget, num_blocks, 4)
        self.accounts: dict[str, Account] = {}
        self.names: dict[str, Names] = {}
        self.count = itertools.count()
        self.prompts: list[tuple[int, ...]] = []
        self.num_added = 0
        self.watch()

    def watch(self) -> None:
        self.watch_cache()
        self.watch_host()
        self.watch_device()

    def new_engine(self, budget: int, num_blocks: int, block_size: int) -> Engine:
        config = EngineConfig(
            num_speculative_tokens=self.max_depth,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=2,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            synthetic_acceptance="0.8,0.7",
            execution="overlapped",
        )
        return build_engine(model(self.kind), config)

    def row_id(self, token_id: int) -> int:
        """What prompts have in the place of a token."""
        return token_id

    # -- what is entered into the accounts -----------------------------------------------------------------------------

    def watch_cache(self) -> None:
        cache = self.engine.cache
        admit, renew = cache.admit, cache.renew_modules

        def watched_admit(request_id: str, salt: str | None, match: PrefixMatch, demand: RowDemand) -> bool:
            is_admitted = admit(request_id, salt, match, demand)
            if is_admitted and not match.begins:  # else its rows have come with it
                self.accounts[request_id].share(self.names[request_id].known, match)
                self.happened.add("hit" if match.num_rows else "miss")
                self.happened.add("module hit" if match.num_module_rows else "module miss")
            return is_admitted

        def watched_renew(request_id: str, first_row: int, *, keep_before: bool) -> int:
            row = renew(request_id, first_row, keep_before=keep_before)
            if keep_before:
                self.accounts[request_id].drop(row)
            else:
                self.accounts[request_id].begin(first_row)
            self.happened.add("renewed" if keep_before else "restarted")
            return row

        cache.admit, cache.renew_modules = watched_admit, watched_renew  # type: ignore[method-assign]

    def watch_host(self) -> None:
        """Passes that the host lays out: of prefills, and of rows that lag behind."""
        drafter = self.engine.runner._drafter
        assert type(drafter) is Drafter
        run = drafter.run

        def watched(
            windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
        ) -> Drafts:
            drafts = run(windows, sampling, rules)
            for window in windows:
                self.note_window(window)
            return drafts

        drafter.run = watched  # type: ignore[method-assign]

    def note_window(self, window: Window) -> None:
        account, names = self.accounts[window.request_id], self.names[window.request_id]
        names.grow(window.num_tokens)
        known = names.draft(window.num_drafts) if window.num_drafts else names.known
        for depth in range(1, min(window.num_passes, len(account.rows)) + 1):
            end = window.end if window.num_drafts >= depth else min(window.end, window.num_tokens - depth)
            for row in range(max(window.start, window.num_exact_rows[depth - 1]), end):
                account.rows[depth - 1][row] = tuple(known[: row + depth + 1])

    def watch_device(self) -> None:
        """Passes of lanes. On a CPU they have run when a launch returns."""
        resident, passes = self.engine.runner.resident, Passes()
        assert resident is not None
        resident._model = replace(resident._model, decode=passes)
        launch = resident._launch

        def watched(lanes: Sequence[Any]) -> Any:
            passes.seen.clear()
            flight = launch(lanes)
            results = flight.collect()
            for index, lane in enumerate(lanes):
                outcome = results[lane.plan.terms.request_id]
                names = self.names[outcome.request_id]
                names.grow(len(names.known) + len(outcome.token_ids))
                known = names.draft(len(outcome.draft_token_ids))
                for number, positions, slots in passes.seen:
                    width = len(slots) // len(lanes)
                    own = slice(index * width, (index + 1) * width)
                    self.note_pass(self.accounts[outcome.request_id], number, positions[own], slots[own], known)
            return flight

        resident._launch = watched  # type: ignore[method-assign]

    def note_pass(
        self, account: Account, number: int, positions: Sequence[int], slots: Sequence[int], known: Sequence[int]
    ) -> None:
        is_own = number < len(account.rows)
        module, offset = (number, number + 1) if is_own else (0, 1)
        for position, slot in zip(positions, slots):
            if slot != RESERVED_SLOT:  # a further draft of a single module reads what is no state of the target's
                row = position - offset
                account.rows[module][row] = tuple(known[: row + offset + 1]) if is_own else ()

    # -- events --------------------------------------------------------------------------------------------------------

    def request(self, name: str) -> Request:
        return next(request for request in self.requests() if request.request_id == name)

    def requests(self) -> list[Request]:
        return list(self.engine.scheduler.requests())

    def running(self) -> list[Request]:
        return [request for request in self.requests() if request.status is RequestStatus.RUNNING]

    @property
    def is_under_way(self) -> bool:
        return self.engine._under_way is not None

    @precondition(lambda self: len(self.requests()) < 4)
    @rule(
        prompt=st.lists(st.integers(0, 7), min_size=1, max_size=14),
        depth=st.sampled_from((0, 1, 2, 4, 4)),
        temperature=st.sampled_from((0.0, 0.0, 1.0)),
    )
    def add(self, prompt: list[int], depth: int, temperature: float) -> None:
        prompt = [self.row_id(token_id) for token_id in prompt]
        name = f"r{self.num_added}"
        self.num_added += 1
        self.prompts.append(tuple(prompt))
        self.accounts[name] = Account(self.engine.scheduler.num_modules)
        self.names[name] = Names(self.count, len(prompt))
        params = SamplingParams(
            max_tokens=MAX_NEW_TOKENS,
            ignore_eos=True,
            temperature=temperature,
            seed=self.num_added,
            num_speculative_tokens=min(depth, self.max_depth),
        )
        self.engine.add_request(name, prompt, params)

    @precondition(lambda self: self.requests() and len(self.requests()) < 4)
    @rule(index=st.integers(0, 3), length=st.integers(1, 20), depth=st.sampled_from((0, 1, 2, 4, 4)))
    def add_again(self, index: int, length: int, depth: int) -> None:
        """A prompt that begins as an earlier request did, its output included."""
        request = self.requests()[index % len(self.requests())]
        self.add(request.token_ids[:length], depth, 0.0)

    @precondition(lambda self: self.requests())
    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.requests():
                self.step()

    @precondition(lambda self: self.requests())
    @rule(budget=st.integers(10, 20), num_blocks=st.integers(13, 24), block_size=st.sampled_from((4, 4, 8)))
    def move(self, budget: int, num_blocks: int, block_size: int) -> None:
        """The step under way is ended, and all requests are handed over to a fresh engine."""
        if self.is_under_way:
            self.happened.add("moved from under way")
            self.step(settling=True)
        assert not self.is_under_way
        if self.engine.cache.layout.has_windows:
            block_size = math.gcd(block_size, self.engine.cache.block_size)  # so that rows fill whole blocks
        old, self.engine = self.engine, self.new_engine(budget, 1 + 4 * num_blocks // block_size, block_size)
        soil(self.engine)
        self.watch()
        moved = move_all(old, self.engine)
        self.happened.update("moved with rows" for request in moved if request.status is RequestStatus.RUNNING)
        self.check()

    def step(self, *, settling: bool = False) -> None:
        before = {r.request_id: (r.num_tokens, r.draft_token_ids) for r in self.requests()}
        num_preemptions = self.engine.scheduler.num_preemptions
        for update in self.engine.settle() if settling else self.engine.step():
            num_tokens, drafts = before[update.request.request_id]
            accepted = [depth for depth in update.token_depths if depth]
            emitted = update.request.token_ids[num_tokens:]
            assert tuple(emitted[: len(accepted)]) == drafts[: len(accepted)], "what is accepted was never drafted"
            self.happened.add(f"accepted {len(accepted)} of {len(drafts)}")
            self.names[update.request.request_id].grow(update.request.num_tokens)
        self.happened.add("under way" if self.is_under_way else "settled")
        if self.engine.scheduler.num_preemptions > num_preemptions:
            self.happened.add("preempted")
        self.check()

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 3), depth=st.sampled_from((0, 1, 2, 3, 4, 4)))
    def change_depth(self, index: int, depth: int) -> None:
        request = self.requests()[index % len(self.requests())]
        rises = depth > request.depth
        self.note_under_way(request, "depth up" if rises else "depth down")
        self.engine.set_num_speculative_tokens(request.request_id, min(depth, self.max_depth))

    @precondition(lambda self: self.running() and not self.is_under_way)
    @rule(index=st.integers(0, 3))
    def preempt(self, index: int) -> None:
        self.engine.scheduler.preempt(self.running()[index % len(self.running())])

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 3))
    def abort(self, index: int) -> None:
        request = self.requests()[index % len(self.requests())]
        self.note_under_way(request, "abort")
        self.engine.abort(request.request_id)

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    def note_under_way(self, request: Request, what: str) -> None:
        if self.is_under_way and request.status is RequestStatus.RUNNING:
            self.happened.add(f"{what} while under way")

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.cache.check_integrity()

    def check(self) -> None:
        """Rows that a step under way has written lie behind those that are counted."""
        self.engine.cache.check_integrity()
        for request in self.running():
            names = self.names[request.request_id].known[: request.num_tokens]
            self.accounts[request.request_id].check_counts(request, names)
            compare_with_prefill(self.engine, self.kind, request)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for request in self.requests():
                self.engine.abort(request.request_id)
            self.engine.cache.check_integrity()
            pools = self.engine.cache.pools
            assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in pools)


class MistralOracle(ResidentOracle):
    """Sliding window attention, in the target and in the modules."""

    kind = "mistral"


class AlternatingOracle(ResidentOracle):
    """Full attention and sliding windows in turn in the target, sliding windows in the modules."""

    kind = "alternating"


class ChainedOracle(ResidentOracle):
    """One module that drafts up to three tokens."""

    kind = "glm4_moe"
    max_depth = 3


MACHINES = [ResidentOracle, MistralOracle, AlternatingOracle, ChainedOracle]


def walk(machine: ResidentOracle, chance: random.Random) -> None:
    machine.start(budget=chance.randint(12, 20), num_blocks=chance.randint(14, 18))
    for _ in range(14):
        while len(machine.requests()) < 2:
            depth, temperature = chance.choice((1, 2, 4, 4)), chance.choice((0.0, 1.0))
            machine.add([chance.randrange(8) for _ in range(chance.randint(1, 14))], depth, temperature)
            machine.add_again(0, chance.randint(4, 20), 4)
        machine.steps(chance.randint(1, 4))
        if machine.requests():
            what = chance.random()
            if what < 0.5:
                machine.change_depth(chance.randrange(4), chance.choice((0, 1, 2, 4, 4)))
            elif what < 0.6:
                machine.abort(chance.randrange(4))
    for _ in range(3):  # at the end: an engine that is fresh finds nothing in its cache
        while len(machine.requests()) < 2:
            prompt = [chance.randrange(8) for _ in range(chance.randint(1, 14))]
            machine.add(prompt, chance.choice((1, 2, 4)), chance.choice((0.0, 1.0)))
        machine.steps(chance.randint(2, 4))
        if machine.requests():
            machine.move(chance.randint(12, 20), chance.randint(14, 18), chance.choice((4, 8)))
        machine.steps(chance.randint(1, 4))
    machine.teardown()


@pytest.mark.parametrize("machine", MACHINES)
def test_exact_after_any_history(machine: type[ResidentOracle]) -> None:
    run_state_machine_as_test(machine, settings=ORACLE)


@pytest.mark.parametrize("machine", MACHINES)
def test_exact_on_long_walks(machine: type[ResidentOracle]) -> None:
    """Together they meet all that a history can hold."""
    machine.happened = set()
    for seed in range(4):
        walk(machine(), random.Random(seed))
    accepted = {f"accepted {number} of {machine.max_depth}" for number in range(machine.max_depth + 1)}
    changed = {f"{what} while under way" for what in ("depth up", "depth down", "abort")}
    assert accepted | changed | {"hit", "module hit", "preempted", "under way", "settled"} <= machine.happened
    assert {"moved from under way", "moved with rows"} <= machine.happened


# -- faults that must be noticed -------------------------------------------------------------------------------------


def raise_exact_rows(state: DecodeState, lanes: Tensor, emitted: Tensor, row_sums: Tensor) -> None:
    """Rows of all modules are taken for exact one too early."""
    commit_tokens(state, lanes, emitted, row_sums)
    state.ints[lanes, 8 : state.ring] += 1


def record_one_further(
    state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, chosen: Tensor, drafts: Tensor
) -> None:
    """A draft goes where the one after it should."""
    record_draft(state, lanes, window, index, chosen, drafts)
    place = (state.ints[lanes, NUM_TOKENS] + index) & (RING_SIZE - 1)
    state.ints[lanes, state.ring + ((place + 1) & (RING_SIZE - 1))] = chosen
    state.ints[lanes, state.ring + place] = 0


def forget_a_row(state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, group: int) -> PassRows:
    """The first row of each window is not stored."""
    rows = pass_rows(state, lanes, window, index, group)
    slots = rows.slots.view(len(lanes), -1)
    first = (slots != RESERVED_SLOT).int().argmax(dim=1, keepdim=True)
    return rows._replace(slots=slots.scatter(1, first, RESERVED_SLOT).flatten())


commit_tokens, record_draft, pass_rows = decode.commit_tokens, decode.record_draft, decode.pass_rows


@pytest.mark.parametrize(
    ("name", "fault"),
    [("commit_tokens", raise_exact_rows), ("record_draft", record_one_further), ("pass_rows", forget_a_row)],
)
def test_a_fault_is_noticed(name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, name, fault)
    with pytest.raises(AssertionError, match=r"counted as exact|as large as|never drafted"):
        walk(ResidentOracle(), random.Random(0))


def test_rows_behind_the_counts_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of h0 that is wrong by a little is noticed by the prefill, not by the account."""
    launch = ResidentDecoder._launch

    def spoilt(self: ResidentDecoder, lanes: Any) -> Any:
        flight = launch(self, lanes)
        self._model.storage.hidden *= 1.0001
        return flight

    monkeypatch.setattr(ResidentDecoder, "_launch", spoilt)
    with pytest.raises(AssertionError, match="counted as exact"):
        walk(ResidentOracle(), random.Random(0))
