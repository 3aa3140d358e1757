"""Random numbers without state: each is a function of a seed, a position and a purpose.

A stateful generator makes a result depend on what else has been drawn from it: on the batch, on the number of steps so
far, on preemptions. A counter-based one (Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) has nothing to depend on.
"""

from enum import IntEnum

import torch
from torch import Tensor

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key from round to round
_MASK = 0xFFFFFFFF


class Stream(IntEnum):
    """What a number is for. Numbers of different streams are independent even at the same seed and position."""

    DRAFT = 0  # drawing a draft token
    ACCEPT = 1  # accepting or rejecting it
    RECOVER = 2  # drawing the recovered or the bonus token
    CHOICE = 3  # deriving the seeds of further choices


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of choice number `index` of a request with `seed`: its own for the first, and independent ones after it.

    Returns 63 bits.
    """
    if index == 0:
        return seed
    counter = torch.tensor([index, 0, int(Stream.CHOICE), 0])
    words = philox4x32(counter, torch.tensor([seed & _MASK, (seed >> 32) & _MASK])).tolist()
    return int(words[0]) << 31 | int(words[1]) >> 1


def uniform(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Draw one number in [0, 1) for every (seed, position): the same one on any device and in any batch.

    seeds, positions: int64, of shapes that broadcast; all 64 bits of both count. Returns float64 of the common shape,
    multiples of 2**-53.
    """
    seeds, positions = seeds + torch.zeros_like(positions), positions + torch.zeros_like(seeds)
    counter = torch.stack(
        [positions & _MASK, _high(positions), torch.full_like(positions, int(stream)), torch.zeros_like(positions)]
    )
    words = philox4x32(counter, torch.stack([seeds & _MASK, _high(seeds)]))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def cycle_keys(positions: Tensor, depths: Tensor | int) -> Tensor:
    """Return positions for `uniform` that no other cycle of a sequence uses, not even for the same tokens.

    positions int64, of a cycle's draft 0; depths int64, counted from there, in a shape that broadcasts. Each position
    begins one cycle at most. Returns int64 of the common shape.
    """
    return positions + (depths << 32)  # the upper word of a position, which sequences are too short to use


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Apply the ten-round Philox-4x32 bijection.

    counter [4, ...] and key [2, ...]: int64 that hold 32-bit words. Returns words of the counter's shape.
    """
    # Both halves of a round are done at once, on pairs [2, ...]: words 0 and 2 are multiplied, words 3 and 1 are mixed
    # in. The pair of odd words is kept in swapped order, so that one flip a round is enough.
    even, odd = counter[0::2], counter[1::2].flip(0)
    multipliers, weyl = _pair(_MULTIPLIERS, key), _pair(_WEYL, key)
    for _ in range(_NUM_ROUNDS):
        product = even * multipliers  # wraps around in int64, where the bit pattern is that of the unsigned product
        even, odd = (_high(product) ^ odd).flip(0) ^ key, product & _MASK
        key = (key + weyl) & _MASK
    return torch.stack([even[0], odd[1], even[1], odd[0]])


def _high(words: Tensor) -> Tensor:
    """Return the upper 32 bits of 64, unsigned."""
    return (words >> 32) & _MASK


def _pair(constants: tuple[int, int], like: Tensor) -> Tensor:
    # Filled on the device: copying a host tensor there would stall it, and cannot be captured in a CUDA graph.
    return torch.stack([torch.full_like(like[0], constant) for constant in constants])
