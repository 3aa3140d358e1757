"""Log-probabilities of tokens and prompts: the target's own, one for each token, whatever was drafted or cached."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fake_replay import DEPTHS, LETTERS, PROMPT, assert_drained, seen, served, served_alike
from fake_model import FakeModel, Table, one_after_another, right, words_tokenizer
from reference import Reference
from torch import Tensor

from foredraft import SamplingParams
from foredraft.logprobs import TokenLogprob


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sixteen")


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    """The real model behind the fake one."""
    real(path)
    return Reference(path)


def uneven(token_id: int, position: int) -> Tensor:
    """Logits of which all are different, at every place and after every token."""
    generator = torch.Generator().manual_seed(16 * position + token_id)
    return 2 * torch.randn(16, generator=generator)


def fake_of(path: Path, table: Table = uneven, num_right: int = 8, **settings: Any) -> FakeModel:
    return FakeModel(path, table, right(table, num_right), tokenizer=words_tokenizer(LETTERS), **settings)


def real(path: Path, **settings: Any) -> FakeModel:
    """The tiny model itself, with its own drafts."""
    fake = FakeModel(path, uneven, tokenizer=words_tokenizer(LETTERS), **settings)
    fake.target.table = None
    return fake


def assert_is(found: TokenLogprob, token_id: int, logits: Tensor, num_top: int, bound: float = 1e-5) -> None:
    """Chosen token, its place among all, and the likeliest ones, from the target's logits at that place."""
    expected = logits.double().log_softmax(-1)
    best = expected.argsort(descending=True)
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(float(expected[token_id]), abs=bound)
    assert found.rank == best.tolist().index(token_id) + 1
    assert [alternative for alternative, _ in found.top] == best[:num_top].tolist()
    assert [value for _, value in found.top] == pytest.approx(expected[best[:num_top]].tolist(), abs=bound)


def assert_all(found: Sequence[TokenLogprob] | None, prompt: Sequence[int], table: Table, num_top: int) -> None:
    """Each is that of the table at its own place, after the token before it."""
    assert found is not None
    previous = [prompt[-1], *(logprob.token_id for logprob in found)]
    for index, logprob in enumerate(found):
        assert_is(logprob, logprob.token_id, table(previous[index], len(prompt) + index - 1), num_top)


def assert_scored(
    found: Sequence[TokenLogprob | None] | None, prompt: Sequence[int], reference: Reference, num_top: int
) -> None:
    """One for every token of the prompt but the first, those of the real model over the whole prompt."""
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for logprob, token_id, logits in zip(found[1:], prompt[1:], reference.logits(prompt), strict=False):
        assert logprob is not None
        assert_is(logprob, token_id, logits, num_top, 1e-4)


# -- generated tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [8, 2, 0])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.5, "min_tokens": 9}])
def test_every_token_has_the_target_s_own_logprob(path: Path, num_right: int, options: dict[str, Any]) -> None:
    """ggml-org/llama.cpp#27196, vllm-project/vllm#17876: ten tokens; drafts have no probabilities of their own."""
    fake = fake_of(path, num_right=num_right, draft_sampling="greedy")
    output = served_alike(fake, PROMPT, max_tokens=10, logprobs=3, **options)
    assert_all(output.logprobs, PROMPT, uneven, 3)
    if not options:
        assert bool(output.stats.num_accepted_tokens) == (num_right > 0)


def test_drafts_with_probabilities_of_their_own_change_no_logprob(path: Path) -> None:
    """vllm-project/vllm#17876 again: what drafts were drawn from is not what is returned."""
    fake = fake_of(path)
    fake.drafter.script = lambda request_id, position, depth, previous: (uneven(previous, position - 1) / 3).softmax(-1)
    for depth, seed in itertools.product(DEPTHS, range(3)):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "num_speculative_tokens": depth}
        assert_all(served(fake, PROMPT, max_tokens=16, logprobs=4, **options).logprobs, PROMPT, uneven, 4)


@pytest.mark.parametrize("num_right", [8, 1])
def test_processed_logprobs_are_those_after_rules_at_every_row(path: Path, num_right: int) -> None:
    """ggml-org/llama.cpp#27196 again, with the engine's other setting."""
    fake = fake_of(path, num_right=num_right, draft_sampling="greedy", logprobs_mode="processed")
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "top_k": 4, "presence_penalty": 0.5}
    output = served_alike(fake, PROMPT, max_tokens=10, logprobs=16, **options)
    assert output.logprobs is not None
    for logprob in output.logprobs:
        assert len(logprob.top) == 4
        assert sum(torch.tensor([value for _, value in logprob.top]).exp().tolist()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_of_different_lengths_have_one_logprob_a_token(path: Path, depth: int) -> None:
    """vllm-project/tpu-inference#2799: lengths 2, 5 and 9 in one batch, beside one that wants none."""
    fake = fake_of(path)
    lengths, wanted = [2, 5, 9, 7], [1, 0, 5, None]
    for num_right in (8, 1):
        fake.drafter.script = right(uneven, num_right)
        params = [
            SamplingParams(max_tokens=length, logprobs=count, num_speculative_tokens=depth)
            for length, count in zip(lengths, wanted)
        ]
        prompts = [PROMPT, [1], [2, 3, 4], PROMPT]
        outputs = fake.llm.generate([*prompts], params)
        for output, prompt, length, one in zip(outputs, prompts, lengths, params):
            assert len(output.token_ids) == length
            assert seen(fake.llm.generate([prompt], one)[0]) == seen(output)
            if one.logprobs is None:
                assert output.logprobs is None
            else:
                assert output.logprobs is not None
                assert len(output.logprobs) == length
                assert_all(output.logprobs, prompt, uneven, one.logprobs)
    assert_drained(fake)


def test_tokens_of_one_chunk_have_alternatives_of_their_own(path: Path) -> None:
    """sgl-project/sglang#39260: three accepted drafts and a bonus in a chunk, two alternatives each."""
    fake = fake_of(path)
    params = SamplingParams(max_tokens=13, logprobs=2, num_speculative_tokens=3)
    (whole,) = fake.llm.generate([PROMPT], params)
    chunks = list(fake.llm.stream(PROMPT, params))
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 4, 4]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [*(whole.logprobs or ())]
    for chunk in chunks[1:]:
        assert len({logprob.top for logprob in chunk.logprobs}) == 4
    assert_all(whole.logprobs, PROMPT, uneven, 2)


def test_no_alternatives_is_not_no_logprobs(path: Path) -> None:
    """xorbitsai/inference#5270: logprobs=0 gives the chosen token's own, without others beside it."""
    output = served_alike(fake_of(path), PROMPT, max_tokens=6, logprobs=0, prompt_logprobs=0)
    assert_all(output.logprobs, PROMPT, uneven, 0)
    assert all(logprob.top == () for logprob in output.logprobs or ())
    assert output.prompt_logprobs is not None
    assert [logprob.top for logprob in output.prompt_logprobs if logprob is not None] == [()]
    assert served(fake_of(path), PROMPT, max_tokens=6).logprobs is None


# -- prompts ----------------------------------------------------------------------------------------------------------


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(16, (length,), generator=generator).tolist()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("budget", [9, 13, 1024])
def test_prompt_logprobs_are_right_across_chunks(path: Path, reference: Reference, depth: int, budget: int) -> None:
    """vllm-project/vllm#53488: real weights, prompts around three chunks, the borders between them included."""
    fake = real(path, num_speculative_tokens=depth, max_num_seqs=1, max_num_batched_tokens=budget)
    for length in (1, 2, 9, 26, 27, 28, 40):
        prompt = prompt_of(length)
        output = served(fake, prompt, max_tokens=1, prompt_logprobs=2, logprobs=2)
        assert_scored(output.prompt_logprobs, prompt, reference, 2)
        assert output.logprobs is not None
        assert_is(output.logprobs[0], output.token_ids[0], reference.logits(prompt)[-1], 2, 1e-4)


@pytest.mark.parametrize("depth", [0, 3, 8])
@pytest.mark.parametrize("budget", [18, 1024])
def test_prompt_logprobs_are_right_after_a_hit(path: Path, reference: Reference, depth: int, budget: int) -> None:
    """vllm-project/vllm#3251, vllm-project/vllm#8268, vllm-project/vllm#42245: the same prompt twice, then one that
    shares two blocks with it, alone and in a batch."""
    fake = real(path, num_speculative_tokens=depth, max_num_seqs=2, max_num_batched_tokens=budget)
    first = prompt_of(15)
    longer = [*first[:8], *prompt_of(14, 1)]
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=1)
    cold = [served(fake, prompt, max_tokens=3, prompt_logprobs=1, logprobs=1) for prompt in (first, longer)]
    fake.llm.reset_prefix_cache()
    for prompt, expected in ((first, cold[0]), (first, cold[0]), (longer, cold[1]), (first, cold[0])):
        (output,) = fake.llm.generate([prompt], params)
        assert output.token_ids == expected.token_ids
        assert_scored(output.prompt_logprobs, prompt, reference, 1)
    for output, expected in zip(fake.llm.generate([first, longer, first], params), [*cold, cold[0]]):
        assert output.token_ids == expected.token_ids
        assert_scored(output.prompt_logprobs, output.prompt_token_ids, reference, 1)
    unscored = fake.llm.generate([first], SamplingParams(max_tokens=3))[0]
    assert unscored.num_cached_tokens > 0
    assert unscored.prompt_logprobs is None
    assert_drained(fake)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_with_logprobs_scores_the_prompt(path: Path, reference: Reference, max_tokens: int) -> None:
    """ggml-org/llama.cpp#27174: an entry for every prompt token, of which the first has none, and for each new one."""
    prompt = prompt_of(11)
    fake = real(path)
    for depth in DEPTHS:
        output = served(fake, prompt, echo=True, logprobs=1, max_tokens=max_tokens, num_speculative_tokens=depth)
        assert_scored(output.prompt_logprobs, prompt, reference, 1)
        assert output.logprobs is not None
        assert (len(output.logprobs), output.finish_reason) == (max_tokens, "length")
        assert output.text == "".join(LETTERS[token_id] for token_id in [*prompt, *output.token_ids])


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("stop", [(), "no"])
def test_echo_logprobs_and_stream_go_together(path: Path, echo: bool, logprobs: int | None, stop: Any) -> None:
    """vllm-project/vllm#1992: all combinations; `served` compares the stream. Stops are not looked for in the echo."""
    table = one_after_another([0, 1, 2, 13, 14, 3, 4, 5], 16, 4)
    fake = fake_of(path, table)
    for prompt in ([13, 14, 13, 14], "nono"):
        output = served_alike(fake, prompt, echo=echo, logprobs=logprobs, stop=stop, max_tokens=8)
        text = "abc" if stop else "abcnodef"
        assert output.text == ("nono" if echo else "") + text
        assert len(output.token_ids) == (5 if stop else 8)
        assert (output.logprobs is None) == (logprobs is None)
        assert (output.prompt_logprobs is None) == (logprobs is None or not echo)
        if logprobs is not None:
            assert_all(output.logprobs, [13, 14, 13, 14], table, logprobs)


def test_every_choice_is_echoed_and_the_prompt_scored_once(path: Path) -> None:
    """vllm-project/vllm#1992 again, with several choices."""
    fake = fake_of(path, draft_sampling="greedy")
    output = served_alike(fake, PROMPT, n=3, seed=1, temperature=1.0, echo=True, logprobs=1, max_tokens=6)
    assert all(choice.text.startswith("ij") for choice in output.choices)
    assert output.prompt_logprobs is not None
    assert [logprob is None for logprob in output.prompt_logprobs] == [True, False]
    for choice in output.choices:
        assert_all(choice.logprobs, PROMPT, uneven, 1)
