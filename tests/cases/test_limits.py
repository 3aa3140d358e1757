"""Limits, refusals, aborts and preemptions: who is served, what is counted, and what becomes of the others."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from cases.replay import VOCAB_SIZE, Replay, assert_streams_alike, full_blocks, random_prompt
from reference import Checkpoint
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, RequestError
from foredraft.request import RequestStatus


@pytest.mark.parametrize("is_abort", [True, False], ids=["abort", "preempt"])
def test_a_result_that_comes_after_the_request_has_gone(checkpoint: Checkpoint, is_abort: bool) -> None:
    """vllm-project/vllm#28473: aborted or preempted between a step's start and its result, 20 times."""
    replay = Replay(checkpoint, 3, max_num_seqs=2, num_blocks=100)
    engine = replay.engine
    other = replay.add("other", random_prompt(5), 160, num_right=0)
    for index in range(20):
        request = replay.add(f"{index}", random_prompt(4 + index % 3, index), 10, num_right=index % 4)
        for _ in range(1 + index % 3):
            replay.step()
        num_tokens = request.num_tokens
        plan = engine.scheduler.plan()
        result = engine.runner.execute(plan)
        if is_abort:
            replay.abort(request.request_id)
        else:
            engine.scheduler.preempt(request)
        committed = engine.scheduler.commit(plan, result)
        engine.cache.check_integrity()
        assert [update.request for update in committed] == ([other] if is_abort else [other, request])
        if is_abort:
            assert (request.num_tokens, request.finish_reason) == (num_tokens, "abort")
        while request.finish_reason is None:
            replay.step()
        replay.assert_right(request)
        assert all(count >= 0 for count in replay.counts())
        drafted = request.stats.drafted_by_depth
        assert all(0 <= a <= d for a, d in zip(request.stats.accepted_by_depth, drafted))
    assert other.finish_reason is None
    replay.assert_serves()
    replay.assert_right(other)
    replay.abort("other")
    replay.assert_drained()
    assert engine.scheduler.num_preemptions == (0 if is_abort else 20)


def test_a_result_does_not_reach_a_later_request_of_the_same_id(llama: Checkpoint) -> None:
    """vllm-project/vllm#28473 again: the id of an aborted request is in use again when the result arrives."""
    replay = Replay(llama, 3)
    engine = replay.engine
    replay.add("a", random_prompt(5), 12)
    replay.step()
    plan = engine.scheduler.plan()
    result = engine.runner.execute(plan)
    replay.abort("a")
    later = replay.add("a", random_prompt(6, 1), 12)
    assert engine.scheduler.commit(plan, result) == []
    assert later.num_tokens == 6
    replay.run()
    replay.assert_right(later)


@pytest.mark.parametrize("where", ["plan", "execute"])
def test_a_stream_that_the_collector_closes_within_a_step(
    tmp_path: Path, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """vllm-project/vllm#28473 again: a stream in a cycle of references is closed whenever garbage is collected."""
    settings = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 64, "max_num_seqs": 4}
    llm = LLM(tiny_llama(tmp_path), num_speculative_tokens=3, **settings)
    gc.disable()
    try:
        params = SamplingParams(max_tokens=12)
        kept, left = llm.stream(random_prompt(5), params), [llm.stream(random_prompt(6), params)]
        read = [*next(kept).token_ids, *next(kept).token_ids]
        left.append(left)  # type: ignore[arg-type]
        del left
        owner, name = (llm.engine.cache, "reserve") if where == "plan" else (llm.engine.runner.target, "forward")
        watched, calls = getattr(owner, name), itertools.count()

        def collecting(*args: object) -> object:
            result = watched(*args)
            if next(calls) == 1:
                assert gc.collect() > 0
            return result

        monkeypatch.setattr(owner, name, collecting)
        read += [token_id for chunk in kept for token_id in chunk.token_ids]
    finally:
        gc.enable()
    assert next(calls) > 1
    assert [*random_prompt(5), *read] == llama.reference.sequence(random_prompt(5), 12)[:17]
    assert not llm.engine.has_unfinished
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.cache.pools)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_the_cache_is_cleared_in_mid_request(checkpoint: Checkpoint, depth: int, num_steps: int) -> None:
    """vllm-project/vllm#42117: pause, clear the cache, resume: no token is lost or doubled."""
    replay = Replay(checkpoint, depth, max_num_seqs=2, max_num_batched_tokens=2 * (depth + 1) + 1)
    replay.ask("earlier", random_prompt(9), 3)
    requests = [replay.add("a", random_prompt(9), 14), replay.add("b", random_prompt(7, 1), 14, num_right=1)]
    committed: dict[str, list[int]] = {"a": [], "b": []}

    def step() -> None:
        for update in replay.step():
            committed[update.request.request_id] += update.token_ids

    for _ in range(num_steps):
        step()
    replay.engine.reset_prefix_cache()
    replay.engine.cache.check_integrity()
    assert replay.num_cached_rows(random_prompt(9)) == 0
    while replay.engine.has_unfinished:
        step()
    replay.assert_drained()
    for request in requests:
        replay.assert_right(request)
        assert committed[request.request_id] == request.output_token_ids
        assert len(request.output_token_ids) == 14
    replay.assert_drafts_right()
    # What was computed before is not found any more, whoever still held it.
    later = replay.ask("later", random_prompt(9), 5)
    assert later.num_cached_tokens == (8 if num_steps == 0 else 0)
    assert replay.ask("last", random_prompt(9), 5).num_cached_tokens == 8


def test_a_request_that_skips_steps_reads_tokens_only(llama: Checkpoint) -> None:
    """vllm-project/vllm#46899: a budget that leaves nothing for one request (`Replay` looks at every input)."""
    replay = Replay(llama, 3, max_num_batched_tokens=16, num_blocks=200)
    slow = replay.add("slow", random_prompt(50), 30, num_speculative_tokens=0)
    while slow.num_tokens < 52:
        replay.step()
    steady = [replay.add(name, random_prompt(3, seed), 30, num_right=1) for seed, name in enumerate("ab")]
    replay.step()
    late = replay.add("late", random_prompt(30, 1), 9)
    replay.step()
    assert 0 < late.num_computed_tokens < 30
    replay.engine.set_num_speculative_tokens("slow", 3)  # its modules are now 50 rows behind
    num_skipped = 0
    while late.num_tokens == 30:
        replay.step()
        num_skipped += late.request_id not in [plan.request_id for plan in replay.plans[-1].requests]
    assert num_skipped > 3
    replay.run()
    for request in (slow, *steady, late):
        replay.assert_right(request)
    read = {token_id for forward in replay.drafter.forwards for token_id in forward.token_ids}
    assert 0 <= min(read) < max(read) < VOCAB_SIZE
    replay.assert_drafts_right()


def test_a_request_that_waits_with_drafts_keeps_them(checkpoint: Checkpoint) -> None:
    """vllm-project/vllm#46899 again: pending drafts of a request that is preempted are verified when it returns."""
    replay = Replay(checkpoint, 3)
    request = replay.add("a", random_prompt(9), 40, num_right=2)
    replay.step()
    for _ in range(4):
        replay.step()
        pending = request.draft_token_ids
        assert len(pending) == 3
        replay.engine.scheduler.preempt(request)
        assert request.draft_token_ids == pending
        replay.step()
        assert replay.plans_of("a")[-1].token_ids[-3:] == pending
    replay.run()
    replay.assert_right(request)


@pytest.mark.parametrize("settings", [(4, 64), (1, 16), (16, 271)])
def test_limits_that_no_full_batch_fits_are_refused(
    checkpoints: Callable[[str], Checkpoint], settings: tuple[int, int]
) -> None:
    """vllm-project/vllm#53970, vllm-project/vllm#50708: refused at the start, with the settings and the numbers."""
    num_seqs, budget = settings
    message = (
        f"max_num_batched_tokens={budget} is less than max_num_seqs={num_seqs} "
        f"times num_speculative_tokens \\+ 1 = 17, which is {17 * num_seqs}"
    )
    with pytest.raises(ConfigError, match=message):
        Replay(checkpoints("glm4_moe"), 16, max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    EngineConfig(num_speculative_tokens=16, max_num_seqs=num_seqs, max_num_batched_tokens=budget).check_depth(15)


def test_the_largest_batch_at_the_limit(checkpoints: Callable[[str], Checkpoint]) -> None:
    """vllm-project/vllm#53970, vllm-project/vllm#50708: four requests with 16 drafts each in steps of 68 rows."""
    replay = Replay(checkpoints("glm4_moe"), 16, max_num_seqs=4, max_num_batched_tokens=68, num_blocks=80)
    requests = [replay.add(f"{seed}", random_prompt(5, seed), 1 + 3 * 17) for seed in range(4)]
    replay.run()
    sizes = [sum(len(plan.token_ids) for plan in step.requests) for step in replay.plans]
    assert sizes == [20, 68, 68, 68]
    for request in requests:
        replay.assert_right(request)


@pytest.mark.parametrize("depth", range(9))
@pytest.mark.parametrize("kind", ["ten modules", "glm4_moe"])
def test_the_longest_sequence_is_reached_exactly(
    checkpoints: Callable[[str], Checkpoint], kind: str, depth: int
) -> None:
    """vllm-project/vllm#50342: a prompt of 25 in a context of 32, every draft right."""
    replay = Replay(checkpoints(kind), depth, max_model_len=32, max_num_seqs=2)
    request = replay.ask("a", random_prompt(25), 100)
    assert (request.num_tokens, request.finish_reason) == (32, "length")
    drafted = [window.num_tokens + len(drafts) for window, drafts in replay.drafter.seen]
    assert max(drafted, default=0) <= 31
    assert all(plan.first_row + len(plan.token_ids) <= 31 for plan in replay.plans_of("a"))
    assert len(replay.plans_of("a")) == 1 + -(-6 // (depth + 1))


@pytest.mark.parametrize("kind", ["ten modules", "glm4_moe", "mistral, window 6"])
def test_modules_reach_as_far_as_the_target(checkpoints: Callable[[str], Checkpoint], kind: str) -> None:
    """vllm-project/vllm#24662, vllm-project/vllm#22935: drafts up to the last position that the model has."""
    checkpoint = checkpoints(kind)
    longest = checkpoint.loaded.info.max_position_embeddings
    assert longest == 256
    depth = 4
    replay = Replay(checkpoint, depth, num_blocks=70, max_num_seqs=1)
    assert replay.engine.limits.max_model_len == longest
    request = replay.ask("a", random_prompt(longest - 23), None)
    assert request.num_tokens == longest
    assert request.token_depths == [0, *([1, 2, 3, 4, 0] * 4), 1, 0]
    last = max(position for forward in replay.drafter.forwards for position in forward.positions)
    assert last == longest - 2  # the last token is the target's own, and nothing reads it
    replay.assert_drafts_right()


@pytest.mark.parametrize("num_left", [1, 2, 5])
def test_without_max_tokens_the_context_is_the_limit(checkpoint: Checkpoint, depth: int, num_left: int) -> None:
    """NVIDIA/TensorRT-LLM#16826: L - n tokens, whatever the drafts; a prompt of L - 1 gets one."""
    replay = Replay(checkpoint, depth, max_model_len=40)
    others = [replay.add(f"{seed}", random_prompt(6, seed), 30) for seed in range(2)]
    replay.step()
    request = replay.add("a", random_prompt(40 - num_left), None)
    replay.run()
    assert (len(request.output_token_ids), request.finish_reason) == (num_left, "length")
    for one in (*others, request):
        replay.assert_right(one)
    replay.assert_serves()


@pytest.mark.parametrize("length", [39, 38])
def test_streams_at_the_limit(tmp_path: Path, length: int) -> None:
    """NVIDIA/TensorRT-LLM#16826 again: what is streamed at the end of the context is what is returned at once."""
    settings = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 64, "max_num_seqs": 2}
    llm = LLM(tiny_llama(tmp_path), num_speculative_tokens=3, max_model_len=40, **settings)
    output = assert_streams_alike(llm, random_prompt(length), SamplingParams())
    assert (len(output.token_ids), output.finish_reason) == (40 - length, "length")


@pytest.mark.parametrize("depth", [0, 3])
def test_a_request_that_can_never_be_served_fails_alone(checkpoint: Checkpoint, depth: int) -> None:
    """m87-labs/kestrel#135: refused while three others run, which go on."""
    replay = Replay(checkpoint, depth, num_blocks=16, max_model_len=40)
    others = [replay.add(f"{seed}", random_prompt(5, seed), 12, num_right=1) for seed in range(3)]
    while not all(request.finish_reason for request in others):
        before = replay.num_free_blocks()
        for prompt in (random_prompt(40), random_prompt(200), [], [VOCAB_SIZE]):
            with pytest.raises(RequestError, match=r"max_model_len=40|at least one token|between 0 and 63"):
                replay.add("unservable", prompt)
        assert replay.num_free_blocks() == before
        replay.step()
    replay.assert_drained()
    for request in others:
        replay.assert_right(request)
    assert replay.engine.stats.num_requests == 3
    replay.assert_serves()


@pytest.mark.parametrize("depth", [0, 3])
def test_preempted_and_aborted_requests_leave_their_places(checkpoint: Checkpoint, depth: int) -> None:
    """vllm-project/vllm#53130: at most two run; put off, resumed and aborted 50 times, then a plain one."""
    replay = Replay(checkpoint, depth, num_blocks=9, max_num_seqs=2)
    statuses = []
    for turn in range(50):
        requests = [replay.add(f"{turn} {seed}", random_prompt(9, seed), 16, num_right=1) for seed in range(4)]
        for _ in range(turn % 9):
            replay.step()
            running = [request for request in requests if request.status is RequestStatus.RUNNING]
            assert len(running) <= 2
            if turn % 3 == 0 and running:
                replay.engine.scheduler.preempt(running[-1])
        statuses += [request.status for request in requests]
        for request in requests:
            assert (replay.engine.abort(request.request_id) is request) == (request.finish_reason == "abort")
        replay.assert_drained()
    assert {RequestStatus.WAITING, RequestStatus.RUNNING} <= set(statuses)
    assert replay.engine.scheduler.num_preemptions > 40
    replay.assert_serves()
    replay.assert_drained()


def test_an_id_in_use_is_refused(checkpoint: Checkpoint) -> None:
    """vllm-project/vllm#10583, sgl-project/sglang#19035: while it waits, runs or is preempted; later it is free."""
    replay = Replay(checkpoint, 3, max_num_seqs=1)
    first, waiting = replay.add("a", random_prompt(5), 12, num_right=1), replay.add("b", random_prompt(6), 12)
    statuses = []
    while first.finish_reason is None:
        for request, name in ((first, "a"), (waiting, "b")):
            statuses.append(request.status)
            with pytest.raises(RequestError, match=f"request_id '{name}' is in use by a request that has not ended"):
                replay.engine.add_request(name, random_prompt(3), SamplingParams())
        if len(statuses) == 6:
            replay.engine.scheduler.preempt(first)
        else:
            replay.step()
    assert set(statuses) == {RequestStatus.WAITING, RequestStatus.RUNNING}
    assert replay.engine.stats.num_requests == 2
    replay.run()
    again = replay.ask("a", random_prompt(7), 12)
    assert again.status is RequestStatus.FINISHED
    for request in (first, waiting):
        replay.assert_right(request)


@pytest.mark.parametrize("num_chunks", range(6))
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_an_abort_at_every_chunk(checkpoint: Checkpoint, num_chunks: int, is_in_flight: bool) -> None:
    """sgl-project/sglang#36926: chunks of 5 rows of a prompt of 20, between steps and while one runs."""
    replay = Replay(checkpoint, 3, max_num_seqs=1, max_num_batched_tokens=5)
    engine, prompt = replay.engine, random_prompt(20)
    request = replay.add("a", prompt, 12)
    for _ in range(num_chunks):
        replay.step()
    computed, tokens = request.num_computed_tokens, list(request.token_ids)
    assert computed == (24 if num_chunks == 5 else 5 * num_chunks)
    if is_in_flight:
        plan = engine.scheduler.plan()
        result = engine.runner.execute(plan)
        replay.abort("a")
        assert engine.scheduler.commit(plan, result) == []
    else:
        replay.abort("a")
    assert engine.abort("a") is None
    assert (request.finish_reason, request.token_ids) == ("abort", tokens)
    replay.assert_drained()
    # What was committed is cached, the tail that was under way is not.
    assert replay.num_cached_rows(replay.drafter.continuations["a"]) == full_blocks(computed)
    again = replay.ask("again", prompt, 12)
    assert again.num_cached_tokens == min(20, full_blocks(computed))
    replay.assert_drafts_right("again")
