"""n choices of one prompt: what they share, what each is, and that nothing of it depends on how they came to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from cold import BUILDERS, cold, loaded_model
from scripted import finish
from torch import Tensor

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.attention import PagedAttention
from foredraft.plan import CopyKind, StepPlan, StepResult
from foredraft.request import Request, RequestStatus
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason

BLOCK = 4
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3)
LENGTHS = (1, 3, 4, 5, 8, 11, 12, 18)
"""Prompts: shorter than a block, whole blocks, and others."""
KINDS = list(BUILDERS)
FULL_ATTENTION = [kind for kind in KINDS if kind in ("llama", "glm4_moe")]


def make_engine(kind: str, **settings: Any) -> Engine:
    settings = {"num_speculative_tokens": BUILDERS[kind][1], "block_size": BLOCK, "num_blocks": 64, **settings}
    return build_engine(loaded_model(kind), EngineConfig(max_model_len=48, **{"max_num_seqs": 8, **settings}))


def params(n: int, **settings: Any) -> SamplingParams:
    return SamplingParams(n=n, **{"max_tokens": 14, "ignore_eos": True, "temperature": 1.5, "seed": 5, **settings})


def add(engine: Engine, prompt: Sequence[int], wanted: SamplingParams, name: str = "r") -> list[Request]:
    """All choices, as a caller's request adds them."""
    choices: list[Request] = []
    for index in range(wanted.n):
        leader = choices[0] if choices else None
        choices.append(engine.add_request(f"{name}.{index}", prompt, wanted, choice=index, leader=leader))
    return choices


class Watch:
    """Every step of an engine: its plan, and the rows that the target ran on."""

    def __init__(self, engine: Engine) -> None:
        self.plans: list[StepPlan] = []
        self.num_rows: list[int] = []
        execute, forward = engine.runner.execute, engine.runner.target.forward

        def watched_execute(plan: StepPlan) -> StepResult:
            self.plans.append(plan)
            return execute(plan)

        def watched_forward(token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
            self.num_rows.append(len(token_ids))
            return forward(token_ids, positions, paged)

        engine.runner.execute = watched_execute  # type: ignore[method-assign]
        target: Any = engine.runner.target
        target.forward = watched_forward
        self._target = target

    def close(self) -> None:
        """The target is shared with other engines."""
        del self._target.forward

    def prompt_rows(self, num_prompt_tokens: int) -> Counter[str]:
        """How many rows of the prompt the target ran on, by request."""
        counts: Counter[str] = Counter()
        for plan in self.plans:
            for request in plan.requests:
                rows = range(request.first_row, request.first_row + len(request.token_ids))
                counts[request.request_id] += sum(row < num_prompt_tokens for row in rows)
        return counts


@pytest.fixture
def watch() -> Iterator[Callable[[Engine], Watch]]:
    made: list[Watch] = []

    def begin(engine: Engine) -> Watch:
        made.append(Watch(engine))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def assert_all_returned(engine: Engine) -> None:
    assert not engine.has_unfinished
    engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in engine.cache.pools)


@cache
def cold_engine(kind: str) -> Engine:
    """One request at a time, nothing shared, prompts in one step."""
    return make_engine(kind, max_num_seqs=1, enable_prefix_caching=False)


@cache
def alone(kind: str, prompt: tuple[int, ...], wanted: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """The whole sequence of each choice, run by itself."""
    engine = cold_engine(kind)
    found = []
    for index in range(wanted.n):
        request = engine.add_request("alone", prompt, wanted, choice=index)
        finish(engine)
        found.append(tuple(request.token_ids))
    return tuple(found)


def assert_rows_are_exact(engine: Engine, kind: str, request: Request, sequences: Sequence[tuple[int, ...]]) -> None:
    """All rows that are counted as exact equal those of a prefill of the whole sequence, one of `sequences`."""
    storage, layout, exact = engine.runner.storage, engine.cache.layout, request.exact
    expected = cold(kind).rows(tuple(request.token_ids), sequences)
    for number, blocks in enumerate(engine.cache.block_tables(request.request_id)):
        num_given_back = next((index for index, block in enumerate(blocks) if block), len(blocks))
        held = zip(*(storage.block(number, block) for block in blocks[num_given_back:]))
        for index, (ours, theirs) in enumerate(zip(held, expected[number])):
            first, end = num_given_back * BLOCK, request.num_computed_tokens
            if number in layout.module_groups:
                module = layout.groups[number].layers[index // 2]
                end = exact.num_exact_rows[module]
                if exact.origin:
                    first = max(first, exact.origin + (layout.rebuild_rows[module] or 0) - module)
            if first < end:
                rows = torch.cat(ours)[first - num_given_back * BLOCK : end - num_given_back * BLOCK]
                bound = 1e-5 * theirs[first:end].abs().max()
                assert (rows - theirs[first:end]).abs().max() <= bound, "a row is not exact"


def run(engine: Engine, kind: str, sequences: Sequence[tuple[int, ...]], num_steps: int = 1000) -> None:
    """Some steps; after each, all rows of all choices are right."""
    for _ in range(num_steps):
        if not engine.has_unfinished:
            return
        engine.step()
        engine.cache.check_integrity()
        for request in engine.scheduler.requests():
            if request.status is RequestStatus.RUNNING:
                assert_rows_are_exact(engine, kind, request, sequences)


def assert_are(choices: Sequence[Request], sequences: Sequence[tuple[int, ...]]) -> None:
    assert [tuple(request.token_ids) for request in choices] == list(sequences)


# -- what is shared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FULL_ATTENTION)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_prompt_is_computed_once(kind: str, length: int, watch: Callable[[Engine], Watch]) -> None:
    engine, prompt = make_engine(kind), PROMPT[:length]
    watched = watch(engine)
    choices = add(engine, prompt, params(4))
    engine.step()
    assert watched.num_rows == [length]
    assert [request.status for request in choices[1:]] == [RequestStatus.WAITING] * 3
    engine.step()
    tables = [engine.cache.block_tables(request.request_id) for request in choices]
    groups = engine.cache.layout.target_groups
    num_full = length // BLOCK
    for group in groups:
        assert len({table[group][:num_full] for table in tables}) == 1, "full blocks are not shared"
        written = [block for table in tables for block in table[group][num_full:]]
        assert len(set(written)) == len(written), "a block that is written is shared"
    copies = watched.plans[1].copies
    assert {copy.kind for copy in copies} <= {CopyKind.ON_DEVICE}
    for group in groups:
        copied = [copy for copy in copies if copy.group == group]
        assert len(copied) == (3 if length % BLOCK else 0)
        assert {copy.source for copy in copied} <= set(tables[0][group][num_full:])
        assert {copy.destination for copy in copied} <= {
            block for table in tables[1:] for block in table[group][num_full:]
        }
    finish(engine)
    assert watched.prompt_rows(length) == {"r.0": length, "r.1": 0, "r.2": 0, "r.3": 0}
    assert [request.num_cached_tokens for request in choices] == [0, length, length, length]
    assert_all_returned(engine)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_long_prompt_in_chunks_is_computed_once(length: int, watch: Callable[[Engine], Watch]) -> None:
    engine = make_engine("llama", max_num_seqs=2, max_num_batched_tokens=8)
    watched = watch(engine)
    choices = add(engine, PROMPT[:length], params(3))
    finish(engine)
    assert watched.prompt_rows(length)["r.0"] == length
    assert watched.prompt_rows(length)["r.1"] == 0
    assert_are(choices, alone("llama", PROMPT[:length], params(3)))


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_exact_from_the_fork_on(kind: str, length: int) -> None:
    engine, sequences = make_engine(kind), alone(kind, PROMPT[:length], params(3))
    choices = add(engine, PROMPT[:length], params(3))
    run(engine, kind, sequences)
    assert_are(choices, sequences)
    assert_all_returned(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [3, 12, 18])
@pytest.mark.parametrize("depths", [(0, 3, 1, 3), (3, 0, 3, 1), (1, 3, 3, 0), (2, 1, 0, 3)])
def test_rows_stay_exact_when_depths_change(kind: str, length: int, depths: tuple[int, ...]) -> None:
    """Before the fork, after it, and later: by the leader's depth, the siblings', then each again."""
    wanted = params(3, max_tokens=20, temperature=0.0)
    engine, sequences = make_engine(kind), alone(kind, PROMPT[:length], wanted)
    choices = add(engine, PROMPT[:length], wanted)
    highest = BUILDERS[kind][1]
    changes = {0: [(0, depths[0])], 1: [(0, depths[1]), (1, depths[2])], 3: [(0, depths[3]), (1, depths[0])]}
    changes |= {5: [(1, depths[1]), (2, depths[2])], 7: [(index, highest) for index in range(3)]}
    for number in range(8):
        for index, depth in changes.get(number, ()):
            if choices[index].finish_reason is None:
                engine.set_num_speculative_tokens(f"r.{index}", min(depth, highest))
        run(engine, kind, sequences, num_steps=1)
    run(engine, kind, sequences)
    assert_are(choices, sequences)
    assert_all_returned(engine)


# -- what may happen to the first of them ------------------------------------------------------------------------------


def abort_leader(engine: Engine, choices: list[Request]) -> None:
    engine.abort("r.0")


def preempt_leader(engine: Engine, choices: list[Request]) -> None:
    if choices[0].status is RequestStatus.RUNNING:
        engine.scheduler.preempt(choices[0])


def preempt_all(engine: Engine, choices: list[Request]) -> None:
    for request in choices:
        if request.status is RequestStatus.RUNNING:
            engine.scheduler.preempt(request)


def reset_cache(engine: Engine, choices: list[Request]) -> None:
    engine.reset_prefix_cache()


def preempt_and_reset(engine: Engine, choices: list[Request]) -> None:
    """What was computed is lost, so that it is computed again, in chunks, with drafts pending."""
    preempt_leader(engine, choices)
    engine.reset_prefix_cache()


EVENTS = [abort_leader, preempt_leader, preempt_all, reset_cache, preempt_and_reset]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen2"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("number", "budget"), [(0, 64), (1, 64), (2, 64), (1, 8), (3, 8), (4, 8)])
def test_whatever_happens_to_the_leader(
    kind: str, event: Callable[[Engine, list[Request]], None], number: int, budget: int
) -> None:
    """After some steps, the first in the middle of the prompt; some of the choices have to wait for room."""
    engine = make_engine(kind, max_num_seqs=2, max_num_batched_tokens=budget)
    sequences = list(alone(kind, PROMPT, params(4)))
    choices = add(engine, PROMPT, params(4))
    run(engine, kind, sequences, number)
    event(engine, choices)
    engine.cache.check_integrity()
    run(engine, kind, sequences)
    if event is abort_leader:
        assert choices[0].finish_reason is FinishReason.ABORT
        sequences[0] = sequences[0][: choices[0].num_tokens]
    assert_are(choices, sequences)
    assert_all_returned(engine)


@pytest.mark.parametrize("kind", FULL_ATTENTION)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_wait_for_their_rows_are_judged_as_ever(kind: str, seed: int) -> None:
    """What a draft was drawn from is still known when the rows before it have been computed again, in chunks."""
    wanted = params(1, seed=seed)
    engine = make_engine(kind, max_num_seqs=1, max_num_batched_tokens=8)
    choices = add(engine, PROMPT, wanted)
    run(engine, kind, alone(kind, PROMPT, wanted), num_steps=4)
    assert choices[0].draft_token_ids
    preempt_and_reset(engine, choices)
    finish(engine)
    assert_are(choices, alone(kind, PROMPT, wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_leader_that_ends_at_once(kind: str, length: int) -> None:
    for max_tokens in (0, 1, 2):
        engine, wanted = make_engine(kind), params(3, max_tokens=max_tokens)
        choices = add(engine, PROMPT[:length], wanted)
        finish(engine)
        assert_are(choices, alone(kind, PROMPT[:length], wanted))
        assert {request.finish_reason for request in choices} == {FinishReason.LENGTH}
        assert_all_returned(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [3, 8, 18])
def test_without_a_prefix_cache(kind: str, length: int, watch: Callable[[Engine], Watch]) -> None:
    engine, sequences = make_engine(kind, enable_prefix_caching=False), alone(kind, PROMPT[:length], params(3))
    watched = watch(engine)
    choices = add(engine, PROMPT[:length], params(3))
    run(engine, kind, sequences)
    assert watched.prompt_rows(length) == {f"r.{index}": length for index in range(3)}
    assert [request.num_cached_tokens for request in choices] == [0, 0, 0]
    assert_are(choices, sequences)
    assert_all_returned(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [14, 18])
def test_more_choices_than_fit(kind: str, num_blocks: int) -> None:
    """Slots, or blocks: choices are preempted, wait, and come back."""
    engine, sequences = make_engine(kind, num_blocks=num_blocks, max_num_seqs=3), alone(kind, PROMPT, params(7))
    choices = add(engine, PROMPT, params(7))
    run(engine, kind, sequences)
    assert_are(choices, sequences)
    assert_all_returned(engine)


def test_two_requests_with_choices_and_one_prompt() -> None:
    engine, sequences = make_engine("llama"), alone("llama", PROMPT, params(3))
    first, second = add(engine, PROMPT, params(3), "a"), add(engine, PROMPT, params(3), "b")
    salted = add(engine, PROMPT, params(2, cache_salt="other"), "c")
    run(engine, "llama", sequences)
    assert_are(first, sequences)
    assert_are(second, sequences)
    assert_are(salted, sequences[:2])
    assert salted[0].num_cached_tokens == 0
    assert_all_returned(engine)


def test_copies_among_those_to_and_from_the_host() -> None:
    engine = make_engine("llama", num_blocks=16, max_num_seqs=3, cpu_cache_gib=0.001)
    wanted, sequences = params(5), alone("llama", PROMPT, params(5))
    for first in (7, 8, 9):
        prompt = (first,) * 17
        others = alone("llama", prompt, params(3))
        add(engine, prompt, params(3), "other")
        choices = add(engine, PROMPT, wanted)
        run(engine, "llama", [*sequences, *others])
        assert_are(choices, sequences)
        assert_all_returned(engine)
