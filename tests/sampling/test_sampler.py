"""Filters and draws: equal to transformers' warpers, exact on ties, and each row by itself."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foredraft.sampling.philox import Stream, uniform
from foredraft.sampling.sampler import SamplingTensors, greedy, probabilities, sample

ALMOST_ONE = 1 - 2.0**-53  # the largest number a generator of 53 bits gives
Params = tuple[float, int, float, int]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def filtered(logits: Tensor, *params: Params) -> Tensor:
    """Probabilities of each row under each of `params`, or of all rows under the only one."""
    rows = params * len(logits) if len(params) == 1 else params
    return probabilities(logits, SamplingTensors.from_params(rows))


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(ids, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(ids, logits)
    return logits.softmax(dim=-1)


def kept(probs: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in probs]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_host_side_flags() -> None:
    def flags(*params: Params) -> tuple[bool, bool, bool, int]:
        sampling = SamplingTensors.from_params(params)
        assert sampling.is_greedy == sampling.all_greedy
        return sampling.all_greedy, sampling.any_top_k, sampling.any_top_p, sampling.num_candidates

    assert flags((0.0, 0, 1.0, 0)) == (True, False, False, 0)
    assert flags((0.0, 9, 0.5, 0)) == (True, False, False, 0)  # filters change nothing in a greedy row
    assert flags((0.0, 0, 1.0, 0), (1.0, 0, 1.0, 0)) == (False, False, False, 0)
    assert flags((1.0, 9, 1.0, 0), (1.0, 20, 0.5, 0), (1.0, 0, 1.0, 0)) == (False, True, True, 20)
    assert flags((1.0, 9, 1.0, 0), (1.0, 0, 0.5, 0)) == (False, True, True, 0)


def test_settings_are_expanded_to_rows() -> None:
    sampling = SamplingTensors.from_params([(0.5, 3, 0.9, 7), (0.0, 0, 1.0, 2**64 - 1)])
    rows = sampling.rows(torch.tensor([1, 0, 0]))
    assert rows.seeds.tolist() == [-1, 7, 7]
    assert rows.temperature.tolist() == [0.0, 0.5, 0.5]
    assert rows.top_k.tolist() == [0, 3, 3]
    assert rows.top_p.tolist() == pytest.approx([1.0, 0.9, 0.9])
    assert (rows.any_top_k, rows.any_top_p, rows.all_greedy, rows.num_candidates) == (True, True, False, 3)
    dtypes = [tensor.dtype for tensor in (rows.temperature, rows.top_k, rows.top_p, rows.seeds)]
    assert dtypes == [torch.float32, torch.int64, torch.float32, torch.int64]


# --- probabilities ----------------------------------------------------------------------------------------------------


SETTINGS = list(product([0.3, 1.0, 1.7], [0, 1, 5, 40, 1000], [0.01, 0.35, 0.9, 0.999, 1.0]))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_equal_to_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(16, 100)
    probs = filtered(logits, (temperature, top_k, top_p, 0))
    expected = warped(logits, temperature, top_k, top_p)
    assert kept(probs) == kept(expected)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)


def test_equal_to_transformers_with_all_settings_in_one_batch() -> None:
    logits = random_logits(len(SETTINGS), 100)
    probs = filtered(logits, *((*setting, 0) for setting in SETTINGS))
    expected = torch.cat([warped(logits[row : row + 1], *setting) for row, setting in enumerate(SETTINGS)])
    assert kept(probs) == kept(expected)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [5.0, 0.5, 0.0001])  # nuclei of a few, hundreds and thousands of tokens
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (50, 0.9), (3000, 0.9), (3000, 1.0)])
def test_equal_to_transformers_with_a_large_vocabulary(scale: float, top_k: int, top_p: float) -> None:
    logits = random_logits(4, 6000, scale=scale)
    probs = filtered(logits, (1.0, top_k, top_p, 0))
    expected = warped(logits, 1.0, top_k, top_p)
    is_kept, is_expected = probs > 0, expected > 0
    # The running sums of the two differ in the last digits: of a flat distribution, the token at the edge may too.
    assert ((is_kept != is_expected).sum(dim=1) <= (0 if scale == 5.0 else 1)).all()
    both = is_kept & is_expected
    torch.testing.assert_close(probs[both], expected[both], rtol=1e-3, atol=0.0)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0]),
            st.sampled_from([0, 1, 2, 7, 2000, 10_000]),
            st.sampled_from([0.0, 0.2, 0.9, 1.0]),
            st.just(0),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([8, 2500]),
    st.integers(0, 2**32),
)
def test_a_row_depends_on_its_own_settings_only(params: list[Params], vocab_size: int, seed: int) -> None:
    logits = random_logits(len(params), vocab_size, seed).round()  # rounded: with ties
    probs = filtered(logits, *params)
    for row, setting in enumerate(params):
        assert torch.equal(probs[row], filtered(logits[row : row + 1], setting)[0])
    assert torch.allclose(probs.sum(dim=1), torch.ones(len(params)), atol=1e-5)


def test_top_p_is_a_share_of_what_top_k_has_left_in_any_company() -> None:
    """With a limit between the few candidates that are looked at first and the whole vocabulary."""
    logits = random_logits(2, 2500, 18).round()
    setting = (2.0, 2000, 0.2, 0)
    probs = (logits[0].double() / 2.0).softmax(dim=0)
    ranked = probs.sort(descending=True, stable=True).values[:2000]
    num_kept = int((ranked.cumsum(0) - ranked < 0.2 * ranked.sum()).sum())
    alone = filtered(logits[:1], setting)[0]
    together = filtered(logits, setting, (1e-06, 2000, 1.0, 0))[0]
    assert int((alone > 0).sum()) == int((together > 0).sum()) == num_kept
    assert torch.equal(alone, together)


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


def test_top_k_of_one_is_greedy_under_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0, 1.0]]).expand(50, -1)
    sampling = SamplingTensors.from_params([(1.0, 1, 1.0, seed) for seed in range(50)])
    numbers = uniform(sampling.seeds, torch.zeros(50, dtype=torch.int64), Stream.RECOVER)
    assert set(sample(probabilities(logits, sampling), numbers).tolist()) == {1}


@pytest.mark.parametrize("params", [(1e-6, 0, 1.0, 0), (1e-6, 2, 0.5, 0), (1e-38, 0, 0.9, 0), (1.0, 3, 1.0, 0)])
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
    for params in ((1.0, 0, 1.0, 0), (1.0, 40, 1.0, 0), (1.5, 0, 0.99, 0), (0.0, 0, 1.0, 0)):
        probs = filtered(logits, params)
        assert probs[:, ::2].count_nonzero() == 0
        assert torch.allclose(probs.sum(dim=1), torch.ones(4))


def test_half_precision_is_computed_in_float32() -> None:
    logits = random_logits(8, 300).bfloat16()
    for params in ((0.7, 0, 1.0, 0), (0.7, 20, 0.9, 0)):
        probs = filtered(logits, params)
        assert probs.dtype == torch.float32
        assert torch.equal(probs, filtered(logits.float(), params))


def test_nothing_is_ranked_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError

    for name in ("sort", "topk"):
        monkeypatch.setattr(Tensor, name, refuse)
    logits = random_logits(2, 2000)
    filtered(logits, (0.0, 0, 1.0, 0), (1.0, 0, 1.0, 0))
    filtered(logits, (0.0, 5, 0.5, 0), (0.0, 0, 1.0, 0))
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
    logits = random_logits(6, 49152).round()  # rounded: with ties
    params = [(0.0, 0, 1.0, 1), (1.0, 0, 1.0, 2), (0.7, 5, 1.0, 3), (1.0, 0, 0.9, 4), (0.5, 3000, 0.8, 5)]
    rows = torch.tensor([0, 1, 2, 3, 4, 4])
    on_cpu = SamplingTensors.from_params(params).rows(rows)
    on_gpu = SamplingTensors.from_params(params, "cuda").rows(rows.cuda())
    probs = probabilities(logits, on_cpu)
    probs_gpu = probabilities(logits.cuda(), on_gpu)
    torch.testing.assert_close(probs_gpu.cpu(), probs)
    numbers = uniform(on_cpu.seeds, rows, Stream.DRAFT)
    assert torch.equal(sample(probs.cuda(), numbers.cuda()).cpu(), sample(probs, numbers))
