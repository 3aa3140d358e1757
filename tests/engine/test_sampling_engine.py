"""Sampling through the whole engine: seeds, acceptance, and the distribution of what is emitted."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Checkpoint, Reference
from scipy import stats  # type: ignore[import-untyped]
from scripted import finish
from tiny_models import tiny_llama
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.config import DraftSampling, EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.draft_head import DraftHead
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.request import Request
from foredraft.sampling.sampler import SamplingTensors
from foredraft.sampling.sampling_state import SamplingState
from foredraft.sampling_params import SamplingParams
from foredraft.speculation.drafter import Drafter, Drafts, Window

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MODES: list[DraftSampling] = ["probabilistic", "greedy"]


@pytest.fixture
def llama(checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A vocabulary of 8 words, so that pairs can be counted."""
    return Checkpoint.load(tiny_llama(tmp_path_factory.mktemp("small"), vocab_size=8, num_modules=2, seed=2), 2)


Make = Callable[[TargetModel, MtpModules, CacheStorage, DraftHead], Drafter]


def engine_of(
    checkpoint: Checkpoint,
    *,
    depth: int = 3,
    draft_sampling: DraftSampling = "probabilistic",
    draft_vocab_size: int | None = None,
    draft_vocab: Path | None = None,
    draft_head_bits: int = 16,
    num_blocks: int = 64,
    max_num_seqs: int = 5,
    budget: int = 1024,
    make: Make = Drafter,
) -> Engine:
    config = EngineConfig(
        num_speculative_tokens=depth,
        draft_sampling=draft_sampling,
        draft_vocab_size=draft_vocab_size,
        draft_vocab=draft_vocab,
        draft_head_bits=draft_head_bits,
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    return build_engine(checkpoint.loaded, config, make)


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """Run requests together; those in `prompts` and `params`, in this order."""
    first = engine.stats.num_requests
    requests = [
        engine.add_request(f"{first + index}", prompt, one) for index, (prompt, one) in enumerate(zip(prompts, params))
    ]
    finish(engine)
    return requests


# -- seeds -------------------------------------------------------------------------------------------------------------

OTHERS = [
    SamplingParams(max_tokens=24, temperature=1.3),
    SamplingParams(max_tokens=15),
    SamplingParams(max_tokens=22, temperature=0.7, top_k=3, top_p=0.8, seed=5),
    SamplingParams(max_tokens=9, temperature=1.0, seed=0, num_speculative_tokens=0),
]
OTHER_PROMPTS = [[7], [9, 9, 8], [3, 1, 4, 1], [6] * 11]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_seeded_request_returns_the_same_tokens_in_any_company(
    llama: Checkpoint, mode: DraftSampling, top_p: float
) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=0.9, top_p=top_p, seed=0)
    engine = engine_of(llama, draft_sampling=mode)
    (alone,) = serve(engine, [PROMPT], [seeded])
    assert sum(alone.stats.drafted_by_depth) > 0

    serve(engine, OTHER_PROMPTS, OTHERS)
    (afterwards,) = serve(engine, [PROMPT], [seeded])
    assert afterwards.token_ids == alone.token_ids

    for place in (0, 2, 4):
        prompts = [*OTHER_PROMPTS[:place], PROMPT, *OTHER_PROMPTS[place:]]
        params = [*OTHERS[:place], seeded, *OTHERS[place:]]
        assert serve(engine, prompts, params)[place].token_ids == alone.token_ids

    chunked = engine_of(llama, draft_sampling=mode, max_num_seqs=1, budget=4)
    assert serve(chunked, [PROMPT], [seeded])[0].token_ids == alone.token_ids

    crowded = engine_of(llama, draft_sampling=mode, num_blocks=9)
    requests = serve(crowded, [*OTHER_PROMPTS, PROMPT], [*OTHERS, seeded])
    assert crowded.stats.num_preemptions > 0
    assert requests[-1].token_ids == alone.token_ids


@pytest.mark.parametrize("mode", MODES)
def test_a_preempted_request_keeps_its_drafts_and_so_its_tokens(small: Checkpoint, mode: DraftSampling) -> None:
    params = [SamplingParams(max_tokens=20, temperature=3.0, seed=seed) for seed in range(12)]
    roomy = engine_of(small, depth=2, draft_sampling=mode)
    crowded = engine_of(small, depth=2, draft_sampling=mode, num_blocks=10)
    expected = serve(roomy, [[1, 2, 3]] * 12, params)
    preempted = serve(crowded, [[1, 2, 3]] * 12, params)
    assert roomy.stats.num_preemptions == 0
    assert crowded.stats.num_preemptions > 10
    assert roomy.stats.speculation.num_accepted_tokens > 20
    assert [request.token_ids for request in preempted] == [request.token_ids for request in expected]


def test_different_seeds_and_no_seed_differ(llama: Checkpoint) -> None:
    engine = engine_of(llama)
    seeded = [SamplingParams(max_tokens=12, temperature=0.9, seed=seed) for seed in (1, 2, 2**63 - 1)]
    unseeded = [SamplingParams(max_tokens=12, temperature=0.9)] * 3
    requests = serve(engine, [PROMPT] * 6, [*seeded, *unseeded])
    assert len({tuple(request.token_ids) for request in requests}) == 6


def test_greedy_seeded_and_unseeded_side_by_side(llama: Checkpoint) -> None:
    # top_k=1 leaves one token to draw, so that all three must agree whatever is drawn.
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, top_k=1, seed=3),
        SamplingParams(max_tokens=20, temperature=1.0, top_k=1),
        SamplingParams(max_tokens=20),
    ]
    expected = llama.reference.sequence(PROMPT, 20)[:28]
    for mode in MODES:
        requests = serve(engine_of(llama, draft_sampling=mode), [PROMPT] * 3, params)
        assert all(request.token_ids == expected for request in requests)


# -- acceptance --------------------------------------------------------------------------------------------------------


class TwinDrafter(Drafter):
    """Drafts from the target's own distribution after PROMPT, as transformers computes it from the whole history."""

    def __init__(self, reference: Reference, *parts: Any) -> None:
        super().__init__(*parts)
        self._reference = reference
        self._histories: dict[str, list[int]] = {}
        self._drafted: dict[str, list[int]] = {}

    def run(
        self, windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
    ) -> Drafts:
        self._drafted = {window.request_id: [] for window in windows}
        for window in windows:
            history = self._histories.setdefault(window.request_id, list(PROMPT))
            history[window.start + 1 :] = window.token_ids
        return super().run(windows, sampling, rules)

    def choose(
        self, index: int, windows: Sequence[Window], logits: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor | None]:
        rows = []
        for window in windows:
            token_ids = [*self._histories[window.request_id], *self._drafted[window.request_id]]
            assert len(token_ids) == window.num_tokens + index
            rows.append(self._reference.logits(token_ids)[-1])
        chosen, probs = super().choose(index, windows, torch.stack(rows), sampling)
        for window, token_id in zip(windows, chosen.tolist()):
            self._drafted[window.request_id].append(token_id)
        if index == 0:
            self.observe(windows, torch.stack(rows))
        return chosen, probs

    def observe(self, windows: Sequence[Window], logits: Tensor) -> None:
        """For tests that need more than the tokens."""


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 0.8)])
def test_drafts_from_the_targets_own_distribution_are_all_accepted(
    llama: Checkpoint, temperature: float, top_k: int, top_p: float
) -> None:
    engine = engine_of(llama, depth=3, make=partial(TwinDrafter, llama.reference))
    params = [
        SamplingParams(max_tokens=21, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) for seed in range(5)
    ]
    for request in serve(engine, [PROMPT] * 5, params):
        assert request.stats.num_drafted_tokens == 15
        assert request.stats.num_accepted_tokens == 15
        assert request.stats.mean_acceptance_length == 4.0


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_greedy_drafts_are_accepted_as_often_as_the_target_would_emit_them(
    llama: Checkpoint, temperature: float
) -> None:
    class Counting(TwinDrafter):
        """Adds up how likely each draft is to be accepted."""

        expected = variance = 0.0

        def observe(self, windows: Sequence[Window], logits: Tensor) -> None:
            highest = (logits.double() / temperature).softmax(-1).amax(-1)
            self.expected += float(highest.sum())
            self.variance += float((highest * (1 - highest)).sum())

    made: list[Counting] = []

    def make(target: TargetModel, modules: MtpModules, storage: CacheStorage, head: DraftHead) -> Drafter:
        made.append(Counting(llama.reference, target, modules, storage, head))
        return made[0]

    engine = engine_of(llama, depth=1, draft_sampling="greedy", make=make, max_num_seqs=32)
    serve(engine, [PROMPT] * 32, [SamplingParams(max_tokens=20, temperature=temperature, seed=s) for s in range(32)])
    drafter = made[0]
    accepted = engine.stats.speculation.accepted_by_depth[0]
    assert 0.1 < drafter.expected / engine.stats.speculation.num_drafts < 0.98
    assert abs(accepted - drafter.expected) < 5 * math.sqrt(drafter.variance)


# -- the distribution of what is emitted -------------------------------------------------------------------------------

NUM_SEEDS = 4096
ALIKE, BIASED = 1e-3, 1e-6  # p-values: above the first the distributions agree, below the second they do not


def target_probs(checkpoint: Checkpoint, token_ids: Sequence[int], params: SamplingParams) -> Tensor:
    """What the target's next token is drawn from: transformers' logits, temperature, then the nucleus by hand."""
    probs = (checkpoint.reference.logits(token_ids)[-1].double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[(probs[order].cumsum(0) - probs[order]) < params.top_p]
    mask = torch.zeros_like(probs).index_fill(0, kept, 1.0)
    return probs * mask / (probs * mask).sum()


def exact_triples(checkpoint: Checkpoint, prompt: list[int], params: SamplingParams) -> Tensor:
    """The probability [8, 8, 8] of the first three tokens."""
    triples = torch.zeros(8, 8, 8, dtype=torch.float64)
    for first, first_prob in enumerate(target_probs(checkpoint, prompt, params)):
        for second, second_prob in enumerate(target_probs(checkpoint, [*prompt, first], params)):
            rest = target_probs(checkpoint, [*prompt, first, second], params)
            triples[first, second] = first_prob * second_prob * rest
    return triples


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Of a chi-square test of counts against probabilities; cells that expect fewer than 5 are taken together."""
    counts, means = observed.flatten().double(), expected.flatten() * float(observed.sum())
    assert int(counts[means == 0].sum()) == 0
    is_small = means < 5
    cells = [(counts[~is_small], means[~is_small])]
    if float(means[is_small].sum()) > 5:
        cells.append((counts[is_small].sum()[None], means[is_small].sum()[None]))
    seen, wanted = torch.cat([c for c, _ in cells]), torch.cat([m for _, m in cells])
    chi_square = float(((seen - wanted) ** 2 / wanted).sum())
    return float(stats.chi2.sf(chi_square, len(wanted) - 1))


@pytest.mark.parametrize(
    ("mode", "ranking", "bits"),
    [
        *((mode, None, 16) for mode in MODES),
        *(("probabilistic", *head) for head in (([], 16), ([7, 2, 6], 16), ([4], 8))),
    ],
)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_emitted_tokens_are_distributed_as_the_targets_own(
    small: Checkpoint, tmp_path: Path, mode: DraftSampling, ranking: list[int] | None, bits: int, top_p: float
) -> None:
    """ranking: where it is not None, drafts are made among five tokens of eight, first those that it names."""
    prompt = [1, 2, 3]
    (tmp_path / "ranking.json").write_text(json.dumps(ranking))
    engine = engine_of(
        small,
        depth=2,
        draft_sampling=mode,
        draft_vocab_size=None if ranking is None else 5,
        draft_vocab=tmp_path / "ranking.json" if ranking else None,
        draft_head_bits=bits,
        max_num_seqs=256,
        num_blocks=1024,
    )
    params = [SamplingParams(max_tokens=4, temperature=3.0, top_p=top_p, seed=seed) for seed in range(NUM_SEEDS)]
    requests = serve(engine, [prompt] * NUM_SEEDS, params)
    drafted, accepted = engine.stats.speculation.drafted_by_depth, engine.stats.speculation.accepted_by_depth
    assert drafted[0] >= NUM_SEEDS
    assert 0.05 < accepted[0] / drafted[0] < 0.95
    assert accepted[1] > 0.02 * NUM_SEEDS

    # Token 0 is the prefill's; tokens 1 and 2 are the first ones that drafts are made for.
    counts = Counter(tuple(request.output_token_ids[:3]) for request in requests)
    observed = torch.zeros(8, 8, 8)
    for triple, count in counts.items():
        observed[triple] = count
    expected = exact_triples(small, prompt, params[0])
    assert p_value(observed.sum(2), expected.sum(2)) > ALIKE
    assert p_value(observed.sum(0), expected.sum(0)) > ALIKE
    assert p_value(observed, expected) > ALIKE
    # The test can tell: a colder target would not do.
    colder = exact_triples(small, prompt, SamplingParams(temperature=2.0, top_p=top_p)).sum(0)
    assert float(colder[observed.sum(0) > 0].min()) == 0 or p_value(observed.sum(0), colder) < BIASED
