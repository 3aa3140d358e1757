"""What models compute with: one set of kernels for each kind of device."""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from foredraft.kernels.lanes import Lanes

KernelsName = Literal["torch", "triton"]


class Kernels(Protocol):
    """The kernels of a device, with equal results up to rounding.

    Sums are made in float32, and rounded to the dtype of the input where transformers' Llama rounds them. Tensors of
    numbers are of one dtype and on one device. Their last dimension is contiguous, their rows may lie apart. T is the
    number of rows in the flat batch. The Triton kernels never wait for the device: CUDA graphs may capture them.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of x [T, H] divided by its root mean square, rounded, and times weight [H]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm` of x + residual, both [T, H], and that sum, rounded."""
        ...

    def join_rms_norms(self, x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float) -> Tensor:
        """`rms_norm` of x and of y, both [T, H], each with a weight of its own, side by side: [T, 2 * H]."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Turn queries and keys by their positions, write keys and values to the cache, and return the queries.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: heads of queries, of keys, then of values. positions [T]
        (int64) index cos and sin [P, R], which are transformers' own: both halves of a row are equal. The first R <=
        head_dim numbers of a head turn. q_norm and k_norm [head_dim], both or neither, are the weights of an RMSNorm of
        each head before that. Rows slots [T] (int64) of key_cache and value_cache [num_slots, num_kv_heads * head_dim]
        are written. Where slots repeat, the row of any of them stays.

        Returns [T, num_heads, head_dim]; heads are contiguous, rows may lie apart.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate), rounded, times up: both [T, I], side by side in gate_up [T, 2 * I], gate first."""
        ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        lanes: Lanes,
        block_size: int,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [T, num_heads, head_dim] over the rows of its own sequences in the cache.

        key_cache is [num_slots, num_kv_heads * head_dim], value_cache [num_slots, num_kv_heads * value_dim]. Row r of
        block b is slot b * block_size + r. Query heads share a key head in runs of num_heads // num_kv_heads. The query
        at row i of its sequence sees the keys j with max(origin, i - window + 1) <= j <= i, and `bias` [T, num_heads,
        extent] is added to the scaled score at distance i - j < extent. Each head's sink [num_heads] takes part in the
        softmax as the score of a key without a value. A row sees only the keys j with chosen[row, j], [T, N] bool.

        Returns [T, num_heads, value_dim]. Rows in no lane may hold anything, before and after.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, K] times the transpose of weight [N, K], plus bias [N], rounded, plus residual [T, N]: [T, N]."""
        ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(x times gate) times (x times up): weight [2 * I, K] holds the rows of the gate, then of up. [T, I]."""
        ...

    def argmax_head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The token [T] (int64) with the largest of hidden [T, H] times weight [V, H], plus bias [V]: the lowest on a
        tie."""
        ...


def kernels_of(device: torch.device) -> Kernels:
    """Triton's on CUDA, torch's on any other device."""
    return kernels_named("triton" if device.type == "cuda" else "torch")


@cache
def kernels_named(name: KernelsName) -> Kernels:
    """A set of kernels, whatever the device: torch's run on any, Triton's on CUDA or in Triton's interpreter.

    Triton is imported when it is first asked for. Raises ImportError if it is not installed.
    """
    return _triton_kernels() if name == "triton" else _torch_kernels()


def _torch_kernels() -> Kernels:
    from foredraft.kernels.torch import activation, attention, matmul, norm, rotary

    class TorchKernels:
        rms_norm = staticmethod(norm.rms_norm)
        add_rms_norm = staticmethod(norm.add_rms_norm)
        join_rms_norms = staticmethod(norm.join_rms_norms)
        rotate_and_store = staticmethod(rotary.rotate_and_store)
        silu_and_mul = staticmethod(activation.silu_and_mul)
        paged_attention = staticmethod(attention.paged_attention)
        linear = staticmethod(matmul.linear)
        gated_linear = staticmethod(matmul.gated_linear)
        argmax_head = staticmethod(matmul.argmax_head)

    return TorchKernels()


def _triton_kernels() -> Kernels:
    from foredraft.kernels.triton import activation, attention, matmul, norm, rotary

    class TritonKernels:
        rms_norm = staticmethod(norm.rms_norm)
        add_rms_norm = staticmethod(norm.add_rms_norm)
        join_rms_norms = staticmethod(norm.join_rms_norms)
        rotate_and_store = staticmethod(rotary.rotate_and_store)
        silu_and_mul = staticmethod(activation.silu_and_mul)
        paged_attention = staticmethod(attention.paged_attention)
        linear = staticmethod(matmul.linear)
        gated_linear = staticmethod(matmul.gated_linear)
        argmax_head = staticmethod(matmul.argmax_head)

    return TritonKernels()
