"""Penalties, bans, filters and draws at every drafted position: the same tokens as without drafts, or as likely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fake_replay import DEPTHS, LETTERS, PROMPT, START, assert_drained, seen, served, served_alike
from fake_model import FakeModel, Script, Table, at_positions, one_after_another, right, words_tokenizer
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.logits_processor import TokenHistory
from foredraft.outputs import RequestOutput

NEVER = -30.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sixteen")


def scores(*ranked: tuple[int, float], vocab_size: int = 16) -> Tensor:
    """Logits of the tokens named, others far below."""
    logits = torch.full((vocab_size,), NEVER)
    for token_id, logit in ranked:
        logits[token_id] = logit
    return logits


def by_index(*rows: Tensor, start: int = START) -> Table:
    """The logits of output token 0, 1, ...; the last ones for ever after."""
    return lambda token_id, position: rows[min(max(position + 1 - start, 0), len(rows) - 1)]


def outputs_at(index_to_token: Sequence[int], start: int = START) -> Script:
    """Drafts for output token 0, 1, ..."""
    return at_positions({start + index: token_id for index, token_id in enumerate(index_to_token)})


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [[0] * 40, [3, 0, 1, 2, *[0] * 36], [5] * 40])
def test_a_repetition_penalty_breaks_a_loop_where_it_would_without_drafts(path: Path, drafts: list[int]) -> None:
    """sgl-project/sglang#28180: alone, the target repeats token 0 for ever; drafts repeat it, lead on, or are wrong."""
    logits = scores((0, 4.0), (1, 3.7), (2, 3.4), (3, 3.1), (4, 2.8))  # divided by 1.3, token 0 is between 3 and 4
    fake = FakeModel(path, by_index(logits), outputs_at(drafts))
    assert served(fake, [9, 9], max_tokens=32).token_ids == (0,) * 32
    output = served_alike(fake, [9, 9], repetition_penalty=1.3, max_tokens=32)
    assert output.token_ids == (0, 1, 2, 3, *[0] * 28)
    assert served_alike(fake, [9, 0], repetition_penalty=1.3, max_tokens=8).token_ids == (1, 2, 3, *[0] * 5)


@pytest.mark.parametrize("rule", ["frequency_penalty", "presence_penalty"])
def test_a_drafted_row_is_penalised_for_what_is_before_it_and_never_for_a_rejected_draft(path: Path, rule: str) -> None:
    """gty111/gLLM#293: of the drafts `[A, A, B]` the second A is rejected for the first, and A is next best again."""
    first, a, b, c, d = 5, 1, 2, 3, 4
    once, again = scores((a, 0.5), (c, 0.0)), scores((a, 0.5), (d, 0.0))  # not A, if it was written before
    next_best = scores((a, 0.0), (b, -1.5))  # A after one penalty, B after two
    fake = FakeModel(
        path, by_index(scores((first, 0.0)), scores((a, 0.0)), once, again, next_best, scores((first, 0.0)))
    )
    for drafts in ([0, a, a, b], [0, a, c, d, a], [0, a, c, a, a], [0, a, a, a, a], [0, c, a, a]):
        fake.drafter.script = outputs_at(drafts)
        options: dict[str, Any] = {"max_tokens": 6, rule: 1.0}
        output = served_alike(fake, PROMPT, **options)
        assert output.token_ids == (first, a, c, d, a, first)


@pytest.mark.parametrize("drafts_are_sampled", [True, False])
def test_min_p_holds_at_every_row(path: Path, drafts_are_sampled: bool) -> None:
    """vllm-project/vllm#42802: peaked and flat rows side by side, drafts on both sides of the threshold."""
    peaked = scores((1, 3.0), (2, 2.5), (4, 2.8))  # 2.5 is 0.61 of the likeliest, 2.8 is 0.82
    flat = scores(*((token_id, 1.0 + 0.01 * token_id) for token_id in range(6, 11)), (11, 0.9))
    rows = [peaked, flat] * 20
    allowed = [{1}, {6, 7, 8, 9, 10}] * 20
    chosen = Counter[int]()
    spread = torch.full((16,), 1 / 16)

    def script(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        if drafts_are_sampled:
            return spread
        return [1, 7, 2, 11, 4, 8][(position - START) % 6]

    fake = FakeModel(path, by_index(*rows), script)
    for seed in range(4):
        for depth in (0, 3, 8):
            options: dict[str, Any] = {"temperature": 1.0, "min_p": 0.9, "seed": seed, "max_tokens": 24}
            output = served(fake, PROMPT, num_speculative_tokens=depth, **options)
            assert all(token_id in allowed[index] for index, token_id in enumerate(output.token_ids))
            chosen.update(output.token_ids)
    assert set(chosen) == {1, 6, 7, 8, 9, 10}


def test_bad_words_apply_to_their_own_request_only(path: Path) -> None:
    """vllm-project/vllm#31908: three requests with different numbers of drafts, of which one has bad words."""
    rows = [scores((1, 1.0), (2, 0.0)), scores((3, 1.0), (4, 0.0))] * 8
    fake = FakeModel(path, by_index(*rows), tokenizer=words_tokenizer(LETTERS))
    plain, single, pair = (1, 3) * 5, (1, 4) * 5, (1, 4) * 5
    for drafts in (plain, single, [1, 3, 1, 4, 2, 3] * 3):
        fake.drafter.script = outputs_at([*drafts, *drafts])
        for bad_words, expected in (([[3]], single), ([[1, 3]], pair), (["d"], single), ([[1]], (2, 3) * 5)):
            banning = SamplingParams(max_tokens=10, bad_words=bad_words)
            for place in range(3):
                params = [SamplingParams(max_tokens=10)] * 3
                params[place] = banning
                for depths in ((1, 8, 3), (0, 3, 8), (8, 0, 0)):
                    each = [replace(one, num_speculative_tokens=depth) for one, depth in zip(params, depths)]
                    outputs = fake.llm.generate([PROMPT, PROMPT, PROMPT], each)
                    wanted = [expected if one.bad_words else plain for one in each]
                    assert [output.token_ids for output in outputs] == wanted
    assert_drained(fake)


class Forcing:
    """Lets only one token follow after so many of the output."""

    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        if len(history.output_token_ids) == 10:
            logits[torch.arange(len(logits)) != 14] = -torch.inf
        return logits


class Counting:
    """The same rule, but it counts tokens by itself."""

    is_stateful = True

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        assert self.num_tokens == len(history.output_token_ids)
        if self.num_tokens == 10:
            logits[torch.arange(len(logits)) != 14] = -torch.inf
        return logits

    def advance(self, token_id: int) -> None:
        self.num_tokens += 1

    def clone(self) -> Counting:
        return Counting(self.num_tokens)


@pytest.mark.parametrize("processor", [Forcing(), Counting()])
@pytest.mark.parametrize("num_right", [8, 2, 0])
def test_a_caller_s_own_rule_runs_at_every_row(path: Path, processor: Forcing | Counting, num_right: int) -> None:
    """sgl-project/sglang#26330: output token 10 is forced: within a block, at its end, and after a rejection."""
    token_ids = [*range(12), *range(4)]
    table = one_after_another(token_ids, 16, START)
    expected = (*token_ids[:10], 14, *token_ids[11:])
    for script in (right(table, num_right), outputs_at(expected)):
        fake = FakeModel(path, table, script)
        output = served_alike(fake, PROMPT, (0, 1, 3, 4, 8), max_tokens=16, logits_processors=[processor])
        assert output.token_ids == expected


class Failing:
    """Raises once the output has four tokens."""

    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        if len(history.output_token_ids) == 4:
            raise ValueError("no more")
        return logits


@pytest.mark.parametrize("num_right", [8, 2, 0])
def test_a_rule_that_fails_within_a_block_keeps_the_tokens_before_it(path: Path, num_right: int) -> None:
    table = one_after_another(range(12), 16, START)
    fake = FakeModel(path, table, right(table, num_right), tokenizer=words_tokenizer(LETTERS))
    failing = served_alike(fake, PROMPT, max_tokens=9, logits_processors=[Failing()], logprobs=1)
    assert (failing.token_ids, failing.text, failing.finish_reason) == ((0, 1, 2, 3), "abcd", "error")
    params = SamplingParams(max_tokens=9, logits_processors=[Failing()], logprobs=1)
    first, second, third = fake.llm.generate([PROMPT] * 3, [SamplingParams(max_tokens=9, logprobs=1), params, params])
    assert first.token_ids == (*range(9),)
    assert seen(second) == seen(third) == seen(failing)


# -- greedy choices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_greedy_row_beside_sampled_ones_names_a_token_of_the_vocabulary(tmp_path: Path, depth: int) -> None:
    """vllm-project/vllm-ascend#16396: twelve tokens, 9 the likeliest; drafts are right (9) and wrong (3) in turn."""
    logits = torch.tensor([0.1 * ((7 * token_id) % 12) for token_id in range(12)])
    logits[9] = 2.0
    drafts = outputs_at([9, 3] * 20)
    others = logits.flip(0)  # after any other token: the neighbours' rows
    fake = FakeModel(tmp_path, lambda token_id, position: logits if token_id == 9 else others, drafts, vocab_size=12)
    greedy = SamplingParams(max_tokens=12, logprobs=3, num_speculative_tokens=depth)
    (alone,) = fake.llm.generate([PROMPT], greedy)
    assert alone.token_ids == (9,) * 12
    sampled = [
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, top_k=4),
        SamplingParams(max_tokens=12, temperature=0.7, seed=2, top_p=0.6),
    ]
    for place in range(3):
        params, prompts = [*sampled[:place], greedy, *sampled[place:]], [[1, 2]] * 3
        prompts[place] = PROMPT
        output = fake.llm.generate([*prompts], params)[place]
        assert seen(output) == seen(alone)
        assert output.token_depths == alone.token_depths
        assert bool(output.stats.num_accepted_tokens) == (depth > 0)
    assert_drained(fake)


@pytest.mark.parametrize("draft", [2, 5, 11])
def test_top_k_of_one_takes_the_lowest_of_equal_tokens(path: Path, draft: int) -> None:
    """NVIDIA/Megatron-LM#7061: with 50 seeds, alone and together, whichever of the equal ones was drafted."""
    fake = FakeModel(path, by_index(scores((2, 1.0), (5, 1.0), (11, 1.0))), at_positions({}, draft))
    params = [
        SamplingParams(max_tokens=5, temperature=1.0, top_k=1, seed=seed, num_speculative_tokens=seed % 4)
        for seed in range(50)
    ]
    others = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=1.0)]
    *together, _ = fake.llm.generate([PROMPT] * 52, [*params, *others])
    assert len(together) == 51
    alone = [fake.llm.generate([PROMPT], one)[0] for one in params[:8]]
    assert {output.token_ids for output in [*together, *alone]} == {(2,) * 5}
    assert_drained(fake)


@pytest.mark.parametrize("wrong", [[0], [1], [2], [0, 2], [1, 2], []])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_rejected_draft_is_replaced_at_once_and_leaves_no_row(path: Path, wrong: list[int], depth: int) -> None:
    """openvinotoolkit/openvino.genai#4190: the draft is wrong in the first, middle or last place of each block."""
    token_ids = [(5 * index) % 15 for index in range(30)]
    table = one_after_another(token_ids, 16, START)
    correct = right(table)

    def script(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        return 15 if depth in wrong else correct(request_id, position, depth, previous)

    fake = FakeModel(path, table, script)
    request = fake.engine.add_request("a", PROMPT, SamplingParams(max_tokens=30, num_speculative_tokens=depth))
    accepted = min([*wrong, depth])
    while fake.engine.has_unfinished:
        before = request.num_tokens
        fake.engine.step()
        assert request.output_token_ids == token_ids[: request.num_tokens - START]
        if request.finish_reason is None:
            assert request.num_computed_tokens == request.num_tokens - 1
            assert before == START or request.num_tokens - before in (accepted + 1, 30 + START - before)
        fake.engine.cache.check_integrity()
    assert request.output_token_ids == token_ids
    assert_drained(fake)


def test_full_acceptance_brings_the_bonus_token(path: Path) -> None:
    """ohdearquant/lattice#245: right drafts, K=2: nine tokens after the prefill's take three forwards."""
    table = one_after_another(range(10), 16, START)
    fake = FakeModel(path, table, right(table))
    (output,) = fake.llm.generate([PROMPT], SamplingParams(max_tokens=10, num_speculative_tokens=2))
    assert output.token_ids == (*range(10),)
    assert output.token_depths == (0, *(1, 2, 0) * 3)
    assert fake.engine.stats.num_steps == 4


# -- sampled choices --------------------------------------------------------------------------------------------------

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.1, 0.2, 0.3, 0.4])
NUM_REQUESTS, NUM_TOKENS = 40, 250


def sampled_outputs(path: Path, draft: Tensor | int, depth: int, **settings: Any) -> tuple[LLM, list[RequestOutput]]:
    """10000 tokens, each drawn from P by the rule."""
    fake = FakeModel(
        path,
        lambda token_id, position: P.log(),
        lambda request_id, position, place, previous: draft,
        vocab_size=4,
        num_modules=3,
        num_speculative_tokens=depth,
        max_num_seqs=NUM_REQUESTS,
        num_blocks=80 * NUM_REQUESTS,
        enable_prefix_caching=False,
        max_model_len=NUM_TOKENS + 2,
        **settings,
    )
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS) for seed in range(NUM_REQUESTS)]
    return fake.llm, fake.llm.generate([[0, 1]] * NUM_REQUESTS, params)


def p_value(counts: Sequence[int], probs: Tensor) -> float:
    expected = probs.double() / probs.double().sum() * sum(counts)
    return float(stats.chisquare(list(counts), expected.tolist()).pvalue)


def count(token_ids: Sequence[int]) -> list[int]:
    return [token_ids.count(token_id) for token_id in range(4)]


@pytest.mark.parametrize(("depth", "settings"), [(1, {}), (3, {}), (3, {"verification": "block"})])
def test_sampled_drafts_keep_the_distribution_of_the_target(
    tmp_path: Path, depth: int, settings: dict[str, Any]
) -> None:
    """ml-explore/mlx-swift-lm#459: drafts are drawn from Q; the tokens, and pairs of them, are distributed as P."""
    llm, outputs = sampled_outputs(tmp_path, Q, depth, **settings)
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    assert p_value(count(tokens), P) > 1e-3
    pairs = [
        first * 4 + second for output in outputs for first, second in zip(output.token_ids[::2], output.token_ids[1::2])
    ]
    assert p_value([pairs.count(pair) for pair in range(16)], torch.outer(P, P).flatten()) > 1e-3
    drafted = [token_id for output in outputs for token_id, at in zip(output.token_ids, output.token_depths) if at]
    assert p_value(count(drafted), P) < 1e-6  # those alone are not: the test can tell
    rate, expected = llm.stats.speculation.accepted_rates[0], float(torch.minimum(P, Q).sum())
    assert abs(rate - expected) < 0.02 or (settings and rate > expected)


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
@pytest.mark.parametrize("draft", [0, 2])
def test_a_draft_without_chance_is_accepted_as_often_as_the_target_draws_it(
    tmp_path: Path, mode: str, draft: int
) -> None:
    """huggingface/transformers#33534: a point mass at x is accepted with p(x), and what replaces it is never x."""
    llm, outputs = sampled_outputs(tmp_path, draft, 1, draft_sampling=mode)
    assert p_value(count([token_id for output in outputs for token_id in output.token_ids]), P) > 1e-3
    assert abs(llm.stats.speculation.accepted_rates[0] - float(P[draft])) < 0.02
    replaced = [
        token_id
        for output in outputs
        for token_id, at, before in zip(output.token_ids[1:-1], output.token_depths[1:], output.token_depths)
        if at == before == 0  # with K=1 a token of the target's own follows another one after a rejection only
    ]
    assert draft not in replaced
    others = [token_id for token_id in range(4) if token_id != draft]
    assert p_value([replaced.count(token_id) for token_id in others], P[others]) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0])
def test_drafts_from_the_targets_own_distribution_are_accepted_at_any_temperature(
    path: Path, temperature: float
) -> None:
    """jundot/omlx#3370: all of them; without chance, as often as the target draws its likeliest token."""
    logits = scores(*((token_id, 0.3 * ((5 * token_id) % 16)) for token_id in range(16)))
    own = (logits / (temperature or 1e-3)).softmax(-1)
    best = int(logits.argmax())
    for draft, expected in ((own, 1.0), (best, float(own[best]))):
        fake = FakeModel(path, by_index(logits), lambda *args, draft=draft: draft, num_speculative_tokens=3)
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=101) for seed in range(8)]
        fake.llm.generate([PROMPT] * 8, params)
        rates = fake.engine.stats.speculation.conditional_rates
        assert fake.engine.stats.speculation.num_drafts >= 8 * 25
        assert rates == pytest.approx([expected] * 3, abs=0 if expected == 1.0 else 0.15)
        assert min(rates) > 0


# -- real weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts_are_right", [True, False])
def test_two_hundred_tokens_are_the_same_at_any_depth(path: Path, drafts_are_right: bool) -> None:
    """lablup/mlxcel#1201, lablup/mlxcel#1191: in float32 no number of rows in a forward turns a choice."""
    fake = FakeModel(path, by_index(scores((0, 0.0))))
    fake.target.table = None
    params = SamplingParams(max_tokens=200, num_speculative_tokens=0)
    for prompt in [[3, 1, 4], [5]] if drafts_are_right else [[9, 2, 6, 5, 3, 5, 8]]:
        (plain,) = fake.llm.generate([prompt], params)
        assert len(plain.token_ids) == 200
        if drafts_are_right:
            fake.drafter.script = outputs_at([*plain.token_ids, *range(8)], len(prompt))
        for depth in range(1, 9):
            fake.llm.reset_prefix_cache()
            (output,) = fake.llm.generate([prompt], replace(params, num_speculative_tokens=depth))
            assert output.token_ids == plain.token_ids
            assert not drafts_are_right or output.stats.num_cycles <= 1 + -(-199 // (depth + 1))


def test_the_first_token_is_the_same_with_drafts(path: Path) -> None:
    """ml-explore/mlx-lm#1109: prompts of 1 to 33 tokens; the first token, and how likely it is."""
    fake = FakeModel(path, by_index(scores((0, 0.0))))
    fake.target.table = None
    for length in range(1, 34):
        prompt = [(7 * index + length) % 16 for index in range(length)]
        found = []
        for depth in DEPTHS:
            fake.llm.reset_prefix_cache()
            params = SamplingParams(max_tokens=2, logprobs=16, num_speculative_tokens=depth)
            (output,) = fake.llm.generate([prompt], params)
            assert output.logprobs is not None
            found.append(output.logprobs[0])
        assert len({logprob.token_id for logprob in found}) == 1
        assert [logprob.logprob for logprob in found] == pytest.approx([found[0].logprob] * 4, abs=1e-5)
