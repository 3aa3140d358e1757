"""The oracle: after any history, the rows that `num_exact_rows` counts equal one prefill of the whole sequence.

A state machine adds requests, makes steps with scripted acceptance, changes depths, preempts and aborts. After every
step it compares all paged rows with a fresh prefill, and the counts with a brute-force account of which tokens each
row was computed from. Deliberate faults in the rule show that it notices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
from handing import move_all, soil
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prefill_oracle import Account, compare_with_prefill, model, plain_engine
from scripted import ScriptedDrafter, greedy_sequence, scripted_engine

from foredraft.cache.block_tables import RowDemand
from foredraft.cache.placement import SentRows
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.config import EngineConfig
from foredraft.engine.engine import Engine
from foredraft.exactness import ExactRows
from foredraft.request import Request, RequestStatus
from foredraft.sampling.sampler import SamplingTensors
from foredraft.sampling.sampling_state import SamplingState
from foredraft.sampling_params import SamplingParams
from foredraft.speculation.drafter import Drafter, Drafts, Window

MAX_NEW_TOKENS = 24
MAX_LEN = 40
ORACLE = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

FAULTY = settings(ORACLE, phases=(Phase.generate,), report_multiple_bugs=False, print_blob=False)
"""For a machine that must fail: no time is spent on finding the smallest failure."""


@cache
def sequence(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(greedy_sequence(plain_engine(kind), prompt, MAX_NEW_TOKENS + 8))


class Oracle(RuleBasedStateMachine):
    """One engine with a small budget and a small pool, so that chunks and preemptions happen by themselves too."""

    kind: ClassVar[str] = "llama"
    max_depth: ClassVar[int] = 4
    happened: ClassVar[set[str]] = set()
    engine_settings: ClassVar[Mapping[str, Any]] = {}

    @initialize(budget=st.integers(10, 20), num_blocks=st.integers(11, 16))
    def start(self, budget: int, num_blocks: int) -> None:
        self.engine, self.drafter = self.new_engine(budget, num_blocks, 4)
        self.num_modules = self.engine.scheduler.num_modules
        self.accounts: dict[str, Account] = {}
        self.num_added = 0
        self.prompts: list[tuple[int, ...]] = []
        self.watch_cache()

    def new_engine(self, budget: int, num_blocks: int, block_size: int) -> tuple[Engine, ScriptedDrafter]:
        config = EngineConfig(
            num_speculative_tokens=self.max_depth,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=2,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            **self.engine_settings,
        )
        return scripted_engine(model(self.kind), config)

    def watch_cache(self) -> None:
        """Enter into the accounts what the cache gives and takes."""
        cache, requests = self.engine.cache, self.engine.scheduler
        admit, renew = cache.admit, cache.renew_modules

        def watched_admit(request_id: str, salt: str | None, match: PrefixMatch, demand: RowDemand) -> bool:
            is_admitted = admit(request_id, salt, match, demand)
            if is_admitted and not match.begins:  # else its rows have come with it
                token_ids = next(r.token_ids for r in requests.requests() if r.request_id == request_id)
                self.accounts[request_id].share(token_ids, match)
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

    def row_id(self, token_id: int) -> int:
        """What prompts have in the place of a token."""
        return token_id

    def requests(self) -> list[Request]:
        return list(self.engine.scheduler.requests())

    @precondition(lambda self: len(self.requests()) < 4)
    @rule(prompt=st.lists(st.integers(0, 7), min_size=1, max_size=14), depth=st.sampled_from((0, 0, 1, 2, 3, 4)))
    def add(self, prompt: list[int], depth: int) -> None:
        prompt = [self.row_id(token_id) for token_id in prompt]
        self.prompts.append(tuple(prompt))
        self.add_request(prompt, depth)

    @precondition(lambda self: self.prompts and len(self.requests()) < 4)
    @rule(index=st.integers(0, 9), length=st.integers(1, 16), depth=st.sampled_from((0, 1, 2, 3, 4)))
    def add_again(self, index: int, length: int, depth: int) -> None:
        """A prompt that begins as an earlier request did, its output included."""
        self.add_request(sequence(self.kind, self.prompts[index % len(self.prompts)])[:length], depth)

    def add_request(self, prompt: Sequence[int], depth: int) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        params = SamplingParams(
            max_tokens=MAX_NEW_TOKENS, ignore_eos=True, num_speculative_tokens=min(depth, self.max_depth)
        )
        self.drafter.continuations[name] = sequence(self.kind, tuple(prompt))
        self.accounts[name] = Account(self.num_modules)
        self.engine.add_request(name, prompt, params)

    @precondition(lambda self: self.requests())
    @rule(num_right=st.lists(st.integers(0, 4), min_size=1, max_size=6))
    def steps(self, num_right: list[int]) -> None:
        for number in num_right:
            if self.requests():
                self.step(number)

    def step(self, number: int) -> None:
        for index, request in enumerate(self.requests()):
            self.drafter.num_right[request.request_id] = (number + index) % (self.max_depth + 1)
        before = {r.request_id: (r.num_tokens, r.num_computed_tokens, r.draft_token_ids) for r in self.requests()}
        self.drafter.seen.clear()
        updates = self.engine.step()
        for update in updates:
            num_drafts = len(before[update.request.request_id][2])
            self.happened.add(f"accepted {len(update.token_ids) - 1} of {num_drafts}")
        for request in self.requests():
            num_tokens, num_computed, _ = before[request.request_id]
            if request.num_computed_tokens < max(1, num_computed):  # preempted while the step was planned, or not begun
                self.happened.add("preempted" if num_computed else "waited")
            elif request.num_computed_tokens < num_tokens:
                self.happened.add("chunk")
        if any(w.num_drafts == 0 and w.end <= before[w.request_id][1] for w, _ in self.drafter.seen):
            self.happened.add("rebuild only")
        self.watch()
        self.check()

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 3), depth=st.sampled_from((0, 0, 1, 2, 3, 4)))
    def change_depth(self, index: int, depth: int) -> None:
        requests = self.requests()
        request = requests[index % len(requests)]
        self.engine.set_num_speculative_tokens(request.request_id, min(depth, self.max_depth))

    @precondition(lambda self: any(r.status is RequestStatus.RUNNING for r in self.requests()))
    @rule(index=st.integers(0, 3))
    def preempt(self, index: int) -> None:
        running = [r for r in self.requests() if r.status is RequestStatus.RUNNING]
        request = running[index % len(running)]
        self.engine.scheduler.preempt(request)

    @precondition(lambda self: self.requests())
    @rule(budget=st.integers(10, 20), num_blocks=st.integers(11, 16), block_size=st.sampled_from((2, 4, 8)))
    def move(self, budget: int, num_blocks: int, block_size: int) -> None:
        """All requests are handed over to a fresh engine."""
        old, script = self.engine, self.drafter
        if old.cache.layout.has_windows:
            block_size = math.gcd(block_size, old.cache.block_size)  # so that the rows that are sent fill whole blocks
        self.engine, self.drafter = self.new_engine(budget, 1 + 4 * num_blocks // block_size, block_size)
        soil(self.engine)
        self.drafter.continuations, self.drafter.num_right = script.continuations, script.num_right
        self.watch_cache()
        for request in move_all(old, self.engine):
            is_running = request.status is RequestStatus.RUNNING
            self.happened.add("moved with rows" if is_running else "moved without rows")
            if is_running and request.exact.cycle is not None:
                self.happened.add("moved with drafts")
        self.check()

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 3))
    def abort(self, index: int) -> None:
        requests = self.requests()
        self.engine.abort(requests[index % len(requests)].request_id)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.cache.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for request in self.requests():
                self.engine.abort(request.request_id)
            pools = self.engine.cache.pools
            assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in pools)

    # -- the oracle itself ---------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Enter into the accounts what the passes of this step wrote."""
        for window, drafts in self.drafter.seen:
            account = self.accounts[window.request_id]
            known = [*self.drafter.continuations[window.request_id][: window.num_tokens], *drafts]
            for depth in range(1, min(window.num_passes, self.num_modules) + 1):
                end = window.end if window.num_drafts >= depth else min(window.end, window.num_tokens - depth)
                for row in range(max(window.start, window.num_exact_rows[depth - 1]), end):
                    account.rows[depth - 1][row] = tuple(known[: row + depth + 1])

    def check(self) -> None:
        for request in self.requests():
            expected = self.drafter.continuations[request.request_id][: request.num_tokens]
            assert tuple(request.token_ids) == tuple(expected), "the output is not the target's own"
            if request.status is not RequestStatus.RUNNING:
                continue
            self.check_counts(request)
            compare_with_prefill(self.engine, self.kind, request)

    def check_counts(self, request: Request) -> None:
        self.accounts[request.request_id].check_counts(request, request.token_ids)


def walk(machine: Oracle, chance: random.Random) -> None:
    machine.start(budget=chance.randint(10, 16), num_blocks=chance.randint(11, 14))
    for _ in range(25):
        if len(machine.requests()) < 2 or chance.random() < 0.2:
            prompt = [chance.randrange(8) for _ in range(chance.randint(1, 14))]
            machine.add(prompt, chance.choice((0, machine.max_depth)))
            machine.add_again(chance.randrange(10), chance.randint(8, 16), chance.choice((0, 2, machine.max_depth)))
        machine.steps([chance.randint(0, 4) for _ in range(3)])
        if machine.requests():
            machine.change_depth(chance.randrange(4), chance.choice((0, 1, 2, 3, 4, 4)))
    for _ in range(4):  # at the end: an engine that is fresh finds nothing in its cache
        while len(machine.requests()) < 3:
            prompt = [chance.randrange(8) for _ in range(chance.randint(1, 14))]
            machine.add(prompt, chance.choice((0, 2, machine.max_depth)))
        machine.steps([chance.randint(0, 4) for _ in range(chance.randint(1, 3))])
        if machine.requests():
            machine.move(chance.randint(10, 16), chance.randint(11, 14), chance.choice((2, 4, 8)))
        machine.steps([chance.randint(0, 4) for _ in range(3)])
    machine.teardown()


class MistralOracle(Oracle):
    """Sliding window attention, in the target and in the modules."""

    kind = "mistral"


class AlternatingOracle(Oracle):
    """Full attention and sliding windows in turn in the target, sliding windows in the modules."""

    kind = "alternating"


class ChainedOracle(Oracle):
    """One module that drafts up to three tokens."""

    kind = "glm4_moe"
    max_depth = 3


@pytest.mark.parametrize("machine", [Oracle, MistralOracle, AlternatingOracle, ChainedOracle])
def test_exact_after_any_history(machine: type[Oracle]) -> None:
    run_state_machine_as_test(machine, settings=ORACLE)


@pytest.mark.parametrize("kind", [Oracle, MistralOracle, AlternatingOracle, ChainedOracle])
def test_exact_on_long_walks(kind: type[Oracle]) -> None:
    """Hypothesis prefers short histories; these are long, and together they meet all that a history can hold."""
    kind.happened = set()
    for seed in range(6):
        walk(kind(), random.Random(seed))
    accepted = {f"accepted {number} of {kind.max_depth}" for number in range(kind.max_depth + 1)}
    shared = {"hit", "miss", "module hit", "module miss"}
    moved = {"moved with rows", "moved with drafts", "moved without rows"}
    assert accepted | shared | moved | {"preempted", "waited", "chunk", "rebuild only"} <= kind.happened


def test_rebuild_one_row_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Drafter.run

    def one_row_late(
        self: Drafter, windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
    ) -> Drafts:
        late = [replace(w, start=w.start + 1, token_ids=w.token_ids[1:]) if w.end - w.start > 1 else w for w in windows]
        return run(self, late, sampling, rules)

    monkeypatch.setattr(Drafter, "run", one_row_late)
    with pytest.raises(AssertionError, match="counted as exact"):
        run_state_machine_as_test(Oracle, settings=FAULTY)


def test_one_exact_row_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    after_verify = ExactRows.after_verify
    monkeypatch.setattr(ExactRows, "after_verify", lambda self, num_accepted: after_verify(self, num_accepted + 1))
    monkeypatch.setattr(Oracle, "check_counts", lambda self, request: None)
    with pytest.raises(AssertionError, match="counted as exact"):
        run_state_machine_as_test(Oracle, settings=FAULTY)


def test_one_exact_row_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    after_verify = ExactRows.after_verify
    monkeypatch.setattr(ExactRows, "after_verify", lambda self, num_accepted: after_verify(self, num_accepted - 1))
    with pytest.raises(AssertionError, match="as large as"):
        walks(20)  # it shows where the next depth is smaller


def test_a_row_that_is_changed_on_its_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = Engine._rows_of

    def changed(self: Engine, request: Request) -> dict[str, SentRows]:
        sent = rows_of(self, request)
        for name, own in sent.items():
            if name == "module.1.key":
                own.rows[max(0, request.exact.num_exact_rows[1] - own.first - 1)] += 1
        return sent

    monkeypatch.setattr(Engine, "_rows_of", changed)
    with pytest.raises(AssertionError, match="counted as exact"):
        walks(4)


def walks(count: int) -> None:
    for seed in range(count):
        walk(Oracle(), random.Random(seed))
