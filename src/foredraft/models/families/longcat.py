"""LongCat-Flash: two attentions a layer, and modules with one.

Beyond the rule:

- A layer of the target has two latent attentions, two dense MLPs, and experts beside them; in the cache it is two
  layers. The experts are a loop over those that were chosen, which waits for a GPU.
- Some experts return their input. They have no weights in a checkpoint, but rows in the stack that transformers makes
  of all, so that it would not load.
- What queries, keys and values are projected from is scaled after its norm.
- The block of a module is another: one latent attention and one dense MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import MtpModel
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashExperts,
    LongcatFlashForCausalLM,
    LongcatFlashMLA,
    LongcatFlashMLP,
    LongcatFlashRMSNorm,
)

from foredraft.models.families.family import replace_parts
from foredraft.models.families.latent import Latent, PagedLatentAttention


class LongCat(Latent):
    """meituan-longcat/LongCat-Flash-Chat."""

    mtp_renames: ClassVar[Mapping[str, str]] = {"enorm.m": "enorm", "hnorm.m": "hnorm", "transformer_layer.mlp": "mlp"}

    def model_class(self, config: PreTrainedConfig) -> Any:
        return LongCatForCausalLM

    def complete(self, modules: MtpModel) -> None:
        for index, layer in enumerate(modules.layers):
            layer.mtp_block = LongCatModuleBlock(modules.config, index)

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, LongcatFlashMLA, _scaled_attention)


def _scaled_attention(attention: LongcatFlashMLA) -> PagedLatentAttention:
    attention.q_a_layernorm = ScaledNorm(attention.q_a_layernorm, attention.mla_scale_q_lora)
    attention.kv_a_layernorm = ScaledNorm(attention.kv_a_layernorm, attention.mla_scale_kv_lora)
    return PagedLatentAttention(attention, is_interleaved=True)


class LongCatForCausalLM(LongcatFlashForCausalLM):  # type: ignore[no-untyped-call]
    """transformers' model, with rows for those experts only that have weights."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, LongcatFlashExperts) and module.gate_up_proj is not None:
                module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach()[: module.num_routed_experts].clone())


class ScaledNorm(LongcatFlashRMSNorm):
    """A norm whose output is multiplied by a constant."""

    def __init__(self, norm: LongcatFlashRMSNorm, factor: float) -> None:
        super().__init__(len(norm.weight), norm.variance_epsilon)
        self.weight = norm.weight
        self._factor = factor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        normed: Tensor = super().forward(hidden_states)
        return normed * self._factor


class LongCatModuleBlock(nn.Module):
    """A decoder layer of the plain kind."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LongcatFlashMLA(config, layer_idx)
        self.mlp = LongcatFlashMLP(config)  # type: ignore[no-untyped-call]
        self.input_layernorm = LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, T, hidden_size], as transformers calls a layer."""
        hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output
