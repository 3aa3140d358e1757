"""Paged attention in torch and in Triton, against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from attention_cases import AttentionCase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels.torch import attention as torch_attention

interpreter = pytest.importorskip("triton.runtime.interpreter")
triton_attention = pytest.importorskip("foredraft.kernels.triton.attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RAGGED = AttentionCase.random([3, 0, 1, 7, 2], [9, 4, 30, 2, 0], device=DEVICE)
CASES = {
    "ragged": RAGGED,
    "decode": AttentionCase.random([1, 1, 1], [21, 21, 21], device=DEVICE),
    "fold 1": AttentionCase.random([5, 2], [8, 1], fold=1, num_kv_heads=1, device=DEVICE),
    "fold 4": AttentionCase.random([9, 1], [11, 40], fold=4, device=DEVICE),
    "fold 8": AttentionCase.random([9, 1], [0, 7], fold=8, num_kv_heads=1, device=DEVICE),
    "head 64": AttentionCase.random([2, 3], [20, 3], head_dim=64, block_size=16, device=DEVICE),
    "head 96": AttentionCase.random([2, 3], [20, 3], head_dim=96, block_size=16, device=DEVICE),
    "head 192, value 128": AttentionCase.random([2], [20], head_dim=192, value_dim=128, fold=1, device=DEVICE),
    "head 8, value 40": AttentionCase.random([2, 3], [20, 3], head_dim=8, value_dim=40, block_size=5, device=DEVICE),
    "window": AttentionCase.random([3, 10, 1], [40, 5, 3], window=6, device=DEVICE),
    "window of one": AttentionCase.random([3, 1], [9, 33], window=1, device=DEVICE),
    "origins": AttentionCase.random([3, 8, 1], [30, 5, 19], origins=[21, 5, 19], device=DEVICE),
    "window and origins": AttentionCase.random([3, 9], [30, 5], origins=[26, 3], window=8, device=DEVICE),
    "bias": AttentionCase.random([3, 9, 1], [30, 5, 8], extent=12, device=DEVICE),
    "bias, window": AttentionCase.random([3, 9], [30, 5], extent=40, window=10, origins=[0, 4], device=DEVICE),
    "float16": AttentionCase.random([3, 1], [30, 50], dtype=torch.float16, device=DEVICE),
    "bfloat16": AttentionCase.random([3, 1], [30, 50], dtype=torch.bfloat16, device=DEVICE),
    "bfloat16, bias": AttentionCase.random([3, 1], [30, 50], extent=9, dtype=torch.bfloat16, device=DEVICE),
}
OTHERS = {
    "sinks": RAGGED.with_sinks(),
    "sinks, bias, window": CASES["bias, window"].with_sinks(),
    "sinks, bfloat16": CASES["bfloat16"].with_sinks(),
    "chosen": RAGGED.with_chosen(),
    "chosen, origins": CASES["origins"].with_chosen(0.1),
    "chosen, bias, sinks": CASES["bias"].with_chosen().with_sinks(),
    "heads of 576": AttentionCase.random([2, 1], [9, 3], head_dim=576, value_dim=512, num_kv_heads=1, device=DEVICE),
}
"""What torch's kernel alone computes, on a GPU too."""
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 reads the bounds of loops by int(array of one number), which numpy 2.4 has no more, and multiplies the
    bits of bfloat16 as if they were integers."""
    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_bounds(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot_of_floats(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype == interpreter.tl.bfloat16:
            a, b = (builder.cast_impl(factor, interpreter.tl.float32) for factor in (a, b))
        return create_dot(builder, a, b, *others)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_bounds)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_floats)


def arguments(case: AttentionCase) -> dict[str, Any]:
    given = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return {name: value for name, value in given.items() if value is not None or name in ("window", "bias")}


def in_torch(case: AttentionCase) -> Tensor:
    return torch_attention.paged_attention(**arguments(case))


def in_triton(case: AttentionCase, **tiling: int) -> Tensor:
    """With the tiling that is chosen, but for what is said."""
    value_dim = case.value_cache.shape[1] // case.num_kv_heads
    chosen = triton_attention.choose_tiling(case.query, case.num_kv_heads, value_dim, case.lanes, case.block_size)
    output = triton_attention.attend_in_tiles(**arguments(case), tiling=replace(chosen, **tiling))
    assert isinstance(output, Tensor)
    return output


@each_case
def test_torch_is_right(case: AttentionCase) -> None:
    case.assert_right(in_torch(case))


@each_case
def test_triton_is_right(case: AttentionCase) -> None:
    output = triton_attention.paged_attention(**arguments(case))
    case.assert_right(output)


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("most", [1 << 26, 400])
def test_other_terms_are_right(case: AttentionCase, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece, and a few rows at a time; Triton's hands them on."""
    monkeypatch.setattr(torch_attention, "_MAX_SCORES", most)
    for paged_attention in (torch_attention.paged_attention, triton_attention.paged_attention):
        case.assert_right(paged_attention(**arguments(case)))


@pytest.mark.parametrize("num_splits", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", ["ragged", "window and origins", "bias", "bfloat16"])
def test_any_number_of_splits_is_right(kind: str, num_splits: int) -> None:
    """9 are more than there are tiles of keys."""
    CASES[kind].assert_right(in_triton(CASES[kind], num_splits=num_splits, block_n=16))


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_any_tile_is_right(block_n: int) -> None:
    """A tile of 16 folded rows of 3 heads each ends within a row."""
    RAGGED.assert_right(in_triton(RAGGED, block_m=16, block_n=block_n))


@pytest.mark.parametrize("run", [in_torch, in_triton, lambda case: in_triton(case, num_splits=3, block_n=16)])
@pytest.mark.parametrize("kind", ["ragged", "window", "window and origins", "bias, window", "head 96", "bfloat16"])
def test_what_nobody_sees_is_not_read(kind: str, run: Callable[[AttentionCase], Tensor]) -> None:
    case = CASES[kind]
    poisoned = case.poisoned()
    assert poisoned.key_cache.isnan().any()
    rows = case.flat_rows()
    assert torch.equal(run(poisoned)[rows], run(case)[rows])


@pytest.mark.parametrize("run", [in_torch, in_triton])
def test_caches_and_queries_may_be_parts_of_wider_rows(run: Callable[[AttentionCase], Tensor]) -> None:
    """As a projection to queries, keys and values at once gives them."""

    def within_wider(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]]

    query, key_cache, value_cache = map(within_wider, (RAGGED.query, RAGGED.key_cache, RAGGED.value_cache))
    RAGGED.assert_right(run(replace(RAGGED, query=query, key_cache=key_cache, value_cache=value_cache)))


@pytest.mark.parametrize("run", [in_torch, in_triton])
def test_no_lanes_and_no_rows(run: Callable[[AttentionCase], Tensor]) -> None:
    for case in (AttentionCase.random([], []), AttentionCase.random([0, 0], [5, 9])):
        assert run(case).shape == case.query.shape


def test_a_bound_of_rows_may_be_loose() -> None:
    loose = replace(RAGGED, lanes=replace(RAGGED.lanes, max_num_rows=40))
    RAGGED.assert_right(in_triton(loose))
    RAGGED.assert_right(in_triton(loose, num_splits=2, block_n=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (64, 64), (96, 96), (192, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize("num_lanes", [1, 16, 128])
@pytest.mark.parametrize("num_rows", [1, 9, 1024])
def test_the_chosen_tiling_fits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, value_dim: int, num_lanes: int, num_rows: int
) -> None:
    """Powers of two; tiles within the 227 KiB of shared memory of a multiprocessor; half of a thread's registers."""
    monkeypatch.setattr(triton_attention, "_num_multiprocessors", lambda device: 132)
    case = AttentionCase.random([0] * num_lanes, [0] * num_lanes, head_dim=head_dim, fold=4, num_kv_heads=8)
    lanes = replace(case.lanes, max_num_rows=num_rows, block_tables=torch.zeros(num_lanes, 512, dtype=torch.int32))
    tiling = triton_attention.choose_tiling(case.query.to(dtype), 8, value_dim, lanes, 16)
    sizes = asdict(tiling)
    assert all(size & (size - 1) == 0 for name, size in sizes.items() if name != "num_stages")
    padded = max(16, 1 << (head_dim - 1).bit_length())
    in_shared = ((tiling.num_stages - 1) * 2 * tiling.block_n + tiling.block_m) * padded * dtype.itemsize
    assert in_shared <= 200 * 1024
    assert tiling.block_m * padded <= 128 * 32 * tiling.num_warps
    if num_rows == 1024 or num_lanes == 128:
        assert tiling.num_splits == 1
    elif num_rows == 1:
        assert tiling.num_splits > 1


@settings(max_examples=40)
@given(data=st.data())
def test_torch_is_right_on_any_lanes(data: st.DataObject) -> None:
    first_rows = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5), label="first_rows")
    case = AttentionCase.random(
        num_rows=[data.draw(st.integers(0, 6), label="num_rows") for _ in first_rows],
        first_rows=first_rows,
        origins=[data.draw(st.integers(0, row), label="origin") for row in first_rows],
        num_kv_heads=data.draw(st.sampled_from([1, 2]), label="num_kv_heads"),
        fold=data.draw(st.sampled_from([1, 3]), label="fold"),
        value_dim=data.draw(st.sampled_from([8, 16]), label="value_dim"),
        block_size=data.draw(st.sampled_from([1, 3, 4, 16]), label="block_size"),
        window=data.draw(st.none() | st.integers(1, 12), label="window"),
        extent=data.draw(st.none() | st.integers(1, 12), label="extent"),
        seed=data.draw(st.integers(0, 9), label="seed"),
    )
    if len(case.flat_rows()):
        case.assert_right(in_torch(case))
    assert not in_torch(case.poisoned())[case.flat_rows()].isnan().any()
