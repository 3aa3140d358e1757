"""Filters and draws: equal to transformers' warpers, exact on ties, and each row by itself."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from foredraft.sampling.philox import Stream, uniform
from foredraft.sampling.sampler import RowSettings, SamplingTensors, greedy, probabilities, sample

ALMOST_ONE = 1 - 2.0**-53  # the largest number a generator of 53 bits gives
Params = RowSettings | tuple[float, int, float, int]
OFF = RowSettings(1.0, 0, 1.0, 0)
Filters = tuple[float, int, float, float, float]  # temperature, top-k, top-p, min-p, typical-p


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def filtered(logits: Tensor, *params: Params) -> Tensor:
    """Probabilities of each row under each of `params`, or of all rows under the only one."""
    rows = params * len(logits) if len(params) == 1 else params
    return probabilities(logits, SamplingTensors.from_params(rows))


def warped(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0, typical_p: float = 1.0
) -> Tensor:
    ids: Any = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(ids, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(ids, logits)
    if min_p > 0:
        logits = MinPLogitsWarper(min_p)(ids, logits)
    if typical_p < 1:
        logits = TypicalLogitsWarper(typical_p)(ids, logits)
    return logits.softmax(dim=-1)


def kept(probs: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in probs]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_host_side_flags() -> None:
    def flags(*params: Params) -> list[str | int]:
        sampling = SamplingTensors.from_params(params)
        names = ("all_greedy", "any_greedy", "any_top_k", "any_top_p", "any_min_p", "any_typical_p")
        return [*(name for name in names if getattr(sampling, name)), sampling.num_candidates]

    plain, both = OFF[:4], (1.0, 20, 0.5, 0)
    assert flags(plain) == [0]
    assert flags((0.0, 0, 1.0, 0)) == ["all_greedy", "any_greedy", 0]
    # Filters change nothing in a greedy row.
    assert flags(RowSettings(0.0, 9, 0.5, 0, 0.5, 0.5)) == ["all_greedy", "any_greedy", 0]
    assert flags((0.0, 0, 1.0, 0), plain) == ["any_greedy", 0]
    assert flags((0.0, 0, 1.0, 0), (1.0, 9, 1.0, 0), both) == ["any_greedy", "any_top_k", "any_top_p", 20]
    assert flags((1.0, 9, 1.0, 0), both, plain) == ["any_top_k", "any_top_p", 0]
    assert flags(OFF._replace(min_p=0.1), plain) == ["any_min_p", 0]
    assert flags(OFF._replace(typical_p=0.9, top_k=3)) == ["any_top_k", "any_typical_p", 3]


def test_settings_are_expanded_to_rows() -> None:
    sampling = SamplingTensors.from_params([RowSettings(0.5, 3, 0.9, 7, 0.25, 0.75), (0.0, 0, 1.0, 2**64 - 1)])
    rows = sampling.rows(torch.tensor([1, 0, 0]))
    assert rows.seeds.tolist() == [-1, 7, 7]
    assert rows.temperature.tolist() == [0.0, 0.5, 0.5]
    assert rows.top_k.tolist() == [0, 3, 3]
    assert rows.top_p.tolist() == pytest.approx([1.0, 0.9, 0.9])
    assert (rows.min_p.tolist(), rows.typical_p.tolist()) == ([0.0, 0.25, 0.25], [1.0, 0.75, 0.75])
    assert (rows.any_top_k, rows.any_top_p, rows.all_greedy, rows.num_candidates) == (True, True, False, 3)
    assert sampling.rows(slice(1, 2)).temperature.tolist() == [0.0]
    assert {tensor.dtype for tensor in (rows.temperature, rows.top_p, rows.min_p, rows.typical_p)} == {torch.float32}
    assert {tensor.dtype for tensor in (rows.top_k, rows.seeds)} == {torch.int64}


# --- probabilities ----------------------------------------------------------------------------------------------------


SETTINGS = list(product([0.3, 1.0, 1.7], [0, 1, 5, 40, 1000], [0.01, 0.35, 0.9, 0.999, 1.0]))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_equal_to_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(16, 100)
    probs = filtered(logits, (temperature, top_k, top_p, 0))
    expected = warped(logits, temperature, top_k, top_p)
    assert kept(probs) == kept(expected)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=100, deadline=None, derandomize=True)  # the same logits each time: none with almost a tie
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.2, 0.7, 1.0, 1.9]),
            st.sampled_from([0, 0, 1, 2, 30, 500]),
            st.sampled_from([1.0, 0.05, 0.6, 0.93]),
            st.sampled_from([0.0, 0.02, 0.3, 0.9]),
            st.sampled_from([1.0, 0.02, 0.4, 0.8, 0.97]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1, 2, 60, 400]),
    st.integers(0, 2**32),
)
def test_all_filters_are_equal_to_transformers(params: list[Filters], vocab_size: int, seed: int) -> None:
    logits = random_logits(len(params), vocab_size, seed)
    rows = [RowSettings(t, k, p, 0, m, typical) for t, k, p, m, typical in params]
    for row, (setting, probs) in enumerate(zip(params, filtered(logits, *rows), strict=True)):
        expected = warped(logits[row : row + 1].double(), *setting)[0]
        assert torch.equal(probs > 0, expected > 0)
        torch.testing.assert_close(probs, expected.float(), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "params", [(0, 0.9, 0.0, 1.0), (3000, 0.9, 0.0, 1.0), (0, 1.0, 0.1, 1.0), (0, 1.0, 0.0, 0.6), (50, 0.9, 0.05, 0.95)]
)
def test_all_filters_with_a_large_vocabulary(params: tuple[int, float, float, float]) -> None:
    """Larger than what a CPU works on at a time, and with rows of all sizes of nuclei."""
    top_k, top_p, min_p, typical_p = params
    logits = random_logits(7, 49152) * torch.tensor([0.01, 0.1, 0.3, 0.6, 1.0, 2.0, 3.0])[:, None]
    probs = filtered(logits, RowSettings(0.8, top_k, top_p, 0, min_p, typical_p))
    expected = warped(logits.double(), 0.8, top_k, top_p, min_p, typical_p)
    assert (((probs > 0) != (expected > 0)).sum(dim=1) <= 1).all()  # of thousands of almost equal tokens, one
    torch.testing.assert_close(probs, expected.float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(probs.double().sum(dim=1), torch.ones(7, dtype=torch.float64), rtol=0.0, atol=1e-5)


SOME_SETTINGS = st.builds(
    RowSettings,
    temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0, 1e30]),
    top_k=st.sampled_from([0, 1, 2, 7, 2000, 10_000]),
    top_p=st.sampled_from([0.0, 0.2, 0.9, 1.0, 1.0]),
    seed=st.just(0),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SOME_SETTINGS, min_size=1, max_size=6), st.sampled_from([8, 2500, 70_001]), st.integers(0, 2**32))
def test_a_row_depends_on_its_own_settings_only(params: list[RowSettings], vocab_size: int, seed: int) -> None:
    logits = random_logits(len(params), vocab_size, seed)
    logits[::2] = logits[::2].round()  # rounded: with ties
    logits[:, 1::5] = -torch.inf
    probs = filtered(logits, *params)
    for row, setting in enumerate(params):
        assert torch.equal(probs[row], filtered(logits[row : row + 1], setting)[0])
    assert torch.allclose(probs.sum(dim=1), torch.ones(len(params)), atol=1e-5)


@pytest.mark.parametrize(
    "first", [OFF._replace(top_k=50, top_p=0.9), OFF._replace(top_k=50, min_p=0.02, typical_p=0.7)]
)
def test_a_row_is_the_same_among_candidates_and_in_the_whole_vocabulary(first: RowSettings) -> None:
    """Down to the last bit, whatever the other rows let the sampler skip."""
    logits = random_logits(40, 49152, 21)
    alone = filtered(logits[:1], first)[0]
    others: list[Params] = [
        OFF._replace(top_k=700),
        OFF,
        OFF._replace(top_p=0.95),
        OFF._replace(typical_p=0.5),
        (0.0, 0, 1.0, 0),
    ]
    for other in others:
        for num_others in (1, 39):
            assert torch.equal(filtered(logits[: num_others + 1], first, *[other] * num_others)[0], alone)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(filtered(logits[:1], first)[0], alone)
    finally:
        torch.set_num_threads(num_threads)


def test_greedy_rows_are_one_hot_on_the_lowest_best_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 1.0, 0.0, 2.0]])
    assert greedy(logits).tolist() == [1, 0]
    for other in ((0.0, 0, 1.0, 0), (1.0, 0, 1.0, 0), (1.0, 2, 0.5, 0)):  # alone, and beside rows of other kinds
        probs = filtered(torch.cat([logits, logits[:1]]), (0.0, 0, 1.0, 0), (0.0, 3, 0.1, 0), other)
        assert probs[:2].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@settings(deadline=None)
@given(
    st.lists(st.integers(-2, 2), min_size=2, max_size=12),
    st.integers(1, 14),
    st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.9, 1.0]),
)
def test_ties_go_to_the_lowest_ids(values: list[int], top_k: int, top_p: float) -> None:
    """Both filters keep a head of the tokens in order of (score, then lowest id), however many are equal."""
    logits = torch.tensor([values], dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))[:top_k]
    mass = logits[0, order].double().softmax(dim=0)
    before = mass.cumsum(dim=0) - mass
    if ((before - top_p).abs() < 1e-6).any():
        return  # a token exactly at the edge may fall on either side
    expected = [token for token, reached in zip(order, before.tolist(), strict=True) if reached < top_p] or order[:1]
    assert kept(filtered(logits, (1.0, top_k, top_p, 0))) == [sorted(expected)]


def test_exactly_k_tokens_of_equal_ones() -> None:
    logits = torch.zeros(3, 2000)
    logits[1, 10] = 1.0
    probs = filtered(logits, (1.0, 4, 1.0, 0), (1.0, 4, 1.0, 0), (1.0, 1500, 1.0, 0))
    assert kept(probs) == [[0, 1, 2, 3], [0, 1, 2, 10], list(range(1500))]
    # With top-p alone, and more equal tokens in the nucleus than are ranked at first.
    assert kept(filtered(logits[:1], (1.0, 0, 0.90001, 0))) == [list(range(1801))]


def test_min_p_keeps_or_removes_equal_tokens_together() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, -5.0]])
    assert kept(filtered(logits, OFF._replace(min_p=1.0))) == [[1, 3]]
    assert kept(filtered(logits, OFF._replace(min_p=0.38))) == [[1, 3]]  # exp(-1) = 0.368
    assert kept(filtered(logits, OFF._replace(min_p=0.36))) == [[0, 1, 2, 3]]
    assert kept(filtered(logits, OFF._replace(min_p=0.36, top_k=3))) == [[0, 1, 3]]
    assert kept(filtered(torch.zeros(1, 5), OFF._replace(min_p=1.0))) == [list(range(5))]


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.sampled_from([0.01, 0.3, 0.52, 0.77, 0.9]))
def test_equally_typical_tokens_of_the_lowest_ids_stay(values: list[int], typical_p: float) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    probs = logits[0].double().softmax(dim=0)
    distances = (-probs.log() + (probs * probs.log()).sum()).abs().tolist()
    order = sorted(range(len(values)), key=lambda token: (round(distances[token], 9), token))
    before = probs[order].cumsum(dim=0) - probs[order]
    if ((before - typical_p).abs() < 1e-6).any() or near_tie(distances, values):
        return
    expected = [token for token, mass in zip(order, before.tolist(), strict=True) if mass < typical_p]
    assert kept(filtered(logits, OFF._replace(typical_p=typical_p))) == [sorted(expected)]


def near_tie(distances: list[float], values: list[int]) -> bool:
    """Whether tokens of different likelihoods are almost equally typical: rounding decides between them."""
    of_value = sorted(dict(zip(values, distances, strict=True)).values())
    return any(b - a < 1e-5 for a, b in pairwise(of_value))


def test_typical_sampling_may_remove_the_likeliest_token() -> None:
    logits = torch.tensor([[0.4] + [0.6 / 64] * 64]).log()
    probs = filtered(logits, OFF._replace(typical_p=0.304))
    assert kept(probs) == [list(range(1, 34))]
    assert torch.equal(probs[0, 1:34], torch.full((33,), 1 / 33))


def test_all_equal_logits_and_the_smallest_vocabularies() -> None:
    for typical_p, count in ((1e-9, 1), (0.5, 5), (0.55, 6), (1.0, 10)):
        probs = filtered(torch.full((1, 10), -7.0), OFF._replace(typical_p=typical_p))
        assert kept(probs) == [list(range(count))]
    every = RowSettings(0.7, 5, 0.5, 0, 0.5, 0.5)
    for params in (OFF, OFF._replace(typical_p=1e-9), OFF._replace(min_p=1.0), OFF._replace(top_p=0.0), every):
        assert filtered(torch.tensor([[-3.0]]), params).tolist() == [[1.0]]
        assert filtered(torch.tensor([[-torch.inf, 1.0, -torch.inf]]), params).tolist() == [[0.0, 1.0, 0.0]]
        assert filtered(torch.tensor([[9.0, -9.0]]), params._replace(min_p=0.1)).tolist() == [[1.0, 0.0]]


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0]])
    for params in (OFF._replace(top_k=2), OFF._replace(top_p=0.4), OFF._replace(typical_p=0.4)):
        assert kept(filtered(logits, params)) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("other", [OFF, RowSettings(0.7, 3, 0.9, 0, 0.05, 0.9), OFF._replace(typical_p=0.5)])
def test_a_row_of_masked_tokens_gives_zeros_and_harms_no_other(other: RowSettings) -> None:
    logits = random_logits(3, 20)
    logits[1] = -torch.inf
    alone = filtered(logits[::2], other)
    for params in (OFF, RowSettings(0.7, 3, 0.9, 0, 0.05, 0.9), OFF._replace(top_p=0.5)):
        probs = filtered(logits, other, params, other)
        assert probs[1].count_nonzero() == 0
        assert torch.equal(probs[::2], alone)


def test_top_k_of_one_is_greedy_under_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0, 1.0]]).expand(50, -1)
    sampling = SamplingTensors.from_params([(1.0, 1, 1.0, seed) for seed in range(50)])
    numbers = uniform(sampling.seeds, torch.zeros(50, dtype=torch.int64), Stream.RECOVER)
    assert set(sample(probabilities(logits, sampling), numbers).tolist()) == {1}


@pytest.mark.parametrize(
    "params",
    [
        (1e-6, 0, 1.0, 0),
        (1e-6, 2, 0.5, 0),
        (1e-38, 0, 0.9, 0),
        (1.0, 3, 1.0, 0),
        RowSettings(1e-38, 0, 1.0, 0, 0.05, 0.9),
        RowSettings(1e-3, 3, 0.9, 0, 0.05, 0.9),
        OFF._replace(typical_p=1e-3),
    ],
)
def test_extreme_values_give_no_nan(params: Params) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0], [1e4, 9e3, -1e4, 0.0], [-torch.inf, -torch.inf, -torch.inf, 2.0]])
    for dtype in (torch.float32, torch.bfloat16):
        probs = filtered(logits.to(dtype), params)
        assert probs.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]


def test_top_p_of_one_removes_nothing() -> None:
    """Not even what is lost in the rounding of a running sum."""
    logits = torch.tensor([[0.0, -50.0, -60.0, -70.0]] * 3)
    probs = filtered(logits, (1.0, 3, 1.0, 0), (1.0, 0, 1.0, 0), (1.0, 0, 0.5, 0))
    assert kept(probs) == [[0, 1, 2], [0, 1, 2, 3], [0]]


def test_masked_tokens_stay_out() -> None:
    logits = random_logits(4, 50)
    logits[:, ::2] = -torch.inf
    filters = RowSettings(1.0, 40, 0.95, 0, 0.01, 0.9)
    for params in (
        (1.0, 0, 1.0, 0),
        (1.0, 40, 1.0, 0),
        (1.5, 0, 0.99, 0),
        (0.0, 0, 1.0, 0),
        filters,
        filters._replace(top_k=0),
    ):
        probs = filtered(logits, params)
        assert probs[:, ::2].count_nonzero() == 0
        assert torch.allclose(probs.sum(dim=1), torch.ones(4))


def test_half_precision_is_computed_in_float32() -> None:
    logits = random_logits(8, 300).bfloat16()
    for params in ((0.7, 0, 1.0, 0), (0.7, 20, 0.9, 0), RowSettings(0.7, 0, 1.0, 0, 0.01, 0.9)):
        probs = filtered(logits, params)
        assert probs.dtype == torch.float32
        assert torch.equal(probs, filtered(logits.float(), params))


def test_nothing_is_ranked_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError

    for name in ("sort", "topk", "scatter_add_"):
        monkeypatch.setattr(Tensor, name, refuse)
    logits = random_logits(2, 2000)
    filtered(logits, (0.0, 0, 1.0, 0), (1.0, 0, 1.0, 0))
    filtered(logits, (0.0, 5, 0.5, 0), (0.0, 0, 1.0, 0))
    filtered(logits, OFF, OFF._replace(min_p=0.1))
    with pytest.raises(AssertionError):
        filtered(logits, (0.0, 0, 1.0, 0), (1.0, 0, 0.5, 0))


# --- sample -----------------------------------------------------------------------------------------------------------


def draw(probs: list[float], number: float) -> int:
    return int(sample(torch.tensor([probs]), torch.tensor([number], dtype=torch.float64)).item())


def test_the_ends_of_the_distribution() -> None:
    assert [draw([0.0, 0.25, 0.0, 0.75, 0.0], u) for u in (0.0, 0.249999, 0.25, ALMOST_ONE)] == [1, 1, 3, 3]
    assert [draw([1.0, 0.0], u) for u in (0.0, ALMOST_ONE)] == [0, 0]
    assert [draw([0.0, 0.0, 1.0], u) for u in (0.0, ALMOST_ONE)] == [2, 2]


def test_only_proportions_count() -> None:
    for scale in (1e-42, 1e-30, 0.9999, 1.0, 1.0001, 1e6):
        assert [draw([0.0, scale, scale, 0.0], u) for u in (0.0, 0.499, 0.501, ALMOST_ONE)] == [1, 1, 2, 2]


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(2.0**-20, 1.0, width=32)), min_size=1, max_size=30).filter(any),
    st.one_of(st.sampled_from([0.0, 2.0**-53, ALMOST_ONE]), st.floats(0.0, ALMOST_ONE)),
)
def test_inverts_the_cumulative_distribution(probs: list[float], number: float) -> None:
    token = draw(probs, number)
    assert probs[token] > 0
    cumulative = np.cumsum(np.array(probs, dtype=np.float64))
    reached = number * cumulative[-1]
    assert cumulative[token] - probs[token] - 1e-10 <= reached <= cumulative[token] + 1e-10


def test_a_large_vocabulary() -> None:
    vocab_size, num_draws = 49152, 300
    probs = random_logits(1, vocab_size).softmax(dim=-1)
    probs[:, 1::2] = 0
    numbers = uniform(torch.tensor(5), torch.arange(num_draws), Stream.DRAFT)
    numbers[:2] = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    ids = sample(probs.expand(num_draws, -1), numbers)
    assert (probs[0, ids] > 0).all()
    cumulative = np.cumsum(probs[0].double().numpy())
    expected = np.searchsorted(cumulative, numbers.numpy() * cumulative[-1], side="right")
    assert ids[2:].tolist() == expected[2:].tolist()
    alone = torch.cat([sample(probs, number[None]) for number in numbers[:20]])
    assert torch.equal(ids[:20], alone)


def test_draws_have_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])
    numbers = uniform(torch.tensor(11), torch.arange(20_000), Stream.RECOVER)
    counts = torch.bincount(sample(probs.expand(20_000, -1), numbers), minlength=5)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3, 4]].numpy(), 20_000 * probs[[0, 2, 3, 4]].double().numpy()).pvalue > 1e-3


def test_a_row_of_nan_still_gives_a_token_and_harms_no_other() -> None:
    probs = torch.tensor([[torch.nan] * 4, [0.0, 0.0, 1.0, 0.0], [0.0] * 4])
    ids = sample(probs, torch.full((3,), 0.7, dtype=torch.float64)).tolist()
    assert ids[1] == 2
    assert all(0 <= token < 4 for token in ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_tokens_on_a_gpu() -> None:
    logits = random_logits(9, 49152).round()  # rounded: with ties
    params: list[Params] = [(0.0, 0, 1.0, 1), (1.0, 0, 1.0, 2), (0.7, 5, 1.0, 3), (1.0, 0, 0.9, 4), (0.5, 3000, 0.8, 5)]
    params += [OFF._replace(min_p=0.05), OFF._replace(typical_p=0.7), RowSettings(1.0, 50, 0.9, 0, 0.01, 0.9)]
    rows = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6, 7])
    on_cpu = SamplingTensors.from_params(params).rows(rows)
    on_gpu = SamplingTensors.from_params(params, "cuda").rows(rows.cuda())
    probs = probabilities(logits, on_cpu)
    probs_gpu = probabilities(logits.cuda(), on_gpu)
    torch.testing.assert_close(probs_gpu.cpu(), probs)
    numbers = uniform(on_cpu.seeds, rows, Stream.DRAFT)
    assert torch.equal(sample(probs.cuda(), numbers.cuda()).cpu(), sample(probs, numbers))
