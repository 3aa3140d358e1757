"""The engine that serves an event loop: order, cancelling, limits, draining, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.engine.async_engine import AsyncEngine, EngineState, Submission
from foredraft.engine.observation import ChoiceTimes, EngineSnapshot
from foredraft.engine.served import Job
from foredraft.errors import EngineBusyError, EngineUnavailableError, ModelLoadError, RequestError
from foredraft.outputs import RequestOutput
from foredraft.stopping import FinishReason

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9]]
Scenario = Callable[[AsyncEngine, LLM], Awaitable[None]]


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.snapshots: list[EngineSnapshot] = []
        self.gaps: list[tuple[float, int]] = []
        self.ends: list[ChoiceTimes] = []

    def observe_step(self, snapshot: EngineSnapshot) -> None:
        self.snapshots.append(snapshot)

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        self.gaps.append((seconds, num_tokens))

    def observe_end(self, times: ChoiceTimes) -> None:
        self.ends.append(times)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), num_modules=3)


def make_llm(checkpoint: Path, **settings: Any) -> LLM:
    return LLM(checkpoint, **{"block_size": 4, "num_blocks": 200, "max_num_seqs": 4, "dtype": "float32", **settings})


def run(llm: LLM, scenario: Scenario, **options: Any) -> AsyncEngine:
    """Let an engine serve `llm` while `scenario` runs; afterwards nothing may be held."""

    async def main() -> AsyncEngine:
        async with serving(llm, **options) as engine:
            await scenario(engine, llm)
        return engine

    engine = asyncio.run(asyncio.wait_for(main(), 60))
    llm.engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.cache.pools)
    assert not llm.engine.has_unfinished
    return engine


@asynccontextmanager
async def serving(llm: LLM, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: llm, **options)
    engine.start()
    await engine.ready()
    try:
        yield engine
    finally:
        await engine.close()


async def outputs(submission: Submission) -> list[RequestOutput]:
    """The outputs of all jobs, in their order; the chunks of each choice must make up its text and tokens."""
    found: dict[int, RequestOutput] = {}
    tokens: dict[tuple[int, int], tuple[int, ...]] = {}
    async for index, chunk in submission:
        key = index, chunk.index
        tokens[key] = tokens.get(key, ()) + chunk.token_ids
        if chunk.output is not None:
            found[index] = chunk.output
    for index, output in found.items():
        for choice in output.choices:
            assert tokens[index, choice.index] == choice.token_ids
    return [found[index] for index in range(len(submission.ticket.jobs))]


def jobs(prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[Job]:
    return [Job(prompt, SamplingParams(**{"max_tokens": 12, **options})) for prompt in prompts]


def test_answers_are_those_of_the_offline_front_end(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    expected = [output.token_ids for output in llm.generate(PROMPTS, SamplingParams(max_tokens=12))]

    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        together = await outputs(await engine.submit(jobs()))
        assert [output.token_ids for output in together] == expected
        apart = [await engine.submit(jobs([prompt])) for prompt in PROMPTS]
        answers = await asyncio.gather(*map(outputs, apart))
        assert [output.token_ids for (output,) in answers] == expected
        assert engine.num_open == 0
        assert engine.num_waiting == 0

    run(llm, scenario)


def test_choices_are_told_apart(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=5)
    expected = [choice.token_ids for choice in llm.generate([PROMPTS[0]], params)[0].choices]

    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        (output,) = await outputs(await engine.submit([Job(PROMPTS[0], params)]))
        assert [choice.token_ids for choice in output.choices] == expected

    run(llm, scenario)


def test_jobs_are_taken_together_or_not_at_all(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        bad = [*jobs(), Job([10**6], SamplingParams())]
        with pytest.raises(RequestError, match="prompt_token_ids"):
            await engine.submit(bad)
        assert engine.num_open == 0
        assert len(await outputs(await engine.submit(jobs()))) == 4

    run(make_llm(checkpoint), scenario)


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_who_goes_away_is_forgotten_within_a_step(checkpoint: Path, num_chunks: int) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        long = await engine.submit(jobs(PROMPTS[:1], max_tokens=1000, ignore_eos=True))
        beside = await engine.submit(jobs(PROMPTS[1:2]))
        for _ in range(num_chunks):
            await anext(long)
        long.abort()
        assert engine.num_open == 1
        assert [chunk async for chunk in long] == []
        (output,) = await outputs(beside)
        assert output.finish_reason is FinishReason.LENGTH
        await outputs(await engine.submit(jobs(PROMPTS[2:3])))  # handed in after the abort, so served after it
        assert not llm.engine.has_unfinished

    run(make_llm(checkpoint), scenario)


def test_a_submission_that_is_cancelled_before_it_is_taken(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        task = asyncio.create_task(engine.submit(jobs(max_tokens=1000)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_open == 0
        assert len(await outputs(await engine.submit(jobs()))) == 4

    run(make_llm(checkpoint), scenario)


def test_no_more_wait_than_may(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        first = await engine.submit(jobs(PROMPTS[:1], max_tokens=400, ignore_eos=True))
        await anext(first)  # it runs, alone
        waiting = [await engine.submit(jobs([prompt])) for prompt in PROMPTS[1:3]]
        assert engine.num_waiting == 2
        with pytest.raises(EngineBusyError, match="as many choices wait as may: 2, of at most 2"):
            await engine.submit(jobs(PROMPTS[3:]))
        waiting[0].abort()
        third = await engine.submit(jobs(PROMPTS[3:]))
        first.abort()
        assert len(await outputs(waiting[1])) == len(await outputs(third)) == 1
        assert engine.num_waiting == 0

    run(make_llm(checkpoint, max_num_seqs=1), scenario, max_waiting=2)


def test_draining_waits_for_what_runs_and_takes_no_more(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        running = await engine.submit(jobs(PROMPTS[:1], max_tokens=60))
        reading = asyncio.create_task(outputs(running))
        draining = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        assert engine.state is EngineState.DRAINING
        with pytest.raises(EngineUnavailableError, match="draining"):
            await engine.submit(jobs())
        assert await draining
        (output,) = await reading
        assert len(output.token_ids) == 60

    run(make_llm(checkpoint), scenario)


def test_what_does_not_end_in_time_gets_an_error(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        running = await engine.submit(jobs(PROMPTS[:1], max_tokens=1000, ignore_eos=True))
        await anext(running)
        assert not await engine.drain(0.0)
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="shuts down"):
            await outputs(running)

    assert run(make_llm(checkpoint), scenario).state is EngineState.CLOSED


def test_a_step_that_fails_answers_everybody_and_ends_the_thread(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint, max_num_seqs=1)
    ended: list[BaseException | None] = []

    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        running = await engine.submit(jobs(PROMPTS[:1], max_tokens=1000, ignore_eos=True))
        waiting = await engine.submit(jobs(PROMPTS[1:2]))
        await anext(running)

        def fail(plan: object) -> None:
            raise MemoryError("no memory is left")

        monkeypatch.setattr(llm.engine.runner, "execute", fail)
        for submission in (running, waiting):
            with pytest.raises(EngineUnavailableError, match="MemoryError: no memory is left"):
                await outputs(submission)
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineUnavailableError, match="failed"):
            await engine.submit(jobs())

    run(llm, scenario, on_end=ended.append)
    assert [type(error) for error in ended] == [MemoryError]


def test_a_request_that_breaks_the_engine_while_it_is_added_fails_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        running = await engine.submit(jobs(PROMPTS[:1]))
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine), "_check_prompt", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await engine.submit(jobs(PROMPTS[1:2]))
        (output,) = await outputs(running)
        assert output.finish_reason is FinishReason.LENGTH
        assert engine.state is EngineState.READY

    run(make_llm(checkpoint), scenario)


def test_a_model_that_cannot_be_loaded() -> None:
    def load() -> LLM:
        raise ModelLoadError("there is no such checkpoint")

    async def main() -> None:
        ended: list[BaseException | None] = []
        engine = AsyncEngine(load, on_end=ended.append)
        engine.start()
        with pytest.raises(EngineUnavailableError, match="no such checkpoint"):
            await engine.ready()
        assert engine.state is EngineState.FAILED
        assert isinstance(ended[0], ModelLoadError)
        await engine.close()

    asyncio.run(main())


def test_nothing_is_taken_while_the_model_loads(checkpoint: Path) -> None:
    may_load = threading.Event()

    def load() -> LLM:
        may_load.wait(60)
        return make_llm(checkpoint)

    async def main() -> None:
        engine = AsyncEngine(load)
        engine.start()
        with pytest.raises(EngineUnavailableError, match="loading"):
            await engine.submit(jobs())
        with pytest.raises(EngineUnavailableError, match="loading"):
            _ = engine.llm
        may_load.set()
        await engine.ready()
        assert len(await outputs(await engine.submit(jobs()))) == 4
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_observer_sees_every_choice_and_the_state_after_each_step(checkpoint: Path) -> None:
    notes = Notes()

    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        kept = await outputs(await engine.submit(jobs(PROMPTS[:2], n=2)))
        gone = await engine.submit(jobs(PROMPTS[2:3], max_tokens=1000, ignore_eos=True))
        await anext(gone)
        gone.abort()
        await outputs(await engine.submit(jobs(PROMPTS[3:])))
        assert [len(output.choices) for output in kept] == [2, 2]

    run(make_llm(checkpoint), scenario, observe=lambda llm: notes)
    assert len(notes.ends) == 6
    by_reason = [times.finish_reason for times in notes.ends]
    assert by_reason.count(FinishReason.ABORT) == 1
    assert sum(times.num_prompt_tokens for times in notes.ends) == sum(map(len, PROMPTS))
    for times in notes.ends:
        assert times.started is not None
        assert times.first_token is not None
        assert times.last_token is not None
        assert times.arrival <= times.started <= times.first_token <= times.last_token <= times.ended
    last = notes.snapshots[-1]
    assert (last.num_running, last.num_waiting, last.cache_usage) == (0, 0, 0.0)
    assert max(snapshot.num_running for snapshot in notes.snapshots) == 4
    assert last.stats.num_generated_tokens == sum(times.num_generated_tokens for times in notes.ends)
    assert sum(last.depths.values()) == last.stats.speculation.num_cycles
    counts = [snapshot.stats.num_generated_tokens for snapshot in notes.snapshots]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_draining_an_idle_engine_takes_no_time_at_all(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        assert await engine.drain(0.0)

    run(make_llm(checkpoint), scenario)


def test_what_is_still_read_when_the_engine_closes_is_given_up_at_once(checkpoint: Path) -> None:
    async def scenario(engine: AsyncEngine, llm: LLM) -> None:
        with pytest.raises(ZeroDivisionError):
            await engine.unless_closed(asyncio.to_thread(lambda: 1 / 0))
        assert await engine.unless_closed(asyncio.sleep(0, "done")) == "done"
        reading = asyncio.create_task(engine.unless_closed(asyncio.Event().wait()))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="shuts down"):
            await reading

    run(make_llm(checkpoint), scenario)
