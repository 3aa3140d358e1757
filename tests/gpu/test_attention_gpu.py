"""Paged attention at real sizes on a CUDA device, against float64, and from a captured graph."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_cases import AttentionCase
from torch import Tensor

from foredraft.kernels.lanes import Lanes

triton_attention = pytest.importorskip("foredraft.kernels.triton.attention")

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32]
# Key heads, query heads to each, head size, value size.
SHAPES = [(8, 4, 128, 128), (3, 3, 64, 64), (2, 8, 96, 96), (4, 1, 192, 128), (2, 2, 256, 256), (2, 3, 16, 16)]


def attend(case: AttentionCase) -> Tensor:
    output = triton_attention.paged_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.lanes,
        case.block_size,
        case.scale,
        case.window,
        case.bias,
    )
    assert isinstance(output, Tensor)
    return output


def random_case(
    shape: tuple[int, int, int, int], dtype: torch.dtype, num_lanes: int, most_rows: int, most_keys: int, **options: int
) -> AttentionCase:
    """Other numbers in every run; the seed is in the case's name of a failure."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{seed=}")
    rng = random.Random(seed)
    num_rows = [rng.randint(1, most_rows) for _ in range(num_lanes)]
    first_rows = [rng.randint(0, most_keys - count) for count in num_rows]
    num_kv_heads, fold, head_dim, value_dim = shape
    return AttentionCase.random(
        num_rows,
        first_rows,
        origins=[rng.choice([0, rng.randint(0, row)]) for row in first_rows],
        num_kv_heads=num_kv_heads,
        fold=fold,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=16,
        dtype=dtype,
        device="cuda",
        seed=seed,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("num_lanes", "most_rows", "most_keys"), [(1, 1, 5000), (5, 9, 5000), (40, 9, 1000), (128, 1, 300), (2, 1024, 1024)]
)
def test_right_at_real_sizes(
    shape: tuple[int, int, int, int], dtype: torch.dtype, num_lanes: int, most_rows: int, most_keys: int
) -> None:
    case = random_case(shape, dtype, num_lanes, most_rows, most_keys)
    case.assert_right(attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"window": 512}, {"extent": 1000}, {"window": 100, "extent": 300}])
@pytest.mark.parametrize(("num_lanes", "most_rows"), [(3, 9), (2, 400)])
def test_windows_and_bias_at_real_sizes(
    options: dict[str, int], dtype: torch.dtype, num_lanes: int, most_rows: int
) -> None:
    case = random_case((4, 2, 128, 128), dtype, num_lanes, most_rows, 3000, **options)
    case.assert_right(attend(case))


@pytest.mark.parametrize("num_lanes", [2, 64])
def test_what_nobody_sees_is_not_read(num_lanes: int) -> None:
    case = random_case((3, 3, 64, 64), torch.bfloat16, num_lanes, 9, 700, window=256)
    rows = case.flat_rows()
    assert torch.equal(attend(case.poisoned())[rows], attend(case)[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_lanes", [1, 4, 64])
def test_a_captured_graph_serves_all_lengths(num_lanes: int, dtype: torch.dtype) -> None:
    """The same launches, with other lengths, rows and blocks in the tensors that they read."""
    longest = AttentionCase.random(
        [9] * num_lanes, [1991] * num_lanes, fold=4, head_dim=128, block_size=16, dtype=dtype, device="cuda"
    )
    attend(longest)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(longest)
    lanes = longest.lanes
    tables = lanes.block_tables.clone()
    for length in (2000, 1, 37, 700):
        num_rows = torch.randint(0, min(9, length) + 1, (num_lanes,), device="cuda", dtype=torch.int32)
        lanes.num_rows.copy_(num_rows)
        lanes.first_rows.copy_(length - num_rows)
        lanes.block_tables.copy_(tables.roll(length, 0))
        graph.replay()
        assert torch.equal(output[longest.flat_rows()], attend(longest)[longest.flat_rows()])
        if num_rows.any():
            longest.assert_right(output)


def test_rows_of_caches_beyond_32_bits() -> None:
    """The last slots of a cache of more than 2 ** 31 numbers."""
    case = AttentionCase.random([2], [100], num_kv_heads=8, fold=1, head_dim=128, dtype=torch.bfloat16, device="cuda")
    num_slots = 2**31 // 1024 + 4096
    first_block = (num_slots - len(case.key_cache)) // case.block_size
    key_cache = torch.zeros(num_slots, 1024, dtype=torch.bfloat16, device="cuda")
    value_cache = torch.zeros_like(key_cache)
    for wide, own in ((key_cache, case.key_cache), (value_cache, case.value_cache)):
        wide[first_block * case.block_size :][: len(own)] = own
    lanes: Lanes = replace(case.lanes, block_tables=case.lanes.block_tables + first_block)
    far = replace(case, key_cache=key_cache, value_cache=value_cache, lanes=lanes)
    case.assert_right(attend(far))
