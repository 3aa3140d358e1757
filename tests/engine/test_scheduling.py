"""Scheduling: budgets, limits, stops, preemption and failures, with drafts scripted so that any number is accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from reference import Checkpoint, recording_engine
from scripted import finish, scripted_engine

from foredraft.cache.groups import CacheLayout
from foredraft.config import EngineConfig
from foredraft.errors import RequestError
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.plan import StepPlan
from foredraft.request import Request
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason

VOCAB_SIZE = 64
ALL_RIGHT = 99


@pytest.fixture
def llama(checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints("llama")


@pytest.fixture
def chained(checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints("glm4_moe")


@pytest.fixture(params=["llama", "glm4_moe"])
def either(request: pytest.FixtureRequest, checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints(request.param)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


class Bench:
    """An engine over a tiny checkpoint, whose requests are drafted their own continuation."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        depth: int,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        budget: int = 1024,
        max_model_len: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        config = EngineConfig(
            num_speculative_tokens=depth,
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        eos = frozenset() if eos_token_id is None else frozenset([eos_token_id])
        self.reference = checkpoint.reference
        self.engine, self.drafter = scripted_engine(dataclasses.replace(checkpoint.loaded, eos_token_ids=eos), config)
        self.num_forwards = 0
        self.plans: list[StepPlan] = []
        self._watch()

    def _watch(self) -> None:
        """Keep every plan and count those that run the target."""
        plan = self.engine.scheduler.plan

        def watched() -> StepPlan:
            self.plans.append(plan())
            self.num_forwards += any(request.token_ids for request in self.plans[-1].requests)
            return self.plans[-1]

        self.engine.scheduler.plan = watched  # type: ignore[method-assign]

    def add(
        self, name: str, prompt: Sequence[int], params: SamplingParams | None = None, num_right: int = ALL_RIGHT
    ) -> Request:
        params = params or SamplingParams(max_tokens=12)
        num_tokens = min(params.max_tokens or 40, 40)
        self.drafter.continuations[name] = self.reference.sequence(prompt, num_tokens + self.engine.limits.max_depth)
        self.drafter.num_right[name] = num_right
        return self.engine.add_request(name, prompt, params)

    def finish(self) -> None:
        finish(self.engine)
        self.assert_empty()

    def assert_empty(self) -> None:
        """Nothing is held any more."""
        assert not self.engine.has_unfinished
        self.engine.cache.check_integrity()
        for pool in self.engine.cache.pools:
            assert pool.num_free_blocks == pool.num_usable_blocks

    def assert_right(self, request: Request, num_tokens: int) -> None:
        """The request returned exactly `num_tokens` tokens, those of the target alone."""
        expected = self.reference.sequence(request.prompt_token_ids, num_tokens)
        assert request.output_token_ids == expected[len(request.prompt_token_ids) :][:num_tokens]

    def drafted_positions(self) -> Iterator[int]:
        """Where in its sequence every draft lay."""
        for window, drafts in self.drafter.seen:
            yield from range(window.num_tokens, window.num_tokens + len(drafts))


# -- how many tokens, and when to stop -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9])
def test_max_tokens_is_exact_and_no_forward_is_wasted(llama: Checkpoint, depth: int, max_tokens: int) -> None:
    bench = Bench(llama, depth)
    request = bench.add("a", random_prompt(5), SamplingParams(max_tokens=max_tokens))
    bench.finish()
    bench.assert_right(request, max_tokens)
    assert request.finish_reason is FinishReason.LENGTH
    assert bench.num_forwards == 1 + -(-(max_tokens - 1) // (depth + 1))
    assert bench.engine.stats.num_steps == bench.num_forwards
    # The last token of a sequence is always the target's own, so a draft in its place would be for nothing.
    assert all(position < request.max_total_tokens - 1 for position in bench.drafted_positions())


@pytest.mark.parametrize("depths", [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 0, 1, 0]])
def test_full_acceptance_yields_the_bonus_token_too(llama: Checkpoint, depths: list[int]) -> None:
    bench = Bench(llama, 2)
    request = bench.add("a", random_prompt(5), SamplingParams(max_tokens=len(depths)))
    bench.finish()
    assert bench.num_forwards == 1 + 3
    assert request.token_depths == depths
    assert request.stats.accepted_by_depth == request.stats.drafted_by_depth


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("kind", ["eight modules", "glm4_moe"])
def test_max_model_len_is_reached_exactly(checkpoints: Callable[[str], Checkpoint], kind: str, depth: int) -> None:
    bench = Bench(checkpoints(kind), depth, max_model_len=32)
    request = bench.add("a", random_prompt(25), SamplingParams(max_tokens=100))
    bench.finish()
    bench.assert_right(request, 7)
    assert request.num_tokens == 32
    assert request.finish_reason is FinishReason.LENGTH
    assert all(position < 31 for position in bench.drafted_positions())
    assert all(r.first_row + len(r.token_ids) <= 31 for plan in bench.plans for r in plan.requests)


def prompt_with_distinct_continuation(checkpoint: Checkpoint, num_tokens: int) -> list[int]:
    for seed in range(100):
        prompt = random_prompt(6, seed)
        continuation = checkpoint.reference.sequence(prompt, num_tokens)[6 : 6 + num_tokens]
        if len(set(continuation)) == num_tokens:
            return prompt
    raise AssertionError("every continuation repeats itself")


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("is_eos", [True, False])
def test_stops_at_any_place_in_an_accepted_block(llama: Checkpoint, index: int, is_eos: bool) -> None:
    prompt = prompt_with_distinct_continuation(llama, 6)
    # Token 0 comes from the prefill, 1 to 3 are drafts, 4 is the bonus token.
    stop = llama.reference.sequence(prompt, 6)[6 + index]
    bench = Bench(llama, 3, eos_token_id=stop if is_eos else None)
    params = SamplingParams(max_tokens=20, stop_token_ids=() if is_eos else (stop,))
    request = bench.add("a", prompt, params)
    other = bench.add("b", random_prompt(9), SamplingParams(max_tokens=20, ignore_eos=True))
    bench.finish()
    bench.assert_right(request, index + 1)
    bench.assert_right(other, 20)
    assert request.finish_reason is FinishReason.STOP
    assert request.token_depths == [0, 1, 2, 3, 0][: index + 1]
    assert request.stats.num_accepted_tokens == sum(depth > 0 for depth in request.token_depths)
    assert bench.engine.stats.num_generated_tokens == index + 1 + 20


def test_ignore_eos_goes_on(llama: Checkpoint) -> None:
    prompt = prompt_with_distinct_continuation(llama, 6)
    bench = Bench(llama, 3, eos_token_id=llama.reference.sequence(prompt, 6)[8])
    request = bench.add("a", prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    bench.finish()
    bench.assert_right(request, 20)
    assert request.finish_reason is FinishReason.LENGTH


def test_a_rejected_eos_draft_does_not_stop(llama: Checkpoint) -> None:
    prompt = prompt_with_distinct_continuation(llama, 6)
    # The script's wrong drafts are the right token plus one: the second draft is the end-of-sequence token, rejected.
    eos = (llama.reference.sequence(prompt, 6)[8] + 1) % VOCAB_SIZE
    assert eos not in llama.reference.sequence(prompt, 12)[6:18]
    bench = Bench(llama, 3, eos_token_id=eos)
    request = bench.add("a", prompt, num_right=1)
    bench.finish()
    assert any(eos in drafts for _, drafts in bench.drafter.seen)
    bench.assert_right(request, 12)
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 3])
def test_rejected_drafts_cost_no_budget(llama: Checkpoint, depth: int) -> None:
    for num_right in range(depth):
        bench = Bench(llama, depth)
        request = bench.add("a", random_prompt(4), SamplingParams(max_tokens=16), num_right=num_right)
        bench.finish()
        bench.assert_right(request, 16)
        assert bench.num_forwards == 1 + -(-15 // (num_right + 1))


@pytest.mark.parametrize("kind", ["eight modules", "glm4_moe"])
def test_output_is_the_targets_own_over_many_tokens(checkpoints: Callable[[str], Checkpoint], kind: str) -> None:
    checkpoint = checkpoints(kind)
    prompt = random_prompt(11)
    expected = checkpoint.reference.sequence(prompt, 210)
    for depth in range(1, 9):
        engine, drafter = recording_engine(checkpoint.loaded, depth, max_num_seqs=1, max_model_len=240)
        drafter.continuations["a"] = expected
        request = engine.add_request("a", prompt, SamplingParams(max_tokens=200))
        finish(engine)
        assert request.token_ids == expected[:211]


def test_prompts_of_any_length_start_alike_with_and_without_drafts(llama: Checkpoint) -> None:
    for depth in (0, 3):
        bench = Bench(llama, depth, max_num_seqs=3, budget=12)
        requests = [bench.add(f"{n}", random_prompt(n), SamplingParams(max_tokens=3)) for n in range(1, 34)]
        bench.finish()
        for request in requests:
            bench.assert_right(request, 3)


# -- the token budget ------------------------------------------------------------------------------------------------


def test_a_last_chunk_of_one_token_runs_beside_drafting_requests(llama: Checkpoint) -> None:
    bench = Bench(llama, 1, max_num_seqs=3, budget=6)
    requests = [bench.add("a", random_prompt(2)), bench.add("b", random_prompt(3))]
    bench.engine.step()
    requests.append(bench.add("c", random_prompt(5)))
    bench.finish()
    chunks = [
        len(p.token_ids) for plan in bench.plans for p in plan.requests if p.request_id == "c" and p.first_row < 5
    ]
    assert chunks == [2, 2, 1]
    last = next(plan for plan in bench.plans if any(p.request_id == "c" and p.is_sampling for p in plan.requests))
    assert [p.num_draft_tokens for p in last.requests] == [1, 1, 0]
    for request in requests:
        bench.assert_right(request, 12)


def test_no_step_exceeds_the_budget_and_every_input_is_a_token(either: Checkpoint) -> None:
    bench = Bench(either, 3, max_num_seqs=4, budget=16)
    requests = [bench.add(f"{n}", random_prompt(n), num_right=n % 4) for n in (1, 2, 3, 9, 17, 30, 5, 12)]
    bench.finish()
    for plan in bench.plans:
        assert 0 < sum(len(p.token_ids) for p in plan.requests) <= 16
        assert len(plan.requests) <= 4
        for p in plan.requests:
            assert all(0 <= token_id < VOCAB_SIZE for token_id in p.token_ids)
    for request in requests:
        bench.assert_right(request, 12)


@pytest.mark.parametrize(("kind", "depth"), [("llama", 3), ("glm4_moe", 3), ("mistral sliding", 2)])
def test_a_rebuild_larger_than_the_budget_takes_several_steps(
    checkpoints: Callable[[str], Checkpoint], kind: str, depth: int
) -> None:
    checkpoint = checkpoints(kind)
    engine, drafter = recording_engine(checkpoint.loaded, depth, max_num_seqs=1, budget=depth + 2)
    prompt = random_prompt(30)
    drafter.continuations["a"] = checkpoint.reference.sequence(prompt, 30)
    request = engine.add_request("a", prompt, SamplingParams(max_tokens=24, num_speculative_tokens=0))
    while request.num_tokens < 33:
        engine.step()
    assert not drafter.seen
    engine.set_num_speculative_tokens("a", depth)
    while not request.draft_token_ids:
        engine.step()
    rebuilt = [(window.start, window.end) for window, _ in drafter.seen]
    # Behind two windows of 8 rows, and a row for each draft, nothing can be seen: the modules begin anew there.
    first = 32 - (7 + 7 + 2) if kind == "mistral sliding" else 0
    assert [start for start, _ in rebuilt[:4]] == [first + index * (depth + 2) for index in range(4)]
    finish(engine)
    assert request.token_ids == drafter.continuations["a"][: 30 + 24]
    drafter.assert_equals(checkpoint.reference, {"a": request.token_ids})
    assert request.stats.num_rebuilt_rows >= 32 - first


def test_a_rebuild_holds_up_nobody_else(llama: Checkpoint) -> None:
    bench = Bench(llama, 2, max_num_seqs=2, budget=6)
    slow = bench.add("slow", random_prompt(30), SamplingParams(max_tokens=20, num_speculative_tokens=0))
    while slow.num_tokens < 32:
        bench.engine.step()
    steady = bench.add("steady", random_prompt(2), SamplingParams(max_tokens=20))
    bench.engine.step()
    bench.engine.set_num_speculative_tokens("slow", 2)
    while not slow.draft_token_ids:
        before = steady.num_tokens
        bench.engine.step()
        assert steady.num_tokens > before or steady.num_tokens == 22
    bench.finish()
    bench.assert_right(slow, 20)
    bench.assert_right(steady, 20)


# -- the draft side after every step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_the_modules_keep_up_with_any_number_of_accepts(llama: Checkpoint, num_right: int) -> None:
    bench = Bench(llama, 3)
    request = bench.add("a", random_prompt(2), SamplingParams(max_tokens=36), num_right=num_right)
    while bench.engine.has_unfinished:
        bench.engine.step()
        if request.draft_token_ids:
            depth = len(request.draft_token_ids)
            committed = [request.num_tokens - k for k in range(1, depth + 1)]
            assert list(request.exact.num_exact_rows[:depth]) == [max(0, count) for count in committed]
            assert request.num_computed_tokens == request.num_tokens - 1
    stats = request.stats
    proposed = [len(drafts) for _, drafts in bench.drafter.seen]
    assert stats.drafted_by_depth == [sum(length > depth for length in proposed) for depth in range(3)]
    assert stats.accepted_by_depth == stats.drafted_by_depth[:num_right] + [0] * (3 - num_right)


@pytest.mark.parametrize("settings", [{"budget": 16}, {"num_blocks": 16}, {"max_num_seqs": 1, "budget": 4}, {}])
def test_a_perfect_drafter_is_accepted_whatever_the_settings(either: Checkpoint, settings: dict[str, int]) -> None:
    bench = Bench(either, 3, **settings)
    requests = [bench.add(f"{n}", random_prompt(n), SamplingParams(max_tokens=13)) for n in (1, 4, 11)]
    bench.finish()
    for request in requests:
        bench.assert_right(request, 13)
        assert request.stats.mean_acceptance_length == 4.0
        assert request.token_depths == [0] + [1, 2, 3, 0] * 3


def test_exact_rows_are_never_written_again(llama: Checkpoint) -> None:
    bench = Bench(llama, 3, max_num_seqs=1, budget=12)
    request = bench.add("a", random_prompt(9), SamplingParams(max_tokens=36), num_right=1)
    storage = bench.engine.runner.storage

    def exact_rows() -> list[torch.Tensor]:
        blocks = bench.engine.cache.block_tables("a")[storage.layout.group_of_module[0]]
        return [
            torch.cat([kv.key[slots], kv.value[slots]], dim=1)
            for kv, count in zip(storage.modules, request.exact.num_exact_rows)
            for slots in [storage.slots(blocks, count)]
        ]

    bench.engine.step()
    depths = [3, 1, 1, 0, 2, 3, 0, 0, 1, 3]
    for depth in depths:
        bench.engine.set_num_speculative_tokens("a", depth)
        before = exact_rows()
        bench.engine.step()
        for old, new in zip(before, exact_rows()):
            assert torch.equal(old, new[: len(old)])


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [8, 11, 20])
@pytest.mark.parametrize("budget", [24, 1024])
def test_preempted_requests_return_what_they_return_alone(either: Checkpoint, num_blocks: int, budget: int) -> None:
    bench = Bench(either, 3, num_blocks=num_blocks, max_num_seqs=6, budget=budget)
    requests = [
        bench.add(f"{i}", random_prompt(n), SamplingParams(max_tokens=14), num_right=i % 4)
        for i, n in enumerate([3, 9, 12, 5, 11, 1, 2, 13])
    ]
    bench.finish()
    assert bench.engine.stats.num_preemptions > 0
    for request in requests:
        bench.assert_right(request, 14)
        assert request.finish_reason is FinishReason.LENGTH


def test_requests_that_can_never_fit_fail_alone(llama: Checkpoint) -> None:
    bench = Bench(llama, 2, num_blocks=8)
    requests = [bench.add(f"{n}", random_prompt(n)) for n in (3, 5, 16)]
    bench.engine.step()
    with pytest.raises(RequestError, match=r"28 tokens.*max_model_len=28.*27"):
        bench.engine.add_request("large", random_prompt(28), SamplingParams())
    assert bench.engine.stats.num_requests == 3
    bench.finish()
    for request in requests:
        bench.assert_right(request, 12)


def test_max_tokens_beyond_the_free_context_is_clamped_to_it(llama: Checkpoint) -> None:
    bench = Bench(llama, 2, num_blocks=8)
    request = bench.add("a", random_prompt(27), SamplingParams(max_tokens=50))
    without = bench.add("b", random_prompt(20), SamplingParams())
    bench.finish()
    bench.assert_right(request, 1)
    bench.assert_right(without, 8)


def test_two_hundred_requests_in_twenty_blocks(llama: Checkpoint) -> None:
    bench = Bench(llama, 3, num_blocks=20, max_num_seqs=5, budget=32)
    prompts = [random_prompt(1 + seed % 17) for seed in range(200)]
    requests = []
    for index, prompt in enumerate(prompts):
        continuation = llama.reference.sequence(prompt, 12)[len(prompt) :]
        stops = (continuation[index % 5],) if index % 3 == 0 else ()
        params = SamplingParams(max_tokens=1 + index % 8, stop_token_ids=stops)
        requests.append(bench.add(f"{index}", prompt, params, num_right=index % 4))
    to_abort = iter(range(4, 200, 7))
    while bench.engine.has_unfinished:
        bench.engine.step()
        bench.engine.cache.check_integrity()
        if bench.engine.stats.num_steps % 2 == 0:
            bench.engine.abort(f"{next(to_abort, -1)}")
    bench.assert_empty()
    reasons = {request.finish_reason for request in requests}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    for request in requests:
        if request.finish_reason is not FinishReason.ABORT:
            bench.assert_right(request, len(request.output_token_ids))
            is_full = len(request.output_token_ids) == request.params.max_tokens
            assert is_full or request.token_ids[-1] in request.params.stop_token_ids


# -- aborts, ids, failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_chunk(either: Checkpoint, num_steps: int) -> None:
    bench = Bench(either, 2, max_num_seqs=2, budget=6)
    other = bench.add("other", random_prompt(2))
    bench.engine.step()
    request = bench.add("a", random_prompt(13))
    for _ in range(num_steps):
        bench.engine.step()
    assert bench.engine.abort("a") is request
    assert bench.engine.abort("a") is None
    bench.engine.cache.check_integrity()
    assert request.finish_reason is FinishReason.ABORT
    bench.finish()
    bench.assert_right(other, 12)
    bench.assert_right(request, len(request.output_token_ids))


def test_aborts_while_preempted_leave_room_for_the_next(llama: Checkpoint) -> None:
    bench = Bench(llama, 1, num_blocks=8, max_num_seqs=2)
    for round_ in range(50):
        for seed, name in enumerate(("a", "b", "c")):
            bench.add(f"{name}{round_}", random_prompt(9, seed))
        for _ in range(round_ % 9):
            bench.engine.step()
        for name in ("a", "b", "c"):
            bench.engine.abort(f"{name}{round_}")
        bench.assert_empty()
    assert bench.engine.stats.num_preemptions > 0
    request = bench.add("plain", random_prompt(7))
    bench.finish()
    bench.assert_right(request, 12)


def test_an_id_in_use_is_refused_and_free_again_afterwards(llama: Checkpoint) -> None:
    bench = Bench(llama, 2, max_num_seqs=1)
    first, second = bench.add("a", random_prompt(5)), bench.add("b", random_prompt(6))
    for _ in range(2):  # "a" waits, then runs; "b" waits
        for name in ("a", "b"):
            with pytest.raises(RequestError, match=f"'{name}' is in use"):
                bench.engine.add_request(name, [1], SamplingParams())
        bench.engine.step()
    bench.finish()
    bench.assert_right(first, 12)
    bench.assert_right(second, 12)
    again = bench.add("a", random_prompt(7))
    bench.finish()
    bench.assert_right(again, 12)


@pytest.mark.parametrize("owner", [TargetModel, MtpModules])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_failed_step_ends_its_requests_and_the_next_is_served(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, owner: type, num_steps: int
) -> None:
    bench = Bench(llama, 2, max_num_seqs=2)
    requests = [bench.add(f"{n}", random_prompt(n)) for n in (3, 8, 5)]
    for _ in range(num_steps):
        bench.engine.step()

    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(owner, "forward", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            bench.engine.step()
    bench.assert_empty()
    assert all(request.finish_reason is not None for request in requests)
    request = bench.add("next", random_prompt(6))
    bench.finish()
    bench.assert_right(request, 12)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "at least one token"),
        ([1, VOCAB_SIZE], {}, "prompt_token_ids must be between 0 and 63, not 64"),
        ([-1], {}, "prompt_token_ids must be between 0 and 63, not -1"),
        ([1.0], {}, "prompt_token_ids must hold integers"),
        ([1], {"stop_token_ids": (64,)}, "stop_token_ids must be between 0 and 63, not 64"),
        ([1], {"num_speculative_tokens": 4}, "num_speculative_tokens must be between 0 and 3, not 4"),
    ],
)
def test_bad_requests_are_refused_with_the_rule(
    llama: Checkpoint, prompt: list[int], params: dict[str, object], message: str
) -> None:
    bench = Bench(llama, 3)
    with pytest.raises(RequestError, match=message):
        bench.engine.add_request("bad", prompt, SamplingParams(**params))  # type: ignore[arg-type]
    bench.assert_empty()
    request = bench.add("good", random_prompt(3))
    bench.finish()
    bench.assert_right(request, 12)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_cache_memory_per_token(llama: Checkpoint) -> None:
    bench = Bench(llama, 3, num_blocks=10)
    # fp32: keys and values of 2 key heads of 8 numbers, in 2 layers and 3 modules, and a hidden state of 32 numbers.
    target, modules = 4 * (2 * 2 * 2 * 8 + 32), 4 * 3 * 2 * 2 * 8
    layout: CacheLayout = bench.engine.runner.storage.layout
    assert [layout.bytes_per_token(group) for group in range(2)] == [target, modules]
    assert bench.engine.runner.storage.num_bytes == 10 * 4 * (target + modules)


def test_the_memory_limit_sets_the_number_of_blocks(llama: Checkpoint) -> None:
    bytes_per_block = 4 * 768
    config = EngineConfig(num_speculative_tokens=3, block_size=4, kv_cache_memory_bytes=9 * bytes_per_block + 100)
    engine, _ = scripted_engine(llama.loaded, config)
    assert engine.runner.storage.num_bytes == 9 * bytes_per_block
    assert engine.limits.max_model_len == 8 * 4
