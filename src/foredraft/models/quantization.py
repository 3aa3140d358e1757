"""Linear layers in int8 on a CPU, in which rows of a batch do not disturb each other."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigError

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""What mixtures of experts call layers whose few outputs choose among experts: a rounding there is a wrong expert."""
_product: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale for each output, and int8 activations, one scale for each row.

    Sums are of integers, so a row's result is bit for bit what it is without the other rows. Torch's own dynamic layer
    has one scale for the whole batch, with which the result of a row depends on its company.

    weight [N, K]: numbers to be quantised or, with their `scale` [N], int8 already. bias [N] or None. The layer takes
    float32 [..., K] and returns float32 [..., N]. A row with an infinity or a NaN has nothing else in its result.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> None:
        super().__init__()
        if scale is None:
            weight, scale = _quantize_rows(weight)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        self._packed = _pack(weight, scale)
        self._levels = _activation_levels()

    @classmethod
    def join(cls, parts: Sequence[Int8Linear]) -> Int8Linear:
        """One layer with the outputs of all parts, end to end, each as it was. All have a bias, or none has."""
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases) if biases else None
        return cls(torch.cat([part.weight for part in parts]), bias, torch.cat([part.scale for part in parts]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]; float32."""
        # With its largest number at 1, every row is quantised by one constant scale, inside the product. A row of zeros
        # becomes NaN, then some integer or other, and that times 0. The bias is a call of its own: fused with the
        # multiplication it would round otherwise at the ends of vectors.
        largest = x.abs().amax(-1, keepdim=True)
        y: Tensor = _product(x / largest, 1 / self._levels, self._levels + 1, self._packed).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_linear_layers(*models: nn.Module | None) -> None:
    """Put an `Int8Linear` in the place of every `nn.Linear`, heads included; shared ones stay shared.

    Embeddings stay as they are, also where the head was tied to one: it becomes a copy. Raises ConfigError where torch
    has no such products, and for models that multiply by other matrices, as mixtures of experts do.
    """
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        raise ConfigError(
            f"quantization=int8 needs an x86 processor with AVX2; "
            f"torch multiplies by the engine {torch.backends.quantized.engine!r} here"
        )
    given = [model for model in models if model is not None]
    for model in given:
        _refuse_other_matrices(model)
    quantized: dict[nn.Module, Int8Linear] = {}
    for parent in [parent for model in given for parent in model.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if child not in quantized:
                    quantized[child] = Int8Linear(child.weight, child.bias)
                setattr(parent, name, quantized[child])


def _refuse_other_matrices(model: nn.Module) -> None:
    """Their products would stay in float32, where rows disturb each other: see `attention_dtype`."""
    for path, module in model.named_modules():
        is_router = path.rpartition(".")[2] in _ROUTERS
        if isinstance(module, nn.Embedding | Int8Linear) or (type(module) is nn.Linear and not is_router):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                raise ConfigError(
                    f"quantization=int8 runs models whose matrices are all ordinary linear layers, "
                    f"and {path}.{name} is a router or a matrix of another kind: leave it out"
                )


def attention_dtype(model: nn.Module) -> torch.dtype | None:
    """What the attention of `model` must be computed in so that its rows do not disturb each other; None: as it is.

    A sum in float32 depends in its last bits on the shape of the batch. Before an `Int8Linear` that is enough to turn
    the rounding of an activation, and the next layers make it larger. Of float64, rounded once, nothing is left of it.
    """
    return torch.float64 if any(isinstance(module, Int8Linear) for module in model.modules()) else None


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K], symmetric about 0, and the scale of each row [N]."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8), scale


def _pack(weight: Tensor, scale: Tensor) -> Any:
    """Weights in the layout of the product."""
    with warnings.catch_warnings():  # torch deprecates the tensor type that its packing asks for
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*", category=UserWarning)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


@functools.cache
def _activation_levels() -> int:
    """The largest integer that an activation becomes: 127, or 63 on processors without VNNI.

    Those add two products in 16 bits, where twice 255 * 127 does not fit and is cut off without a word.
    """
    weight = torch.full((1, 64), 127, dtype=torch.int8)
    sums = _product(torch.ones(1, 64), 1 / 127, 128, _pack(weight, torch.ones(1)))
    return 127 if bool(torch.isclose(sums, torch.tensor(64.0 * 127))) else 63
