"""Nemotron-H and Nemotron 3: layers of Mamba-2, of attention, of experts, and of MLPs, one at a time.

Beyond the rule:

- Mamba-2 (arXiv 2405.21060) keeps a state for each head in place of keys and values. What each row gives to it is
  cached, so that rows are replayed whose drafts were accepted (`models.recurrence`).
- transformers bounds time steps from below where it runs many rows (`time_step_min`), but not where it runs one. Here
  they are bounded in every row, so that a row is the same however it is computed.
- Layers of experts and of MLPs keep nothing. Attention knows no positions.
- The one module is several blocks, each of which is published as a layer: `mtp.layers.0`, `mtp.layers.1` and so on. The
  first has the projection and the norms before it, the last the norm behind it.
"""

from __future__ import annotations

import copy
import re
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_layers import MtpModel
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHBlock,
    NemotronHMamba2Mixer,
    causal_conv1d_fn,
    mamba2_chunk_scan,
)

from foredraft.errors import ModelLoadError
from foredraft.models.attention import PagedAttention
from foredraft.models.families.family import Family, replace_parts

_STATELESS = frozenset({"mlp", "moe"})
_MODULE_BLOCK = re.compile(r"mtp\.layers\.(?P<index>\d+)\.(?P<rest>.+)")
_AROUND_BLOCKS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "post_norm"}


class Nemotron(Family):
    """NVIDIA's hybrids, whose layers are of one part each."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention", "linear_attention"}) | _STATELESS
    is_capturable: ClassVar[bool] = False

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return None

    def layers_that_keep_nothing(self, text_config: Any) -> frozenset[int]:
        return frozenset(layer for layer, kind in enumerate(text_config.layer_types) if kind in _STATELESS)

    def prepare(self, text_config: Any, num_modules: int) -> None:
        kinds = text_config.mtp_layers_block_type
        if num_modules != 1 or kinds.count("full_attention") != 1 or not set(kinds) <= _STATELESS | {"full_attention"}:
            raise ModelLoadError(
                f"nemotron_h runs with one MTP module of one layer of attention beside experts and MLPs, not with "
                f"{num_modules} of {', '.join(kinds)}"
            )
        text_config.rms_norm_eps = text_config.layer_norm_epsilon  # which is where transformers looks for it
        text_config.mtp_layer_types = ["full_attention"]

    def complete(self, modules: MtpModel) -> None:
        for index, layer in enumerate(modules.layers):
            layer.mtp_block = NemotronModuleBlock(modules.config, index)

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, NemotronHMamba2Mixer, PagedMamba2)

    def mtp_name(self, name: str, num_hidden_layers: int) -> tuple[int, str] | None:
        match = _MODULE_BLOCK.fullmatch(name)
        if match is None:
            return super().mtp_name(name, num_hidden_layers)
        part, _, rest = match["rest"].partition(".")
        if part in _AROUND_BLOCKS:
            return 0, f"layers.0.{_AROUND_BLOCKS[part]}.{rest}"
        return 0, f"layers.0.mtp_block.blocks.{match['index']}.{match['rest']}"


class NemotronModuleBlock(nn.Module):
    """The blocks of a module, one after the other."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        own = copy.copy(config)
        own.layers_block_type = config.mtp_layers_block_type
        block_class: Any = NemotronHBlock
        blocks = [block_class(own, number) for number in range(len(own.layers_block_type))]
        for block in blocks:
            block.mixer.layer_idx = layer_idx  # of the cache, where a module is one layer
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, T, hidden_size], as transformers calls a layer."""
        for block in self.blocks:
            hidden_states = block(hidden_states, **kwargs)
        return hidden_states


class PagedMamba2(nn.Module):
    """A Mamba-2 mixer over paged rows, with the parts of transformers' own."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        for name, child in mixer.named_children():
            self.add_module(name, child)
        self.dt_bias, self.A_log, self.D = mixer.dt_bias, mixer.A_log, mixer.D
        self._parts: Any = self._modules
        self._layer_idx, self._kernel_size = mixer.layer_idx, mixer.conv_kernel_size
        self._activation, self._chunk_size = mixer.activation, mixer.chunk_size
        self._num_heads, self._head_dim, self._state_size = mixer.num_heads, mixer.head_dim, mixer.ssm_state_size
        self._least_step, _ = mixer.time_step_limit
        self._widths = [mixer.intermediate_size, *[mixer.n_groups * mixer.ssm_state_size] * 2]

    def forward(self, hidden_states: Tensor, *, paged: PagedAttention, **ignored: Any) -> Tensor:
        """hidden_states [1, T, hidden_size], as transformers calls it, and the same shape back."""
        projected = self._parts["in_proj"](hidden_states)[0]
        gate, rows = projected.tensor_split([self._widths[0]], dim=1)
        sizes = (self._num_heads, self._head_dim, self._state_size)
        mixed = paged.recur(self._layer_idx, rows, self._kernel_size - 1, sizes, self._rule)
        normed = self._parts["norm"](mixed.unsqueeze(0), gate.unsqueeze(0))
        output: Tensor = self._parts["out_proj"](normed.to(hidden_states.dtype))
        return output

    def _rule(self, seen: Tensor, is_real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `models.recurrence.Rule`."""
        batch, num_rows = is_real.shape
        conv, width = self._parts["conv1d"], sum(self._widths)
        mixed = seen[..., :width].transpose(1, 2)
        mixed = causal_conv1d_fn(mixed, conv.weight.squeeze(1), conv.bias, activation=self._activation)
        parts = mixed.transpose(1, 2)[:, -num_rows:].split(self._widths, dim=2)
        dims = (self._head_dim, self._state_size, self._state_size)
        x, to_state, from_state = (part.reshape(batch, num_rows, -1, dim) for part, dim in zip(parts, dims))
        step = F.softplus(seen[:, -num_rows:, width:] + self.dt_bias.to(seen.dtype)).clamp(min=self._least_step)
        # A row that is none takes no time, so it forgets nothing and writes nothing.
        step = step.masked_fill(~is_real.unsqueeze(2), 0.0)
        outputs, after = mamba2_chunk_scan(
            x,
            step,
            -self.A_log.float().exp(),
            to_state,
            from_state,
            chunk_size=min(self._chunk_size, num_rows),
            D=self.D,
            initial_states=state,
            return_final_states=True,
        )
        return outputs.flatten(2), after
