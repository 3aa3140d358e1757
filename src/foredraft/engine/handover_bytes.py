"""How a handover is laid out in bytes, in a file and on a socket alike.

    8 bytes    MAGIC
    8 bytes    how many bytes the header has, little-endian
    header     JSON in UTF-8; it says which tensors follow
    32 bytes   BLAKE2b of the header
    tensors    the bytes of each, one after the other
    32 bytes   BLAKE2b of all tensors

The digests tell bytes that were lost or changed on their way. They do not tell who has sent them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import HandoverError

MAGIC = b"FDHANDOV"
PIECE_BYTES = 8 << 20
"""Bytes that are written, read and digested at once."""
MAX_HEADER_BYTES = 256 << 20
MAX_TENSORS = 1 << 16
DIGEST_BYTES = 32
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)} | {
    str(dtype): dtype for dtype in (torch.int32, torch.uint8, torch.int8, torch.bool)
}

Sink = Callable[[memoryview], object]
"""Takes all of the bytes that it is given."""
Source = Callable[[memoryview], None]
"""Fills the memory that it is given; raises HandoverError where there are fewer bytes."""


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A tensor of a handover, contiguous on the CPU. first: of rows of a sequence, the number of the first."""

    name: str
    tensor: Tensor
    first: int = 0


def write_bytes(header: Mapping[str, Any], tensors: Sequence[NamedTensor], sink: Sink) -> None:
    """Hand all bytes of a handover to `sink`, a piece at a time. OSError and HandoverError as `sink` raises them."""
    listed = [[one.name, str(one.tensor.dtype), list(one.tensor.shape), one.first] for one in tensors]
    text = json.dumps({**header, "tensors": listed}, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise HandoverError(f"the header has {len(text)} bytes, and may have {MAX_HEADER_BYTES}")
    sink(memoryview(MAGIC + len(text).to_bytes(8, "little") + text + _digest(text)))
    digest = blake2b(digest_size=DIGEST_BYTES)
    for one in tensors:
        for piece in _pieces(one.tensor):
            digest.update(piece)
            sink(piece)
    sink(memoryview(digest.digest()))


def read_bytes(source: Source) -> tuple[dict[str, Any], tuple[NamedTensor, ...]]:
    """The header and the tensors of a handover. HandoverError unless every byte is what was written."""
    start = _take(source, len(MAGIC) + 8)
    if start[: len(MAGIC)] != MAGIC:
        raise HandoverError("this is no handover: it begins with other bytes")
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if length > MAX_HEADER_BYTES:
        raise HandoverError(f"the header would have {length} bytes, and may have {MAX_HEADER_BYTES}")
    text = _take(source, length)
    if _take(source, DIGEST_BYTES) != _digest(text):
        raise HandoverError("the header was changed on its way: its digest is wrong")
    try:
        header = json.loads(text)
        entries = header.pop("tensors")
        if len(entries) > MAX_TENSORS:
            raise ValueError(f"{len(entries)} tensors, of {MAX_TENSORS} at most")
        listed = [_empty(*entry) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise HandoverError(f"the header cannot be understood: {error!r:.200}") from error
    digest = blake2b(digest_size=DIGEST_BYTES)
    tensors = []
    for name, dtype, shape, first in listed:
        try:
            tensor = torch.empty(shape, dtype=dtype)  # which takes memory as it is filled
        except RuntimeError as error:
            raise HandoverError(f"there is no memory for {name:.60}, {dtype} {shape}") from error
        for piece in _pieces(tensor):
            source(piece)
            digest.update(piece)
        tensors.append(NamedTensor(name, tensor, first))
    if _take(source, DIGEST_BYTES) != digest.digest():
        raise HandoverError("the rows were changed on their way: their digest is wrong")
    return header, tuple(tensors)


def _empty(name: object, dtype: object, shape: object, first: object) -> tuple[str, torch.dtype, list[int], int]:
    """Raises ValueError unless an entry of the header describes a tensor."""
    numbers = [first, *shape] if isinstance(shape, list) else [None]
    if not isinstance(name, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r:.60} of {dtype!r:.40}")
    if any(type(number) is not int or not 0 <= number < 2**48 for number in numbers):
        raise ValueError(f"{name:.60} has shape {shape!r:.60} from {first!r:.40}")
    assert isinstance(shape, list)
    assert isinstance(first, int)
    assert isinstance(dtype, str)
    if prod(shape) >= 2**48:
        raise ValueError(f"{name:.60} has shape {shape!r:.60}")
    return name, DTYPES[dtype], shape, first


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a contiguous tensor, no more than PIECE_BYTES at a time."""
    data = tensor.detach().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _take(source: Source, count: int) -> bytes:
    data = bytearray(count)
    for start in range(0, count, PIECE_BYTES):
        source(memoryview(data)[start : start + PIECE_BYTES])
    return bytes(data)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
