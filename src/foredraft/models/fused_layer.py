"""Decoder layers of the Llama kind, run in as few operations as their arithmetic allows.

The weights are transformers' own: query, key and value (and gate and up) lie in one matrix each, of which the original
parameters become views. A layer that is not of this kind is left to transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.kernels.ops import Kernels
from foredraft.models.attention import PagedAttention, Rotation
from foredraft.models.packed import pack
from foredraft.models.quantization import Int8Linear
from foredraft.models.rotary import RotaryTable

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedNorm:
    """RMSNorm as Llama has it."""

    def __init__(self, norm: Any, kernels: Kernels) -> None:
        self._norm = norm
        self.eps = float(norm.variance_epsilon)
        self._kernels = kernels

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._norm.weight
        return weight

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the norm of hidden + residual, and that sum: the next residual."""
        if residual is None:
            return self._kernels.rms_norm(hidden, self.weight, self.eps), hidden
        return self._kernels.add_rms_norm(hidden, residual, self.weight, self.eps)


def is_plain_norm(norm: object) -> bool:
    """Whether a module looks like Llama's RMSNorm: a weight, an epsilon, nothing else."""
    return (
        isinstance(norm, nn.Module)
        and hasattr(norm, "variance_epsilon")
        and [name for name, _ in norm.named_parameters()] == ["weight"]
        and not list(norm.buffers())
    )


class FusedLayer:
    """One decoder layer over flat rows; `layer` is transformers' own, whose parameters it uses.

    Build it with `of`, and prove it against the original before it is trusted.
    """

    def __init__(self, layer: Any, kernels: Kernels) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._kernels = kernels
        self._input_norm = FusedNorm(layer.input_layernorm, kernels)
        self._post_norm = FusedNorm(layer.post_attention_layernorm, kernels)
        self._layer_idx = int(attention.layer_idx)
        self._head_dim = int(attention.head_dim)
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._scale = float(attention.scaling)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._head_norms = [norm.weight if norm is not None else None for norm in norms]
        self._head_eps = float(norms[0].variance_epsilon) if norms[0] is not None else 0.0
        self.qkv = merge_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output: nn.Module = attention.o_proj
        self._mlp = mlp
        self.gate_up: nn.Module | None = None
        if _is_gated_mlp(mlp):
            self.gate_up = merge_linear([mlp.gate_proj, mlp.up_proj])
            self.down: nn.Module = mlp.down_proj

    def pack(self) -> None:
        """Keep the weights of linear layers in the layout of the processor's products too."""
        self.qkv, self.output = pack(self.qkv), pack(self.output)
        if self.gate_up is not None:
            self.gate_up, self.down = pack(self.gate_up), pack(self.down)

    @classmethod
    def of(cls, layer: nn.Module, kernels: Kernels) -> FusedLayer | None:
        """The fused form of a decoder layer, None if it has other parts than Llama's. Merges its weights."""
        parts = {name for name, _ in layer.named_children()}
        attention = getattr(layer, "self_attn", None)
        if parts != _LAYER_PARTS or not isinstance(attention, nn.Module):
            return None
        inner = {name for name, _ in attention.named_children()}
        if not inner >= _ATTENTION_PARTS or inner - _ATTENTION_PARTS not in (set(), _HEAD_NORMS):
            return None
        projections = [getattr(attention, name) for name in sorted(_ATTENTION_PARTS)]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name) for name in inner & _HEAD_NORMS]
        if not _are_linear(projections):
            return None
        if not all(is_plain_norm(norm) for norm in norms) or not hasattr(attention, "scaling"):
            return None
        heads: Any = attention
        if heads.v_proj.out_features != heads.k_proj.out_features:
            return None
        return cls(layer, kernels)

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, rotary: RotaryTable, paged: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size], to which `residual` is still to be added; returns both for the next layer."""
        hidden, residual = self._input_norm(hidden, residual)
        rotation = Rotation(
            positions, rotary.cos, rotary.sin, self._num_heads, self._num_kv_heads, self._head_dim,
            self._head_norms[0], self._head_norms[1], self._head_eps,
        )  # fmt: skip
        qkv = apply_linear(self.qkv, hidden, self._kernels)
        attended = paged.attend_rotated(self._layer_idx, qkv, rotation, self._scale)
        hidden, residual = self._post_norm(apply_linear(self.output, attended, self._kernels), residual)
        if self.gate_up is None:
            mixed: Tensor = self._mlp(hidden.unsqueeze(0))
            return mixed[0], residual
        if type(self.gate_up) is nn.Linear and self.gate_up.bias is None:
            inner = self._kernels.gated_linear(hidden, self.gate_up.weight)
        else:
            inner = self._kernels.silu_and_mul(self.gate_up(hidden))
        return apply_linear(self.down, inner, self._kernels), residual


def apply_linear(linear: nn.Module, hidden: Tensor, kernels: Kernels) -> Tensor:
    """A linear layer by our kernels if it is torch's plain one; others (quantised ones) run as they are."""
    if type(linear) is nn.Linear:
        return kernels.linear(hidden, linear.weight, linear.bias)
    result: Tensor = linear(hidden)
    return result


def _are_linear(layers: Sequence[object]) -> bool:
    """Whether all are linear layers that can be merged: torch's own, or all in int8."""
    return {type(layer) for layer in layers} in ({nn.Linear}, {Int8Linear})


def merge_linear(parts: list[Any]) -> nn.Module:
    """One layer with the outputs of all parts, end to end; the parts' parameters become views of its own.

    Parts in int8 stay beside it as they are.
    """
    if isinstance(parts[0], Int8Linear):
        return Int8Linear.join(parts)
    weight = torch.cat([part.weight for part in parts])
    with torch.device("meta"):
        merged = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None)
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        merged.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    first = 0
    for part in parts:
        last = first + part.out_features
        part.weight.data = merged.weight.data[first:last]
        if part.bias is not None:
            part.bias.data = merged.bias.data[first:last]
        first = last
    return merged


def _is_gated_mlp(mlp: Any) -> bool:
    """Whether an MLP is down(silu(gate(x)) * up(x))."""
    if {name for name, _ in mlp.named_children()} != _MLP_PARTS:
        return False
    linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not _are_linear(linears):
        return False
    probe = torch.linspace(-4, 4, 9)
    return mlp.gate_proj.bias is None and torch.equal(mlp.act_fn(probe), F.silu(probe))
