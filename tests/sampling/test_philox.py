"""The random numbers: the published generator, and nothing but (seed, position, stream) in them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from foredraft.sampling.philox import Stream, philox4x32, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)
WORDS = st.integers(0, 2**32 - 1)

# Counter, key and result, from the file kat_vectors of Random123, the authors' own implementation.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def from_hex(words: str) -> list[int]:
    return [int(word, 16) for word in words.split()]


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 as the paper writes it, in Python's unbounded integers."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def reference_uniform(seed: int, position: int, stream: Stream) -> float:
    seed, position = seed % 2**64, position % 2**64
    words = reference([position % 2**32, position >> 32, stream, 0], [seed % 2**32, seed >> 32])
    return ((words[0] >> 5 << 26) + (words[1] >> 6)) / 2**53


def draw(seed: int, position: int, stream: Stream) -> float:
    return uniform(torch.tensor([seed]), torch.tensor([position]), stream).item()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_published_answers(counter: str, key: str, result: str) -> None:
    words = philox4x32(torch.tensor(from_hex(counter)), torch.tensor(from_hex(key)))
    assert words.tolist() == from_hex(result) == reference(from_hex(counter), from_hex(key))


@settings(deadline=None)
@given(st.lists(st.tuples(*[WORDS] * 6), min_size=1, max_size=8))
def test_core_equals_plain_integers(blocks: list[tuple[int, ...]]) -> None:
    words = philox4x32(torch.tensor([b[:4] for b in blocks]).T, torch.tensor([b[4:] for b in blocks]).T)
    assert words.T.tolist() == [reference(list(b[:4]), list(b[4:])) for b in blocks]


@settings(deadline=None)
@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=8), st.sampled_from(Stream))
def test_uniform_is_a_function_of_seed_position_and_stream(pairs: list[tuple[int, int]], stream: Stream) -> None:
    seeds, positions = torch.tensor(pairs).T
    numbers = uniform(seeds, positions, stream)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [reference_uniform(seed, position, stream) for seed, position in pairs]


@settings(deadline=None)
@given(INT64, INT64, st.integers(0, 63))
def test_every_bit_of_seed_and_position_counts(seed: int, position: int, bit: int) -> None:
    flip = 1 << bit if bit < 63 else -(1 << 63)
    number = draw(seed, position, Stream.DRAFT)
    assert number != draw(seed ^ flip, position, Stream.DRAFT)
    assert number != draw(seed, position ^ flip, Stream.DRAFT)
    assert len({draw(seed, position, stream) for stream in Stream}) == len(Stream)


def test_shapes_broadcast() -> None:
    seeds, positions = torch.arange(3), torch.arange(5)
    table = uniform(seeds[:, None], positions, Stream.ACCEPT)
    assert table.shape == (3, 5)
    assert table[2, 4].item() == reference_uniform(2, 4, Stream.ACCEPT)
    assert uniform(seeds[:, None], positions[:0], Stream.ACCEPT).shape == (3, 0)


@pytest.mark.parametrize("stream", Stream)
def test_numbers_are_uniform_over_positions_and_over_seeds(stream: Stream) -> None:
    index = torch.arange(50_000)
    for numbers in (uniform(torch.tensor(1), index, stream), uniform(index, torch.tensor(1), stream)):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3
        # The last bits, and a number against its neighbour: the parts a poor mapping spoils first.
        last_bits = (numbers * 2**53).long() & 15
        assert stats.chisquare(torch.bincount(last_bits, minlength=16).numpy()).pvalue > 1e-3
        pairs = (numbers[:-1:2] * 8).long() * 8 + (numbers[1::2] * 8).long()
        assert stats.chisquare(torch.bincount(pairs, minlength=64).numpy()).pvalue > 1e-3


def test_streams_are_independent() -> None:
    index = torch.arange(20_000)
    draft, accept, recover, _ = (uniform(torch.tensor(3), index, stream) for stream in Stream)
    for first, second in ((draft, accept), (accept, recover), (draft, recover)):
        cells = torch.bincount((first * 8).long() * 8 + (second * 8).long(), minlength=64)
        assert stats.chisquare(cells.numpy()).pvalue > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_numbers_on_a_gpu() -> None:
    seeds, positions = torch.arange(-500, 500) * 2**53, torch.arange(1000) * 2**40
    on_gpu = uniform(seeds.cuda(), positions.cuda(), Stream.RECOVER)
    assert torch.equal(on_gpu.cpu(), uniform(seeds, positions, Stream.RECOVER))
