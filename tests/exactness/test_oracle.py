"""The oracle: after any history, the rows that `num_exact_rows` counts equal one prefill of the whole sequence.

A state machine adds requests, makes steps with scripted acceptance, changes depths, preempts and aborts. After every
step it compares all paged rows with a fresh prefill, and the counts with a brute-force account of which tokens each
row was computed from. Deliberate faults in the rule show that it notices.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
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
from scripted import greedy_sequence, held_rows, scripted_engine
from tiny_models import tiny_alternating, tiny_glm4_moe, tiny_llama, tiny_mistral
from torch import Tensor

from foredraft.cache.block_tables import RowDemand
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.cache.storage import LayerKV
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.exactness import ExactRows
from foredraft.models.loader import LoadedModel, load_checkpoint
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
def model(kind: str) -> LoadedModel:
    """A tiny random checkpoint, loaded once."""
    builders: dict[str, Callable[..., Path]] = {
        "llama": tiny_llama,
        "mistral": tiny_mistral,
        "alternating": partial(tiny_alternating, sliding_window=8),
        "glm4_moe": tiny_glm4_moe,
    }
    modules = {} if kind == "glm4_moe" else {"num_modules": 4}
    with tempfile.TemporaryDirectory() as directory:
        path = builders[kind](Path(directory) / kind, **modules)
        return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


@cache
def plain_engine(kind: str) -> Engine:
    """An engine with a wide budget, for whole prefills and plain decoding."""
    depth = 3 if kind == "glm4_moe" else None
    config = EngineConfig(
        num_speculative_tokens=depth, num_blocks=64, block_size=8, max_num_seqs=1, enable_prefix_caching=False
    )
    return build_engine(model(kind), config)


@cache
def sequence(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(greedy_sequence(plain_engine(kind), prompt, MAX_NEW_TOKENS + 8))


class Account:
    """Which tokens each module row was computed from, by watching the passes: the rule without its algebra."""

    def __init__(self, num_modules: int) -> None:
        self.rows: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_modules)]
        self.origin = 0

    def begin(self, origin: int = 0) -> None:
        """Nothing is there, and the first row to come is `origin`."""
        self.origin = origin
        self.drop(0)

    def drop(self, first_row: int) -> None:
        """Rows from `first_row` on are given up."""
        for depth, rows in enumerate(self.rows):
            self.rows[depth] = {row: tokens for row, tokens in rows.items() if row < first_row}

    def share(self, token_ids: Sequence[int], match: PrefixMatch) -> None:
        """The rows that a prefix hit brings; whether they are right, the comparison with a prefill tells."""
        self.begin(match.module_origin)
        for depth in range(1, match.module_depth + 1):
            for row in range(match.num_module_rows):
                self.rows[depth - 1][row] = tuple(token_ids[: row + depth + 1])

    def num_exact_rows(self, token_ids: list[int], num_computed: int) -> tuple[int, ...]:
        counts = []
        for depth, rows in enumerate(self.rows, start=1):
            row = self.origin
            while row < num_computed and rows.get(row) == tuple(token_ids[: row + depth + 1]):
                row += 1
            counts.append(row)
        return tuple(counts)


class Oracle(RuleBasedStateMachine):
    """One engine with a small budget and a small pool, so that chunks and preemptions happen by themselves too."""

    kind: ClassVar[str] = "llama"
    max_depth: ClassVar[int] = 4
    happened: ClassVar[set[str]] = set()

    @initialize(budget=st.integers(10, 20), num_blocks=st.integers(11, 16))
    def start(self, budget: int, num_blocks: int) -> None:
        config = EngineConfig(
            num_speculative_tokens=self.max_depth,
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=2,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
        )
        self.engine, self.drafter = scripted_engine(model(self.kind), config)
        self.num_modules = self.engine.scheduler.num_modules
        self.accounts: dict[str, Account] = {}
        self.num_added = 0
        self.prompts: list[tuple[int, ...]] = []
        self.watch_cache()

    def watch_cache(self) -> None:
        """Enter into the accounts what the cache gives and takes."""
        cache, requests = self.engine.cache, self.engine.scheduler
        admit, renew = cache.admit, cache.renew_modules

        def watched_admit(request_id: str, salt: str | None, match: PrefixMatch, demand: RowDemand) -> bool:
            is_admitted = admit(request_id, salt, match, demand)
            if is_admitted:
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

    def requests(self) -> list[Request]:
        return list(self.engine.scheduler.requests())

    @precondition(lambda self: len(self.requests()) < 4)
    @rule(prompt=st.lists(st.integers(0, 7), min_size=1, max_size=14), depth=st.sampled_from((0, 0, 1, 2, 3, 4)))
    def add(self, prompt: list[int], depth: int) -> None:
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
            self.compare_with_prefill(request)

    def check_counts(self, request: Request) -> None:
        account = self.accounts[request.request_id]
        possible = account.num_exact_rows(request.token_ids, request.num_computed_tokens)
        origin = account.origin  # a module that begins at a row has none before it: that row and 0 mean the same
        counts = tuple(max(origin, count) for count in request.exact.num_exact_rows)
        assert counts == possible, "the counts are not as large as the history allows"

    def compare_with_prefill(self, request: Request) -> None:
        fresh = plain_engine(self.kind)
        prefilled = fresh.add_request("fresh", request.token_ids, SamplingParams(max_tokens=8, ignore_eos=True))
        fresh.step()
        try:
            self.compare(fresh, prefilled, request)
        finally:
            fresh.abort("fresh")

    def compare(self, fresh: Engine, prefilled: Request, request: Request) -> None:
        ours, theirs = self.engine.runner.storage, fresh.runner.storage
        computed = request.num_computed_tokens
        for layer, group in enumerate(ours.layout.group_of_layer):
            our_slots, their_slots = self.common_rows(fresh, request, group, computed)
            assert_rows_equal(ours.target[layer], our_slots, theirs.target[layer], their_slots)
        for module, count in enumerate(request.exact.num_exact_rows):
            assert count <= prefilled.exact.num_exact_rows[module]
            our_slots, their_slots = self.common_rows(fresh, request, ours.layout.group_of_module[module], count)
            num_inexact = self.num_inexact_rows(request, module, count - len(our_slots))
            our_slots, their_slots = our_slots[num_inexact:], their_slots[num_inexact:]
            assert_rows_equal(ours.modules[module], our_slots, theirs.modules[module], their_slots)

    def num_inexact_rows(self, request: Request, module: int, first: int) -> int:
        """How many rows from `first` on are not exact because windows before them reach beyond where they began."""
        origin, rebuild_rows = request.exact.origin, self.engine.cache.layout.rebuild_rows[module]
        return max(0, origin + (rebuild_rows or 0) - module - first) if origin else 0

    def common_rows(self, fresh: Engine, request: Request, group: int, end: int) -> tuple[Tensor, Tensor]:
        """The slots in either engine of the rows before `end` that both hold."""
        our_first, our_slots = held_rows(self.engine, request.request_id, group, end)
        their_first, their_slots = held_rows(fresh, "fresh", group, end)
        first = max(our_first, their_first)
        return our_slots[first - our_first :], their_slots[first - their_first :]


def assert_rows_equal(ours: LayerKV, our_slots: torch.Tensor, theirs: LayerKV, their_slots: torch.Tensor) -> None:
    for our_rows, their_rows in (
        (ours.key[our_slots], theirs.key[their_slots]),
        (ours.value[our_slots], theirs.value[their_slots]),
    ):
        if our_rows.numel():
            bound = 1e-5 * their_rows.abs().max()
            assert (our_rows - their_rows).abs().max() <= bound, "a row that is counted as exact is not"


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
    assert accepted | shared | {"preempted", "waited", "chunk", "rebuild only"} <= kind.happened


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
        run_state_machine_as_test(Oracle, settings=FAULTY)
