"""Log-probabilities of the prompt's own tokens: those of transformers, however the prompt came to be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reference import Reference
from tiny_models import tiny_alternating, tiny_llama, tiny_mistral

from foredraft import LLM, SamplingParams
from foredraft.logprobs import TokenLogprob
from foredraft.outputs import RequestOutput
from foredraft.request import RequestStatus
from foredraft.runner import request_memory

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": partial(tiny_llama, num_modules=3, tokenizer=True),
    "mistral": partial(tiny_mistral, num_modules=3, sliding_window=8),
    "alternating": partial(tiny_alternating, sliding_window=8),
}
"""Attention to all rows; sliding windows alone, so that h0 of early rows is given back; both."""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
NUM_TOP = 3
DEPTHS = [0, 3]


class Model(NamedTuple):
    kind: str
    path: Path
    reference: Reference


@pytest.fixture(scope="module", params=BUILDERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = BUILDERS[request.param](tmp_path_factory.mktemp("model") / "checkpoint")
    return Model(request.param, path, Reference(path))


def make_llm(model: Model, **settings: Any) -> LLM:
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 60, **settings}
    return LLM(model.path, dtype="float32", **settings)


def params(depth: int, **settings: Any) -> SamplingParams:
    wanted = {"max_tokens": 6, "ignore_eos": True, "prompt_logprobs": NUM_TOP, **settings}
    return SamplingParams(num_speculative_tokens=depth, **wanted)


def assert_right(
    model: Model, found: Sequence[TokenLogprob | None] | None, prompt: Sequence[int], num_top: int = NUM_TOP
) -> None:
    assert found is not None
    assert found[0] is None
    assert [one.token_id for one in found[1:] if one is not None] == list(prompt[1:])
    logprobs = model.reference.logits(prompt).float().log_softmax(dim=-1)
    for row, token_id, one in zip(logprobs, prompt[1:], found[1:]):
        assert one is not None
        assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        best = row.topk(num_top)
        assert [token_id for token_id, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert one.rank == 1 + int((row > row[token_id]).sum())


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.cache.pools)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1, 2, 4, 8, 19, 20])
@pytest.mark.parametrize("budget", [5, 8, 64])
def test_in_chunks(model: Model, depth: int, length: int, budget: int) -> None:
    llm = make_llm(model, max_num_seqs=1, max_num_batched_tokens=budget)
    (output,) = llm.generate([PROMPT[:length]], params(depth))
    assert_right(model, output.prompt_logprobs, PROMPT[:length])
    assert list(output.token_ids) == model.reference.sequence(PROMPT[:length], 6)[length : length + 6]


@pytest.mark.parametrize("depth", DEPTHS)
def test_few_rows_go_through_the_head_at_once(model: Model, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "MAX_SCORED_ROWS", 3)
    for budget in (8, 64):
        (output,) = make_llm(model, max_num_seqs=1, max_num_batched_tokens=budget).generate([PROMPT], params(depth))
        assert_right(model, output.prompt_logprobs, PROMPT)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("num_shared", [3, 8, 13, 20])
def test_prefix_hits(model: Model, depth: int, budget: int, num_shared: int) -> None:
    """On a part of the prompt or on all of it; what was asked before asked for none or for them as well."""
    llm = make_llm(model, max_num_batched_tokens=budget)
    first = [*PROMPT[:num_shared], *[11] * 5]
    for earlier in (params(depth, prompt_logprobs=None), params(depth)):
        llm.reset_prefix_cache()
        llm.generate([first], earlier)
        for _ in range(2):
            (output,) = llm.generate([PROMPT], params(depth))
            assert_right(model, output.prompt_logprobs, PROMPT)
    assert (output.num_cached_tokens == 20) == (model.kind != "mistral")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_hit_costs_what_it_must(model: Model, depth: int) -> None:
    """Where h0 of every row is kept, rows are shared as ever; where it is not, without them they still are."""
    llm = make_llm(model)
    llm.generate([PROMPT], params(depth, prompt_logprobs=None))
    (plain,) = llm.generate([PROMPT], params(depth, prompt_logprobs=None))
    (scored,) = llm.generate([PROMPT], params(depth))
    assert plain.num_cached_tokens == 20
    assert scored.num_cached_tokens == (0 if model.kind == "mistral" else 20)
    assert plain.prompt_logprobs is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("is_reset", [False, True])
def test_preemption(model: Model, depth: int, num_steps: int, is_reset: bool) -> None:
    """In the middle of the prompt, and after it, when they are known and are not computed again."""
    llm = make_llm(model, max_num_seqs=1, max_num_batched_tokens=8)
    request = llm.engine.add_request("r", PROMPT, params(depth))
    for _ in range(num_steps):
        llm.engine.step()
    known = request.prompt_logprobs
    assert request.status is RequestStatus.RUNNING
    llm.engine.scheduler.preempt(request)
    if is_reset:
        llm.reset_prefix_cache()
    finish(llm)
    assert_right(model, request.prompt_logprobs, PROMPT)
    assert known is None or request.prompt_logprobs is known
    assert request.token_ids == model.reference.sequence(PROMPT, 6)[:26]


@pytest.mark.parametrize("depth", DEPTHS)
def test_many_at_once(model: Model, depth: int) -> None:
    """Beside requests that ask for none, with few blocks, so that they give way to each other."""
    llm = make_llm(model, num_blocks=17, max_num_batched_tokens=16)
    prompts = [PROMPT[start:] + PROMPT[:start] for start in range(6)]
    wanted = [params(depth, prompt_logprobs=None if index % 3 == 1 else NUM_TOP) for index in range(6)]
    for output, one in zip(llm.generate(prompts, wanted), wanted):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert_right(model, output.prompt_logprobs, output.prompt_token_ids)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1, 4, 19])
def test_the_prompt_alone(model: Model, depth: int, length: int) -> None:
    llm = make_llm(model)
    for _ in range(2):
        (output,) = llm.generate([PROMPT[:length]], params(depth, max_tokens=0, logprobs=1))
        assert (output.token_ids, output.logprobs, output.finish_reason) == ((), (), "length")
        assert_right(model, output.prompt_logprobs, PROMPT[:length])
    (whole,) = make_llm(model, max_model_len=20).generate([PROMPT], params(depth, max_tokens=0))
    assert_right(model, whole.prompt_logprobs, PROMPT)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo(model: Model, depth: int, max_tokens: int) -> None:
    """The prompt's own, as many as were asked for of the output; prompt_logprobs has a say of its own."""

    llm = make_llm(model)

    def wanted(**settings: Any) -> SamplingParams:
        return params(depth, **{"max_tokens": max_tokens, "prompt_logprobs": None, **settings})

    def found(**settings: Any) -> RequestOutput:
        return llm.generate([PROMPT], wanted(**settings))[0]

    assert found(echo=True).prompt_logprobs is None
    assert found(logprobs=2).prompt_logprobs is None
    echoed = found(echo=True, logprobs=2)
    assert_right(model, echoed.prompt_logprobs, PROMPT, num_top=2)
    assert echoed.logprobs is not None
    assert len(echoed.logprobs) == max_tokens
    assert_right(model, found(echo=True, logprobs=2, prompt_logprobs=1).prompt_logprobs, PROMPT, num_top=1)
    none = found(echo=True, logprobs=0).prompt_logprobs
    assert none is not None
    assert all(one is None or one.top == () for one in none)
    if llm.tokenizer is not None:
        assert echoed.text == str(llm.tokenizer.decode(PROMPT)) + found().text
        assert "".join(chunk.text for chunk in llm.stream(PROMPT, wanted(echo=True))) == echoed.text


@pytest.mark.parametrize("depth", DEPTHS)
def test_choices_have_one_prompt(model: Model, depth: int) -> None:
    llm = make_llm(model, max_num_batched_tokens=16)
    for _ in range(2):
        (output,) = llm.generate([PROMPT], params(depth, n=3, temperature=1.0, seed=1, logprobs=1))
        assert_right(model, output.prompt_logprobs, PROMPT)
        assert all(choice.logprobs is not None and len(choice.logprobs) == 6 for choice in output.choices)


@pytest.mark.parametrize("depth", DEPTHS)
def test_streams(model: Model, depth: int) -> None:
    llm = make_llm(model, max_num_batched_tokens=16)
    streams = [llm.stream(PROMPT[start:], params(depth, n=2)) for start in (0, 5)]
    for start, chunks in zip((0, 5), [list(stream) for stream in streams]):
        assert chunks[-1].output is not None
        assert_right(model, chunks[-1].output.prompt_logprobs, PROMPT[start:])


@pytest.mark.parametrize("depth", DEPTHS)
def test_options_leave_the_prompt_alone(model: Model, depth: int) -> None:
    llm = make_llm(model, logprobs_mode="processed")
    banned = params(depth, allowed_token_ids=[7, 8], logit_bias={7: 3.0}, temperature=0.5, top_k=1, seed=1)
    (output,) = llm.generate([PROMPT], banned)
    assert_right(model, output.prompt_logprobs, PROMPT)
