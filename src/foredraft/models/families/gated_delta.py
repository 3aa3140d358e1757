"""Qwen3-Next and Qwen3.5: layers of gated delta net between layers of attention.

Beyond the rule:

- A gated delta net (Yang et al. 2024, arXiv 2412.06464) keeps a matrix for each head in place of keys and values, and
  changes it at every row. The engine keeps that state after a row of committed tokens, and the inputs of the rows
  behind it, and runs those again whose drafts were accepted (`models.recurrence`).
- Its short convolution reads the inputs of earlier rows from the same place.
- The module is a layer of attention, under names that transformers leaves unloaded: `mtp.fc`, `mtp.pre_fc_norm_*`,
  `mtp.layers.0`, `mtp.norm`.
- Numbers of states depend on the requests of a step, so a pass is not captured in CUDA graphs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from foredraft.models.attention import PagedAttention
from foredraft.models.families.family import Family, replace_parts

_NETS = Qwen3NextGatedDeltaNet | Qwen3_5GatedDeltaNet | Qwen3_5MoeGatedDeltaNet
_MAX_STEPS = 64
"""With more rows than this, the rule is applied in chunks instead of row by row."""


class GatedDelta(Family):
    """Qwen3-Next, Qwen3.5 and Qwen3.5 MoE."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention", "linear_attention"})
    is_capturable: ClassVar[bool] = False

    def refusal(self, config: PreTrainedConfig) -> str | None:
        text_config: Any = config.get_text_config(decoder=True)
        if (
            text_config.layer_types[-1] != "full_attention"
        ):  # transformers takes the norm of modules from the last layer
            return "the last layer must be of full attention"
        return None

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, _NETS, PagedGatedDeltaNet)


class PagedGatedDeltaNet(nn.Module):
    """A gated delta net over paged rows, with the parts of transformers' own."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        for name, child in net.named_children():
            self.add_module(name, child)
        self.dt_bias, self.A_log = net.dt_bias, net.A_log
        self._parts: Any = self._modules
        self._order: Any = net.fix_query_key_value_ordering if isinstance(net, Qwen3NextGatedDeltaNet) else None
        self._layer_idx = net.layer_idx
        self._kernel_size = net.conv_kernel_size
        self._activation = ACT2FN[net.activation]
        self._num_heads, self._key_dim, self._value_dim = net.num_v_heads, net.head_k_dim, net.head_v_dim
        self._widths = [net.key_dim, net.key_dim, net.value_dim]

    def forward(self, hidden_states: Tensor, *, paged: PagedAttention, **ignored: Any) -> Tensor:
        """hidden_states [1, T, hidden_size], as transformers calls it, and the same shape back."""
        rows, gate = self._project(hidden_states)
        sizes = (self._num_heads, self._key_dim, self._value_dim)
        mixed = paged.recur(self._layer_idx, rows, self._kernel_size - 1, sizes, self._rule)
        normed = self._parts["norm"](mixed.reshape(-1, self._value_dim), gate.reshape(-1, self._value_dim))
        output: Tensor = self._parts["out_proj"](normed.view(1, len(rows), -1))
        return output

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the rule reads of each row, [T, queries, keys, values, b and a side by side]; the gate of its output."""
        if self._order is None:
            read = [self._parts[name](hidden) for name in ("in_proj_qkv", "in_proj_b", "in_proj_a")]
            return torch.cat(read, dim=-1)[0], self._parts["in_proj_z"](hidden)[0]
        both = (self._parts[name](hidden) for name in ("in_proj_qkvz", "in_proj_ba"))
        query, key, value, gate, b, a = self._order(*both)
        return torch.cat([part.flatten(2) for part in (query, key, value, b, a)], dim=-1)[0], gate[0]

    def _rule(self, seen: Tensor, is_real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `models.recurrence.Rule`."""
        batch, num_rows = is_real.shape
        width = sum(self._widths)
        mixed = seen[..., :width].transpose(1, 2)
        weight: Tensor = self._parts["conv1d"].weight
        mixed = self._activation(F.conv1d(mixed, weight.to(mixed.dtype), groups=width)).transpose(1, 2)
        parts = torch.split(mixed, self._widths, dim=2)
        dims = (self._key_dim, self._key_dim, self._value_dim)
        query, key, value = (part.reshape(batch, num_rows, -1, dim) for part, dim in zip(parts, dims))
        b, a = seen[:, -num_rows:, width:].chunk(2, dim=2)
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        # A row that is none forgets nothing and writes nothing.
        is_none = ~is_real.unsqueeze(2)
        beta, decay = (x.masked_fill(is_none, 0.0) for x in (b.sigmoid(), decay))
        apply = torch_recurrent_gated_delta_rule if num_rows <= _MAX_STEPS else torch_chunk_gated_delta_rule
        outputs, after = apply(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return outputs.flatten(2), after
