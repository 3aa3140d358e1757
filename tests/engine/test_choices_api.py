"""n choices as a caller sees them: seeds, ends, streams, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.logits_processor import TokenHistory
from foredraft.outputs import Choice, RequestOutput, StreamChunk
from foredraft.sampling.philox import seed_of_choice
from foredraft.stopping import FinishReason

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
STOPS = tuple(range(0, 64, 9))
"""Choices come to one of these at different places."""
DEPTHS = [0, 3]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "checkpoint", tokenizer=True)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    """Room for three at once; every test leaves it empty."""
    made = LLM(path, dtype="float32", block_size=4, num_blocks=64, max_num_seqs=3, max_model_len=60)
    yield made
    assert not made.engine.has_unfinished
    made.engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in made.engine.cache.pools)


def params(n: int, depth: int = 3, **settings: Any) -> SamplingParams:
    wanted = {"max_tokens": MAX_TOKENS, "temperature": 1.5, "seed": 5, "num_speculative_tokens": depth, **settings}
    return SamplingParams(n=n, **wanted)


def generate(llm: LLM, wanted: SamplingParams) -> RequestOutput:
    return llm.generate([PROMPT], wanted)[0]


def texts(choices: Sequence[Choice]) -> list[tuple[Any, ...]]:
    return [(one.index, one.token_ids, one.token_depths, one.text, one.finish_reason) for one in choices]


def of_choice(chunks: Sequence[StreamChunk], index: int) -> list[StreamChunk]:
    return [chunk for chunk in chunks if chunk.index == index]


def assert_adds_up(chunks: Sequence[StreamChunk]) -> RequestOutput:
    """The chunks of each choice make up its tokens and text; the last says why it ended; the last of all, all."""
    output = chunks[-1].output
    assert output is not None
    assert all(chunk.output is None for chunk in chunks[:-1])
    assert {chunk.index for chunk in chunks} == {choice.index for choice in output.choices}
    for choice in output.choices:
        own = of_choice(chunks, choice.index)
        assert tuple(token_id for chunk in own for token_id in chunk.token_ids) == choice.token_ids
        assert "".join(chunk.text for chunk in own) == choice.text
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [choice.finish_reason]
    return output


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_choice_has_a_seed_of_its_own(llm: LLM, depth: int) -> None:
    output = generate(llm, params(5, depth))
    assert [choice.index for choice in output.choices] == list(range(5))
    assert len({choice.token_ids for choice in output.choices}) == 5
    assert texts(generate(llm, params(5, depth)).choices) == texts(output.choices)
    assert texts(generate(llm, params(2, depth)).choices) == texts(output.choices[:2])
    for choice in output.choices:
        (alone,) = generate(llm, params(1, depth, seed=seed_of_choice(5, choice.index))).choices
        assert texts([alone])[0][1:] == texts([choice])[0][1:]
    assert output.token_ids == output.choices[0].token_ids


def test_without_a_seed_they_differ(llm: LLM) -> None:
    first, second = (generate(llm, params(4, seed=None)) for _ in range(2))
    assert len({choice.token_ids for output in (first, second) for choice in output.choices}) == 8


@pytest.mark.parametrize("depth", DEPTHS)
def test_greedy_choices_are_the_same(llm: LLM, depth: int) -> None:
    output = generate(llm, params(4, depth, temperature=0.0))
    (alone,) = generate(llm, params(1, depth, temperature=0.0)).choices
    assert {(choice.token_ids, choice.text) for choice in output.choices} == {(alone.token_ids, alone.text)}


def test_with_other_requests(llm: LLM) -> None:
    alone = [generate(llm, params(n)) for n in (4, 1, 2)]
    together = llm.generate([PROMPT] * 3, [params(n) for n in (4, 1, 2)])
    assert [texts(output.choices) for output in together] == [texts(output.choices) for output in alone]


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_choices_end_where_they_do(llm: LLM, depth: int) -> None:
    """Those that stop leave those that go on alone."""
    whole = generate(llm, params(6, depth))
    output = generate(llm, params(6, depth, stop_token_ids=STOPS))
    assert {choice.finish_reason for choice in output.choices} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({len(choice.token_ids) for choice in output.choices}) > 3
    for one, full in zip(output.choices, whole.choices):
        end = next((i + 1 for i, token_id in enumerate(full.token_ids) if token_id in STOPS), MAX_TOKENS)
        assert one.token_ids == full.token_ids[:end]
        is_stopped = full.token_ids[end - 1] in STOPS
        assert one.finish_reason == (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_short_ones(llm: LLM, depth: int, max_tokens: int) -> None:
    for _ in range(2):
        output = generate(llm, params(5, depth, max_tokens=max_tokens))
        assert [len(choice.token_ids) for choice in output.choices] == [max_tokens] * 5
        assert_adds_up(list(llm.stream(PROMPT, params(5, depth, max_tokens=max_tokens))))


def test_cached_tokens_are_those_of_the_first(llm: LLM) -> None:
    assert generate(llm, params(4)).num_cached_tokens == 0
    assert generate(llm, params(4)).num_cached_tokens == 8
    llm.reset_stats()
    generate(llm, params(4, cache_salt="new"))
    assert (llm.stats.num_requests, llm.stats.num_prompt_tokens) == (1, 9)
    assert llm.stats.num_cached_tokens == 2 * len(PROMPT) + 8  # when the last one starts, the first has ended


def test_echo(llm: LLM) -> None:
    assert llm.tokenizer is not None
    plain, echoed = generate(llm, params(3)), generate(llm, params(3, echo=True))
    prompt = str(llm.tokenizer.decode(PROMPT))
    assert [choice.text for choice in echoed.choices] == [prompt + choice.text for choice in plain.choices]
    output = assert_adds_up(list(llm.stream(PROMPT, params(3, echo=True))))
    assert texts(output.choices) == texts(echoed.choices)


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_streams_add_up(llm: LLM, depth: int) -> None:
    wanted = params(6, depth, stop_token_ids=STOPS, logprobs=1)
    expected = generate(llm, wanted)
    streams = [llm.stream(PROMPT, wanted) for _ in range(2)]
    for chunks in [list(stream) for stream in streams]:
        output = assert_adds_up(chunks)
        assert texts(output.choices) == texts(expected.choices)
        for choice in output.choices:
            found = [one for chunk in of_choice(chunks, choice.index) for one in chunk.logprobs]
            assert tuple(found) == choice.logprobs


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 5])
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_closed_stream_ends_all_its_choices(llm: LLM, num_chunks: int, is_collected: bool) -> None:
    stream = llm.stream(PROMPT, params(6))
    for _ in range(num_chunks):
        next(stream)
    assert llm.engine.has_unfinished
    if is_collected:
        del stream
        gc.collect()
    else:
        stream.close()
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("index", [0, 1, 4])
@pytest.mark.parametrize("num_chunks", [0, 1, 6])
def test_one_choice_is_aborted(llm: LLM, index: int, num_chunks: int) -> None:
    whole = generate(llm, params(5))
    stream = llm.stream(PROMPT, params(5))
    request_id = max(llm.engine.scheduler.unfinished_ids, key=len).partition(".")[0]
    chunks = [next(stream) for _ in range(num_chunks)]
    llm.engine.abort(f"{request_id}.{index}" if index else request_id)
    chunks += stream
    output = assert_adds_up(chunks)
    for choice, full in zip(output.choices, whole.choices):
        if choice.index == index:
            assert choice.finish_reason is FinishReason.ABORT
            assert choice.token_ids == full.token_ids[: len(choice.token_ids)]
        else:
            assert texts([choice]) == texts([full])


# -- errors ------------------------------------------------------------------------------------------------------------


class FailsAfter:
    """Fails in the choices whose output `is_wrong`."""

    is_stateful = False

    def __init__(self, is_wrong: Callable[[tuple[int, ...]], bool]) -> None:
        self._is_wrong = is_wrong

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        if self._is_wrong(history.output_token_ids):
            raise ValueError("wrong")
        return logits


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("num_before", [1, 4])
def test_one_choice_fails(llm: LLM, failing: int, num_before: int) -> None:
    whole = generate(llm, params(5))
    beginning = whole.choices[failing].token_ids[:num_before]
    rule = FailsAfter(lambda token_ids: token_ids == beginning)
    output = generate(llm, params(5, logits_processors=[rule]))
    for choice, full in zip(output.choices, whole.choices):
        if full.token_ids[:num_before] == beginning:
            assert (choice.finish_reason, choice.token_ids) == (FinishReason.ERROR, beginning)
            assert choice.error == "logits_processors: ValueError: wrong"
        else:
            assert (choice.error, choice.token_ids) == (None, full.token_ids)


def test_all_fail_at_the_first_token(llm: LLM) -> None:
    output = generate(llm, params(5, logits_processors=[FailsAfter(lambda token_ids: True)]))
    assert [choice.finish_reason for choice in output.choices] == [FinishReason.ERROR] * 5
    assert [choice.token_ids for choice in output.choices] == [()] * 5


def test_a_request_that_cannot_be_served_leaves_nothing(llm: LLM) -> None:
    broken, whole = llm.generate([[1] * 80, PROMPT], params(5))
    assert broken.finish_reason is FinishReason.ERROR
    assert len(whole.choices) == 5


def test_an_engine_that_fails_ends_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(PROMPT, params(5))
    first = next(stream)

    def fail(plan: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", fail)
        with pytest.raises(RuntimeError, match="broken"):
            list(stream)
    assert first.index == 0
    assert not llm.engine.has_unfinished
    assert len(generate(llm, params(5)).choices) == 5
