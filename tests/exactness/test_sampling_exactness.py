"""Options at every drafted position: with drafts, whatever they are, a request says what it would without.

Greedy requests say exactly that; of sampled ones the distribution of whole outputs is compared with one found by
enumeration. The target is a table, the drafts are scripted; everything between them is real.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import exact_distribution
from exactness.exact_distribution import (
    ALIKE,
    BIASED,
    Rows,
    TableDrafts,
    Waves,
    assert_alike,
    assert_likeliest,
    distribution,
    p_value,
    random_rows,
    requests,
)
from fake_model import FakeModel, Script, Table, words_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft import RequestOutput, SamplingParams
from foredraft.sampling.token_counts import CountRows, TokenCounts
from foredraft.speculation import verifier
from foredraft.statistics import SpeculationStats

EOS = 1
WORDS = ["a", "b", "c", "ab", "ba", "d", "aab", "e", "cab", "f", "g", "h", "i", "j", "k", "l"]
MAX_DRAFTS = 8
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0, "max_num_seqs": 1, "enable_prefix_caching": False},
    "roomy": {"num_speculative_tokens": 8},
    "crowded": {"num_speculative_tokens": 8, "max_num_seqs": 4, "max_num_batched_tokens": 36, "num_blocks": 12},
    "narrow": {"num_speculative_tokens": 2, "max_num_seqs": 4, "max_num_batched_tokens": 12, "num_blocks": 12},
    "lossy": {"num_speculative_tokens": 8, "verification": "lossy-typical"},
}


@cache
def model(kind: str, vocab_size: int) -> FakeModel:
    """Built once; its table and script are each test's own."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = words_tokenizer(WORDS[:vocab_size])
        config = {"max_model_len": 40, **ENGINES[kind]}
        return FakeModel(
            Path(directory),
            lambda token_id, position: torch.zeros(vocab_size),
            vocab_size=vocab_size,
            eos_token_ids=[EOS],
            tokenizer=tokenizer,
            **config,
        )


def table_of(rows: Rows) -> Table:
    tensors = [torch.tensor(row) for row in rows]
    return lambda token_id, position: tensors[token_id]


def assert_drained(model: FakeModel) -> None:
    cache = model.engine.cache
    assert not model.engine.has_unfinished
    cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in cache.pools)


# -- greedy requests are as without drafts -----------------------------------------------------------------------------


def scripted(kind: str, rows: Rows, seed: int, known: Callable[[str], Sequence[int]]) -> Script:
    """Drafts of a kind; `known`: from a request's id to the tokens that it has without drafts."""
    vocab_size = len(rows)

    def script(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        chance = random.Random(seed * 1_000_003 + position * 31 + depth)
        chosen = chance.choice(["right", "right", "wrong", "random", "sampled"]) if kind == "any" else kind
        if chosen == "deep":  # right up to a depth that the cycle chooses
            chosen = "right" if depth < random.Random(seed + position - depth).randrange(MAX_DRAFTS + 1) else "wrong"
        if chosen == "sampled":
            return torch.tensor(rows[previous]).softmax(0)
        token_ids = known(request_id)
        if chosen == "random" or position >= len(token_ids):
            return chance.randrange(vocab_size)
        return (token_ids[position] + (chosen == "wrong")) % vocab_size

    return script


def serve_plainly(model: FakeModel, rows: Rows, prompt: list[int], params: SamplingParams) -> RequestOutput:
    model.target.table = table_of(rows)
    plain = SamplingParams(**{**vars(params), "num_speculative_tokens": 0})
    (output,) = model.llm.generate([prompt], [plain])
    assert_drained(model)
    return output


def assert_streamed_alike(model: FakeModel, prompt: list[int], params: SamplingParams, wanted: RequestOutput) -> None:
    chunks = list(model.llm.stream(prompt, params))
    assert chunks[-1].output is not None
    assert_alike(chunks[-1].output, wanted)
    for choice in chunks[-1].output.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert tuple(token_id for chunk in own for token_id in chunk.token_ids) == choice.token_ids
        assert tuple(logprob for chunk in own for logprob in chunk.logprobs) == (choice.logprobs or ())
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == [choice.finish_reason]


def check_greedy(
    kind: str, rows: Rows, batch: Sequence[tuple[list[int], SamplingParams]], drafts: str, seed: int
) -> Iterator[str]:
    """Compare a batch, and the same once more, and each of it streamed, with each alone without drafts. Returns what
    has happened on the way."""
    vocab_size = len(rows)
    plain, drafting = model("plain", vocab_size), model(kind, vocab_size)
    expected = [serve_plainly(plain, rows, *request) for request in batch]
    for output, (_, params) in zip(expected, batch):
        assert_likeliest(output, rows, params, EOS)

    def known(request_id: str) -> Sequence[int]:
        (request,) = (r for r in drafting.engine.scheduler.requests() if r.request_id == request_id)
        for output, (_, params) in zip(expected, batch):
            if request.params is params:
                return (*output.prompt_token_ids, *output.token_ids)
        return ()

    drafting.llm.reset_prefix_cache()
    drafting.llm.reset_stats()
    drafting.target.table, drafting.drafter.script = table_of(rows), scripted(drafts, rows, seed, known)
    prompts, options = [prompt for prompt, _ in batch], [one for _, one in batch]
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, repetition_penalty=1.2)
    for _ in range(2):
        outputs = drafting.llm.generate([*prompts, prompts[0]], [*options, sampled])
        for output, wanted in zip(outputs, expected):
            assert_alike(output, wanted)
        assert_drained(drafting)
    for prompt, one, wanted in zip(prompts, options, expected):
        assert_streamed_alike(drafting, prompt, one, wanted)
    assert_drained(drafting)
    choices = [choice for output in expected for choice in output.choices]
    yield from (choice.finish_reason for choice in choices)
    yield from {error.split()[0] for choice in choices if (error := choice.error)}
    counts = {"preempted": drafting.engine.stats.num_preemptions, "hit": drafting.engine.stats.num_cached_tokens}
    yield from (name for name, count in counts.items() if count)
    yield from (f"accepted {depth}" for depth, n in enumerate(drafting.llm.stats.speculation.accepted_by_depth) if n)


def test_greedy_requests_are_as_without_drafts_whatever_they_ask_and_whatever_is_drafted() -> None:
    happened: set[str] = set()

    @settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), vocab_size=st.sampled_from([6, 11, 16]), seed=st.integers(0, 999), ties=st.booleans())
    def check(data: st.DataObject, vocab_size: int, seed: int, ties: bool) -> None:
        batch = data.draw(st.lists(requests(vocab_size), min_size=1, max_size=4))
        kind = data.draw(st.sampled_from(["roomy", "crowded", "narrow"]))
        drafts = data.draw(st.sampled_from(["any", "deep", "right", "wrong", "random", "sampled"]))
        happened.update(check_greedy(kind, random_rows(vocab_size, seed, ties=ties), batch, drafts, seed))

    check()
    long = [([index], SamplingParams(max_tokens=30, ignore_eos=True, **PENALTIES)) for index in range(4)]
    happened.update(check_greedy("crowded", random_rows(16, seed=0), long, "deep", seed=0))
    happened.update(check_greedy("roomy", random_rows(16, seed=0), long[:1], "right", seed=0))
    assert happened >= {"stop", "length", "error", "preempted", "hit", "accepted 7"}


@pytest.mark.parametrize(("temperature", "draft"), [(0.0, None), (0.0, 0), (1.0, 5)])
@pytest.mark.parametrize("draft_sampling", ["probabilistic", "greedy"])
def test_no_draft_is_accepted_where_no_token_is_left(
    draft_sampling: str, temperature: float, draft: int | None
) -> None:
    """draft None: what the modules draft under the rules."""
    model = sampling_model(6, draft_sampling=draft_sampling)
    model.target.table = table_of(random_rows(6, seed=0))
    model.drafter.script = None if draft is None else lambda request_id, position, depth, previous: draft
    dead_end: dict[str, Any] = {"allowed_token_ids": [2, 3], "bad_words": [[2, 2], [2, 3], [3, 2], [3, 3]]}
    for depth in range(4):
        params = SamplingParams(max_tokens=6, temperature=temperature, seed=0, num_speculative_tokens=depth, **dead_end)
        (choice,) = model.llm.generate([[1]], [params])[0].choices
        assert (len(choice.token_ids), choice.finish_reason) == (1, "error")
        assert choice.error == "the request's options leave no token at position 2"


# -- sampled requests are distributed as without drafts ----------------------------------------------------------------


FEW = (0, 2)
DRAFTS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "close": lambda row: [0.7 * logit for logit in row],
    "bad": lambda row: [-logit for logit in row],
    "others": lambda row: [-math.inf if token_id in FEW else 0.0 for token_id in range(len(row))],
    "one_hot": lambda row: [0.0 if logit == sorted(row)[-2] else -math.inf for logit in row],
}

NUM_SEEDS = 2048
REAL_COUNTS = TokenCounts.rows
PROMPT = [2, 0, 2]
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.4}
ODD_PENALTIES: dict[str, Any] = {"repetition_penalty": 0.6, "presence_penalty": -0.5, "frequency_penalty": 0.9}
BANS = {"bad_words": [[2, 0], [0, 1, 2], [2, 2, 2]], "logit_bias": {0: 0.8}, "logits_processors": [Waves()]}
FILTERS = {"top_k": 4, "top_p": 0.93, "min_p": 0.08, "typical_p": 0.85}
ENDS = {"ignore_eos": False, "min_tokens": 2, "stop_token_ids": [2], "temperature": 1.4}

# Vocabulary, most tokens, K, drafts, options.
CASES: dict[str, tuple[int, int, int, str, Mapping[str, Any]]] = {
    "no_options_1": (4, 4, 1, "close", {}),
    "no_options_2": (3, 5, 2, "bad", {}),
    "no_options_3": (3, 5, 3, "close", {}),
    "own_modules": (3, 5, 3, "modules", {"temperature": 2.0, **PENALTIES}),
    "penalties": (3, 5, 3, "close", PENALTIES),
    "odd_penalties_bad_drafts": (4, 4, 2, "bad", ODD_PENALTIES),
    "bans": (4, 4, 2, "close", BANS),
    "bans_certain_drafts": (3, 5, 3, "one_hot", BANS),
    "nothing_in_common": (4, 5, 3, "others", {"allowed_token_ids": FEW}),
    "allowed_penalties": (5, 5, 3, "close", {"allowed_token_ids": [0, 2, 4], **PENALTIES}),
    "ends": (3, 5, 3, "close", ENDS),
    "ends_own_modules": (4, 4, 2, "modules", ENDS),
    "filters": (5, 4, 2, "close", {**FILTERS, "temperature": 1.3}),
    "filters_ties": (5, 4, 2, "close", {"top_k": 4, "top_p": 0.9, "typical_p": 0.9, "temperature": 2.0}),
    "typical_penalties": (5, 4, 3, "close", {"typical_p": 0.7, "top_k": 4, **ODD_PENALTIES}),
    "nucleus_certain_drafts": (4, 5, 3, "one_hot", {"top_p": 0.8, "frequency_penalty": 0.5}),
    "coins": (2, 7, 2, "bad", {}),
}


@cache
def sampling_model(vocab_size: int, **settings: Any) -> FakeModel:
    size = {"max_num_seqs": 512, "max_num_batched_tokens": 2048, "num_blocks": 2048}
    config = {"num_speculative_tokens": 3, **size, **settings}
    with tempfile.TemporaryDirectory() as directory:
        return FakeModel(Path(directory), table_of([]), vocab_size=vocab_size, eos_token_ids=[EOS], **config)


def sampled_case(patch: pytest.MonkeyPatch, name: str, **settings: Any) -> tuple[float, SpeculationStats]:
    """The p-value of what many seeds say, and how their drafts fared."""
    vocab_size, max_tokens, depth, drafts, options = CASES[name]
    rows = random_rows(vocab_size, seed=vocab_size + max_tokens, ties=name.endswith("ties"))
    rows = [[0.0, math.log(2)]] * 2 if name == "coins" else rows
    prompt = [token_id % vocab_size for token_id in PROMPT]
    model = sampling_model(vocab_size, **settings)
    model.target.table, model.drafter.script = table_of(rows), None
    if drafts != "modules":
        model.drafter.script = lambda request_id, position, depth, previous: 0  # in place of what rules propose
        patch.setattr(model.drafter, "choose", TableDrafts([DRAFTS[drafts](row) for row in rows]).choose)
    model.llm.reset_stats()
    wanted = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "num_speculative_tokens": depth}
    params = [SamplingParams(**{**wanted, **options}, seed=seed) for seed in range(NUM_SEEDS)]
    outputs = model.llm.generate([prompt] * NUM_SEEDS, params)
    assert_drained(model)
    p = p_value((output.token_ids for output in outputs), distribution(rows, prompt, params[0], [EOS]))
    return p, model.llm.stats.speculation


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_distributed_as_without_drafts(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    p, speculation = sampled_case(monkeypatch, name, verification=method)
    assert p > ALIKE
    assert (speculation.num_accepted_tokens > 0) == (name != "nothing_in_common")
    assert speculation.num_accepted_tokens < speculation.num_drafted_tokens


@pytest.mark.parametrize("name", ["no_options_3", "own_modules", "bans_certain_drafts", "typical_penalties"])
def test_outputs_are_distributed_as_without_greedy_drafts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    p, speculation = sampled_case(monkeypatch, name, draft_sampling="greedy")
    assert p > ALIKE
    assert 0 < speculation.num_accepted_tokens < speculation.num_drafted_tokens


def reused_keys(positions: Tensor, depths: Tensor | int) -> Tensor:
    return positions + depths


def no_residual(share: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    return target_probs.double()


def counts_with_own_draft(self: TokenCounts, draft_token_ids: Sequence[int], first: int = 0) -> CountRows:
    counts = REAL_COUNTS(self, draft_token_ids, first)
    rows = [min(row + 1, len(counts.is_seen) - 1) for row in range(len(counts.is_seen))]
    return CountRows(counts.ids, counts.num_written[rows], counts.is_seen[rows])


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("fault", ["residual", "counts", "keys", "lossy"])
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str, method: str) -> None:
    names = {"residual": "no_options_2", "counts": "odd_penalties_bad_drafts", "keys": "coins", "lossy": "coins"}
    if fault == "residual":
        monkeypatch.setattr(verifier, "_residual", no_residual)
    elif fault == "counts":
        monkeypatch.setattr(TokenCounts, "rows", counts_with_own_draft)
    elif fault == "keys":
        monkeypatch.setattr(verifier, "cycle_keys", reused_keys)
        monkeypatch.setattr(exact_distribution, "cycle_keys", reused_keys)
    p, _ = sampled_case(monkeypatch, names[fault], verification="lossy-typical" if fault == "lossy" else method)
    if (fault, method) == ("keys", "rejection"):  # which may use them again
        assert p > ALIKE
    else:
        assert p < BIASED


# -- seeds -------------------------------------------------------------------------------------------------------------

COMPANY = [
    ([1, 2, 3], SamplingParams(max_tokens=14, temperature=0.8, seed=5, frequency_penalty=0.4)),
    ([4] * 11, SamplingParams(max_tokens=16, logit_bias={3: 1.0})),
    ([5, 2], SamplingParams(max_tokens=9, temperature=1.2, seed=1, num_speculative_tokens=0)),
]
LONG_PROMPT = [2, 0, 2, 5, 3, 1, 4, 0, 2]
METHODS = [{"verification": "rejection"}, {"verification": "block"}, {"draft_sampling": "greedy"}]


def seeded(seed: int = 0, **options: Any) -> SamplingParams:
    rules: dict[str, Any] = {"temperature": 1.1, "top_p": 0.95, "bad_words": [[2, 0]], "ignore_eos": True, **PENALTIES}
    return SamplingParams(max_tokens=14, seed=seed, **{**rules, **options})


def generate(model: FakeModel, params: SamplingParams, *, company: bool = False, reset: bool = True) -> RequestOutput:
    if reset:
        model.llm.reset_prefix_cache()
    requests = [*COMPANY, (LONG_PROMPT, params)] if company else [(LONG_PROMPT, params)]
    outputs = model.llm.generate([prompt for prompt, _ in requests], [one for _, one in requests])
    assert_drained(model)
    return outputs[-1]


def seed_models(method: Mapping[str, Any], drafts: str) -> tuple[FakeModel, FakeModel]:
    """One with room for all, and one where requests of a company are preempted and prompts are run in chunks."""
    tight = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 11, "max_model_len": 40}
    models = sampling_model(6, **method), sampling_model(6, **method, **tight)
    rows = random_rows(6, seed=3)
    for model in models:
        model.llm.reset_stats()
        model.target.table = table_of(rows)
        model.drafter.script = scripted("sampled", rows, 0, lambda _: ()) if drafts == "scripted" else None
    return models


@pytest.mark.parametrize("drafts", ["scripted", "modules"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: "".join(method.values()))
def test_a_seed_gives_the_same_tokens_whatever_happens(method: Mapping[str, Any], drafts: str) -> None:
    roomy, tight = seed_models(method, drafts)
    any_depth: set[tuple[int, ...]] = set()
    for seed, depth in ((seed, depth) for seed in (0, 2**63 - 1) for depth in range(4)):
        params = seeded(seed, num_speculative_tokens=depth)
        alone = generate(roomy, params)
        again = generate(roomy, params, reset=False)
        assert again.num_cached_tokens > 0
        others = [generate(roomy, params, company=True), generate(tight, params), generate(tight, params, company=True)]
        assert {output.token_ids for output in (again, *others)} == {alone.token_ids}
        any_depth.add(alone.token_ids)
    assert tight.llm.stats.num_preemptions > 0
    assert roomy.llm.stats.speculation.num_accepted_tokens > 0
    assert len(any_depth) == 2 or "verification" in method  # greedy drafts leave even the depth without a say


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "".join(method.values()))
def test_choices_differ_and_come_again(method: Mapping[str, Any]) -> None:
    roomy, tight = seed_models(method, "modules")
    said = [choice.token_ids for choice in generate(roomy, seeded(n=4)).choices]
    assert len(set(said)) == 4
    assert said[0] == generate(roomy, seeded()).token_ids
    for output in (generate(roomy, seeded(n=4), company=True), generate(tight, seeded(n=4), company=True)):
        assert [choice.token_ids for choice in output.choices] == said
    assert [choice.token_ids for choice in generate(tight, seeded(n=2)).choices] == said[:2]


# -- a lossy method ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_greedy_requests_are_exact_with_a_lossy_method(seed: int) -> None:
    options: dict[str, Any] = {"logprobs": 2, "stop": ["abab"], "logits_processors": [Waves()], **ODD_PENALTIES}
    batch = [([2, 0, seed], SamplingParams(max_tokens=20, **options)), ([4], SamplingParams(max_tokens=12, n=2))]
    happened = set(check_greedy("lossy", random_rows(6, seed), batch, "any", seed))
    assert "accepted 0" in happened


@pytest.mark.parametrize("method", ["rejection", "block", "lossy-typical"])
def test_statistics_name_the_method(method: str) -> None:
    llm = sampling_model(2, verification=method).llm
    assert llm.stats.verification == method
    llm.reset_stats()
    assert llm.stats.verification == method
