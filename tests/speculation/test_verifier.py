"""Verification: the output is distributed as the target's own, whatever was drafted, and requests do not mix."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation.brute_force import (
    ALIKE,
    BIASED,
    START,
    TABLES,
    Judge,
    Verify,
    by_position,
    cycles,
    emitted_distribution,
    expected_length,
    first_cycle,
    generate,
    jointly,
    most_likely,
    num_accepted,
    one_hot,
    p_value,
    random_table,
    sequence_distribution,
    sequences_p_value,
    token_by_token,
)
from torch import Tensor

from foredraft.sampling.philox import Stream, uniform
from foredraft.sampling.sampler import SamplingTensors, probabilities, sample
from foredraft.speculation import verifier
from foredraft.speculation.verifier import block_verify, rejection_sample, typical_accept, verify_greedy

NUM_REQUESTS = 50_000
RULES: dict[str, tuple[Verify, Judge]] = {
    "token_by_token": (rejection_sample, token_by_token),
    "block": (block_verify, jointly),
}
each_rule = pytest.mark.parametrize(("verify", "judge"), RULES.values(), ids=RULES)
each_pair_of_tables = pytest.mark.parametrize(("target", "draft"), TABLES.values(), ids=TABLES)


# --- the distribution -------------------------------------------------------------------------------------------------


@each_pair_of_tables
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_rules_of_the_papers_keep_the_targets_distribution(target: Tensor, draft: Tensor, depth: int) -> None:
    for judge in (token_by_token, jointly):
        emitted = emitted_distribution(target, draft, depth, judge)
        torch.testing.assert_close(emitted, sequence_distribution(target, depth + 1), rtol=0, atol=1e-12)


@each_rule
@each_pair_of_tables
def test_drafts_are_accepted_as_the_papers_say(target: Tensor, draft: Tensor, verify: Verify, judge: Judge) -> None:
    """Drafts and the number of them that are accepted are one outcome; its probability is known by enumeration."""
    for depth in (1, 4 if len(target) < 4 else 3):
        drafts, ids = first_cycle(target, draft, verify, depth, NUM_REQUESTS)
        vocab_size = len(target)
        cells = drafts @ (vocab_size ** torch.arange(depth - 1, -1, -1)) * (depth + 1) + num_accepted(ids)
        probs = torch.zeros(vocab_size**depth, depth + 1, dtype=torch.float64)
        for outcome, accepted, probability in cycles(target, draft, depth, judge):
            probs[sum(token * vocab_size**i for i, token in enumerate(reversed(outcome))), accepted] = probability
        probs[probs < 1e-12] = 0  # 0 but for rounding
        assert p_value(torch.bincount(cells, minlength=probs.numel()), probs.flatten()) > ALIKE


@each_pair_of_tables
@pytest.mark.parametrize("rule", [*RULES, "point_mass"])
def test_sequences_are_distributed_as_the_target(target: Tensor, draft: Tensor, rule: str) -> None:
    """Whole sequences over several cycles: numbers used twice, or positions counted wrongly, show here as well."""
    num_tokens = {2: 7, 3: 5}.get(len(target), 4)
    if rule == "point_mass":
        tokens = generate(target, most_likely(draft), rejection_sample, NUM_REQUESTS, num_tokens, point_mass=True)
    else:
        vary_depth = len(target) == 4
        tokens = generate(target, draft, RULES[rule][0], NUM_REQUESTS, num_tokens, vary_depth=vary_depth)
    assert sequences_p_value(target, tokens) > ALIKE


@each_rule
@pytest.mark.parametrize("point_mass", [False, True])
def test_long_sequences_are_distributed_as_the_target(verify: Verify, judge: Judge, point_mass: bool) -> None:
    """Few seeds and many positions."""
    target, draft = random_table(6, 3, masked=0.2), random_table(6, 4, masked=0.2)
    draft = most_likely(draft) if point_mass else draft
    tokens = generate(target, draft, verify, 100, 201, vary_depth=True, point_mass=point_mass)
    contexts, following = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    for context in set(contexts.tolist()):
        counts = torch.bincount(following[contexts == context], minlength=6)
        assert p_value(counts, target[context]) > ALIKE


def target_in_place_of_residual(
    drafts: Tensor, draft_probs: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    ids = rejection_sample(drafts, draft_probs, target_probs, seeds, positions)
    accepted = num_accepted(ids)
    weights = target_probs[torch.arange(len(ids)), accepted]
    return ids.scatter(1, accepted[:, None], sample(weights, uniform(seeds, positions, Stream.RECOVER))[:, None])


def certain_drafts_judged_as_drawn(
    drafts: Tensor, _: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    contexts = torch.cat([torch.full((len(drafts), 1), START), drafts[:, :-1]], dim=1)
    return rejection_sample(drafts, TABLES["five_tokens"][1][contexts].float(), target_probs, seeds, positions)


def test_the_chi_square_detects_wrong_rules() -> None:
    target, draft = TABLES["five_tokens"]
    run = partial(generate, target, num_requests=NUM_REQUESTS, num_tokens=2)
    wrong_residual = run(draft, target_in_place_of_residual)
    wrong_ratio = run(most_likely(draft), certain_drafts_judged_as_drawn, point_mass=True)
    shared_numbers = run(draft, rejection_sample, keys=by_position, stream=Stream.ACCEPT)
    for tokens in (wrong_residual, wrong_ratio, shared_numbers):
        assert sequences_p_value(target, tokens) < BIASED


def test_numbers_of_drafts_may_be_used_again_only_with_rejection_sampling() -> None:
    """A draft that was not accepted says nothing about later tokens with one rule, and something with the other."""
    target, draft = TABLES["coins"]
    run = partial(generate, target, draft, num_requests=NUM_REQUESTS, num_tokens=7, keys=by_position)
    assert sequences_p_value(target, run(rejection_sample)) > ALIKE
    assert sequences_p_value(target, run(block_verify)) < BIASED


# --- how much is accepted ---------------------------------------------------------------------------------------------


@each_pair_of_tables
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_fewer_drafts_are_accepted_jointly(target: Tensor, draft: Tensor, depth: int) -> None:
    one_by_one, together = (expected_length(target, draft, depth, judge) for judge in (token_by_token, jointly))
    assert together >= one_by_one - 1e-12
    if depth == 1:
        assert together == pytest.approx(one_by_one, abs=1e-12)


def test_the_example_of_the_paper() -> None:
    """Two coins, two drafts: 10/9 tokens are accepted one by one, 11/9 jointly."""
    for (verify, judge), expected in zip(RULES.values(), (10 / 9, 11 / 9)):
        assert expected_length(*TABLES["coins"], 2, judge) == pytest.approx(expected)
        accepted = num_accepted(first_cycle(*TABLES["coins"], verify, 2, NUM_REQUESTS)[1]).double()
        assert abs(float(accepted.mean()) - expected) < 5 * float(accepted.std()) / NUM_REQUESTS**0.5


@each_rule
@pytest.mark.parametrize("certain", [0.0, 0.5, 1.0])
def test_drafts_of_a_perfect_drafter_are_all_accepted(verify: Verify, judge: Judge, certain: float) -> None:
    target = random_table(5, 1, masked=0.2, certain=certain)
    assert (num_accepted(first_cycle(target, target, verify, 4, NUM_REQUESTS)[1]) == 4).all()


def test_a_point_mass_is_accepted_with_the_targets_probability() -> None:
    target, draft = random_table(5, 1), most_likely(random_table(5, 2))
    drafts, ids = first_cycle(
        target, draft, lambda drafts, _, *rest: rejection_sample(drafts, None, *rest), 2, NUM_REQUESTS
    )
    first, second = drafts[0].tolist()
    rates = [1 - target[START, first], target[START, first] * (1 - target[first, second])]
    rates.append(target[START, first] * target[first, second])
    assert p_value(torch.bincount(num_accepted(ids), minlength=3), torch.stack(rates)) > ALIKE


# --- each request by itself -------------------------------------------------------------------------------------------


class Batch:
    """Random arguments of a rule; rows beyond a request's drafts hold nan."""

    def __init__(self, num_drafts: list[int], max_drafts: int, vocab_size: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        batch_size = len(num_drafts)
        columns, counts = torch.arange(max_drafts + 1), torch.tensor(num_drafts)[:, None]

        def distributions(num_rows: int) -> Tensor:
            logits = torch.randn(batch_size, num_rows, vocab_size, generator=rng) * 2
            logits[torch.rand(logits.shape, generator=rng) < 0.3] = -torch.inf
            logits[..., 0] = 0.0  # at least one token is possible
            probs = logits.softmax(dim=-1)
            # A third of the rows is one-hot, as those of a greedy request are.
            is_one_hot = torch.rand(batch_size, num_rows, 1, generator=rng) < 0.3
            return torch.where(is_one_hot, one_hot(probs.argmax(dim=-1), vocab_size), probs)

        self.draft_probs = distributions(max_drafts)
        self.target_probs = distributions(max_drafts + 1)
        uniforms = torch.rand(batch_size * max_drafts, generator=rng, dtype=torch.float64)
        ids = sample(self.draft_probs.view(-1, vocab_size), uniforms).view(batch_size, max_drafts)
        self.ids = ids.masked_fill(columns[:-1] >= counts, -1)
        self.draft_probs[columns[:-1] >= counts] = torch.nan
        self.target_probs[columns > counts] = torch.nan
        self.seeds = torch.randint(-(2**62), 2**62, (batch_size,), generator=rng)
        self.positions = torch.randint(0, 10_000, (batch_size,), generator=rng)
        self.num_drafts = num_drafts

    def verify(self, rule: str, rows: slice = slice(None), start: int = 0, end: int | None = None) -> Tensor:
        """Verify the drafts from `start` to `end` of some requests."""
        drafts, draft_probs = self.ids[rows, start:end], self.draft_probs[rows, start:end]
        target_probs = self.target_probs[rows, start : None if end is None else end + 1]
        keys = self.seeds[rows], self.positions[rows] + start
        if rule == "typical":
            return typical_accept(drafts, target_probs, *keys, epsilon=0.1, delta=0.3)
        if rule == "point_mass":
            return rejection_sample(drafts, None, target_probs, *keys)
        return RULES[rule][0](drafts, draft_probs, target_probs, *keys)


BATCHES = st.builds(
    Batch,
    num_drafts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    max_drafts=st.just(4),
    vocab_size=st.sampled_from([2, 5, 300]),
    seed=st.integers(0, 2**32),
)
rules = st.sampled_from([*RULES, "point_mass", "typical"])


def assert_is_possible(batch: Batch, ids: Tensor) -> None:
    assert ids.shape == (len(batch.num_drafts), 5)
    for row, (num_drafts, accepted) in enumerate(zip(batch.num_drafts, num_accepted(ids).tolist(), strict=True)):
        assert 0 <= accepted <= num_drafts
        assert ids[row, :accepted].tolist() == batch.ids[row, :accepted].tolist()
        assert (ids[row, accepted + 1 :] == -1).all()
        for column in range(accepted + 1):
            assert batch.target_probs[row, column, ids[row, column]] > 0


@settings(deadline=None)
@given(BATCHES, rules, st.sampled_from([None, 0.0, 1 - 2.0**-53]))
def test_emitted_are_the_accepted_drafts_and_one_possible_token(batch: Batch, rule: str, number: float | None) -> None:
    """Also with the lowest and the highest number that can be drawn."""
    with pytest.MonkeyPatch.context() as patch:
        if number is not None:
            patch.setattr(verifier, "uniform", lambda *args: torch.full_like(uniform(*args), number))
        assert_is_possible(batch, batch.verify(rule))


@settings(deadline=None)
@given(BATCHES, rules)
def test_a_request_gets_the_same_alone_and_in_a_batch_and_without_padding(batch: Batch, rule: str) -> None:
    together = batch.verify(rule)
    for row, num_drafts in enumerate(batch.num_drafts):
        alone = batch.verify(rule, slice(row, row + 1), end=num_drafts)
        assert together[row].tolist() == alone[0].tolist() + [-1] * (4 - num_drafts)


@settings(deadline=None)
@given(BATCHES, st.sampled_from(["token_by_token", "point_mass", "typical"]))
def test_a_decision_depends_on_its_position_not_on_its_depth(batch: Batch, rule: str) -> None:
    """Where the first draft is accepted, the rest is as if a cycle had begun with the second."""
    whole, rest = batch.verify(rule), batch.verify(rule, start=1)
    is_accepted = num_accepted(whole) > 0
    assert torch.equal(whole[is_accepted, 1:], rest[is_accepted])


@settings(deadline=None)
@given(BATCHES, rules)
def test_a_greedy_target_makes_it_greedy_verification(batch: Batch, rule: str) -> None:
    best = batch.target_probs.nan_to_num().argmax(dim=-1)
    batch.target_probs = one_hot(best, batch.target_probs.shape[-1])
    assert torch.equal(batch.verify(rule), verify_greedy(batch.ids, best))


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
def test_with_point_masses_the_tokens_are_the_same_whatever_was_drafted(verify: Verify) -> None:
    target = random_table(5, 1, masked=0.2)
    run = partial(generate, target, verify=verify, num_requests=500, num_tokens=20, point_mass=True)
    alone = run(target, max_drafts=0)
    for seed in range(3):
        draft = most_likely(random_table(5, seed))
        for max_drafts, vary_depth in ((1, False), (4, False), (4, True)):
            assert torch.equal(run(draft, max_drafts=max_drafts, vary_depth=vary_depth), alone)


@each_rule
def test_seeded_requests_repeat_in_any_company(verify: Verify, judge: Judge) -> None:
    """A large vocabulary, where sums over it would differ in the last bits with the shape of the batch."""
    rng = torch.Generator().manual_seed(0)
    draft_probs = torch.randn(6, 2, 49152, generator=rng).softmax(dim=-1)
    target_probs = torch.randn(6, 3, 49152, generator=rng).softmax(dim=-1)
    drafts = draft_probs.argmax(dim=-1)
    seeds, positions = torch.tensor([7, 7, 8, 0, -1, 2**62]), torch.tensor([5, 6, 5, 0, 3, 2**31])
    together = verify(drafts, draft_probs, target_probs, seeds, positions)
    for rows in (slice(0, 1), slice(0, 2), slice(3, 6)):
        part = verify(drafts[rows], draft_probs[rows], target_probs[rows], seeds[rows], positions[rows])
        assert torch.equal(part, together[rows])
    assert torch.equal(verify(drafts, draft_probs, target_probs, seeds, positions), together)
    others = [verify(drafts, draft_probs, target_probs, seeds + 1, positions)]
    others.append(verify(drafts, draft_probs, target_probs, seeds, positions + 1))
    assert all((other[:, 0] != together[:, 0]).any() for other in others)


# --- single rules -----------------------------------------------------------------------------------------------------


def test_greedy_verification() -> None:
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, -1], [-1, -1, -1], [4, -1, 6]])
    targets = torch.tensor([[4, 5, 6, 7]]).expand(6, -1)
    expected = [[4, 5, 6, 7], [4, 5, -1, -1], [4, -1, -1, -1], [4, 5, 6, -1], [4, -1, -1, -1], [4, 5, -1, -1]]
    assert verify_greedy(drafts, targets).tolist() == expected
    assert verify_greedy(drafts[:, :0], targets[:, :1]).tolist() == [[4]] * 6


def test_greedy_and_sampled_requests_in_one_call() -> None:
    """Vocabulary ids come out, not ranks, and the greedy request is the same beside a sampled one as alone."""
    logits = torch.zeros(2, 3, 12)
    logits[0, :, 9] = 5.0
    rows = torch.arange(2).repeat_interleave(3)
    params = SamplingTensors.from_params([(0.0, 0, 1.0, 1), (1.0, 4, 0.9, 2)]).rows(rows)
    target_probs = probabilities(logits.view(6, 12), params).view(2, 3, 12)
    drafts, seeds, positions = torch.tensor([[9, 3], [3, 9]]), torch.tensor([1, 2]), torch.tensor([0, 40])
    ids = rejection_sample(drafts, None, target_probs, seeds, positions)
    assert ids[0].tolist() == [9, 9, -1]  # the right draft is accepted, the wrong one replaced
    assert 0 <= ids[1, 0] < 4
    alone = rejection_sample(drafts[:1], None, target_probs[:1], seeds[:1], positions[:1])
    assert torch.equal(alone, ids[:1])


@each_rule
def test_a_bonus_token_comes_from_the_row_after_the_last_draft(verify: Verify, judge: Judge) -> None:
    target_probs = one_hot(torch.tensor([[1, 2, 3], [1, 4, 5], [2, 5, 5]]), 6)
    drafts = torch.tensor([[1, 2], [1, -1], [-1, -1]])
    zeros = torch.zeros(3, dtype=torch.int64)
    expected = [[1, 2, 3], [1, 4, -1], [2, -1, -1]]
    assert verify(drafts, None, target_probs, zeros, zeros).tolist() == expected
    assert verify(drafts, one_hot(drafts.clamp(min=0), 6), target_probs, zeros, zeros).tolist() == expected
    assert verify(drafts[:, :0], None, target_probs[:, :1], zeros, zeros).tolist() == [[1], [1], [2]]


@each_rule
@pytest.mark.parametrize("probability", [0.0, 1e-40, 0.5, 1.0])
def test_an_impossible_draft_is_never_accepted(verify: Verify, judge: Judge, probability: float) -> None:
    """Not even where the drafter gave it next to nothing, or all; nor is one after it."""
    seeds, positions = torch.arange(5000), torch.zeros(5000, dtype=torch.int64)
    target_probs = torch.tensor([[0.0, 0.5, 0.5]] * 2 + [[0.0, 0.0, 1.0]]).expand(5000, 3, 3)
    draft_probs = torch.tensor([[probability, 1 - probability, 0.0], [0.0, 0.1, 0.9]]).expand(5000, 2, 3)
    ids = verify(torch.tensor([[0, 1]]).expand(5000, 2), draft_probs, target_probs, seeds, positions)
    assert (num_accepted(ids) == 0).all()
    assert set(ids[:, 0].tolist()) <= {1, 2}


@each_rule
def test_without_a_residual_the_target_decides(verify: Verify, judge: Judge) -> None:
    """Rounding can reject a draft where target and draft agree; here it is exaggerated to a factor of two."""
    seeds, positions = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    target_probs = torch.tensor([0.0, 0.3, 0.0, 0.7]).expand(2000, 2, 4)
    ids = verify(torch.full((2000, 1), 3), 2 * target_probs[:, :1], target_probs, seeds, positions)
    rejected = ids[num_accepted(ids) == 0, 0]
    assert 800 < len(rejected) < 1200
    assert p_value(torch.bincount(rejected, minlength=4), target_probs[0, 0].double()) > ALIKE


def test_typical_acceptance_asks_less_where_the_target_is_undecided() -> None:
    """Entropy ln 4 in the first row, so that exp(-entropy) is 1/4; ln 2 in the second."""
    seeds = positions = torch.zeros(1, dtype=torch.int64)
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0], [0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])

    def emitted(drafts: list[int], epsilon: float, delta: float) -> list[int]:
        ids = typical_accept(torch.tensor([drafts]), rows[None], seeds, positions, epsilon, delta)[0]
        return ids[: int(num_accepted(ids[None]))].tolist()

    assert emitted([0, 1], epsilon=0.9, delta=0.99) == [0, 1]
    assert emitted([0, 1], epsilon=0.9, delta=1.01) == []  # above the entropy's threshold by a little
    assert emitted([0, 1], epsilon=0.24, delta=9.0) == [0, 1]  # the fixed one holds where it is lower
    assert emitted([0, 1], epsilon=0.25, delta=9.0) == []  # a probability must be above it
    assert emitted([0, 2], epsilon=0.0, delta=1.0) == [0]  # never one of probability 0
    assert emitted([4, 1], epsilon=0.0, delta=0.0) == []  # nor any after it
    ids = typical_accept(torch.tensor([[3, 0]]), rows[None], seeds, positions, 0.1, 0.3)
    assert ids.tolist() == [[3, 0, 4]]


def test_after_typical_acceptance_the_target_decides() -> None:
    seeds, positions = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    target_probs = torch.tensor([[0.05, 0.25, 0.7, 0.0], [0.3, 0.3, 0.1, 0.3]])
    for draft, row in ((0, 0), (2, 1)):
        drafts = torch.full((20_000, 1), draft)
        ids = typical_accept(drafts, target_probs.expand(20_000, 2, 4), seeds, positions, 0.3, 0.3)
        assert (num_accepted(ids) == row).all()
        assert p_value(torch.bincount(ids[:, row], minlength=4), target_probs[row].double()) > ALIKE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", [*RULES, "point_mass", "typical"])
def test_same_tokens_on_a_gpu(rule: str) -> None:
    batch = Batch([0, 1, 2, 3, 4, 4, 4], 4, 3000, seed=1)
    expected = batch.verify(rule)
    for name in ("ids", "draft_probs", "target_probs", "seeds", "positions"):
        setattr(batch, name, getattr(batch, name).cuda())
    assert torch.equal(batch.verify(rule).cpu(), expected)
