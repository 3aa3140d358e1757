"""Tiny checkpoints of models with recurrent layers of other kinds than gated delta nets, named as published.

Each directory has, beside the published names, the module as the reference names it, in `REFERENCE_FILE`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from families.checkpoints_own_names import REFERENCE_FILE, edit_tensors
from tiny_models import _expert_by_expert, _random_modules, randomize
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
}


def tiny_nemotron(path: Path, **changes: Any) -> Path:
    """Nemotron 3: layers of all four kinds, with time steps of which one in four is too short, and a module each block
    of which is a layer in the checkpoint."""
    sizes: dict[str, Any] = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "time_step_min": 0.3,
        "time_step_max": 1.0,
        "n_routed_experts": 4,
        "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 16,
    }
    target, generator = _random_target(AutoConfig.for_model("nemotron_h", **(SIZES | sizes | changes)))
    module = NemotronModule(target.config)
    randomize(module, generator)
    tensors = {f"layers.0.{name}": tensor for name, tensor in module.state_dict().items()}
    published: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("layers.0.").replace("post_norm", f"blocks.{len(module.blocks) - 1}.final_layernorm")
        name = name.replace("blocks.", "layers.") if name.startswith("blocks.") else f"layers.0.{name}"
        stem, is_stack, kind = name.partition(".experts.")
        each = {f"{stem}.experts.{n}.{kind}.weight": matrix for n, matrix in enumerate(tensor)} if is_stack else {}
        published |= {f"mtp.{name}": part for name, part in (each or {name: tensor}).items()}
    return _write(path, target, tensors, published)


class NemotronModule(nn.Module):
    """A module of Nemotron 3, put together from the parts of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        block_class: Any = NemotronHBlock
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm, self.post_norm = (NemotronHRMSNorm(size, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        own = copy.deepcopy(config)
        own.layers_block_type = config.mtp_layers_block_type
        self.blocks = nn.ModuleList(block_class(own, number) for number in range(len(own.layers_block_type)))

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The output at rows 0..n-1 of a sequence, that read these two, [1, n, hidden_size] each."""
        num_rows = hidden.shape[1]
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        state = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        for block in self.blocks:
            state = block(state, attention_mask=mask)
        normed: Tensor = self.post_norm(state)
        return normed


def tiny_bailing(path: Path, **changes: Any) -> Path:
    """Ling 3: two layers of Kimi delta attention and two of latent attention in turn, and a module of the latter."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "head_dim": 8,
        "num_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    target, generator = _random_target(AutoConfig.for_model("bailing_hybrid", **(SIZES | sizes | changes)))
    tensors = _random_modules(target, 1, generator)
    parts = {
        "layers.0.": f"model.layers.{target.config.num_hidden_layers}.",
        "mtp_block.": "",
        "post_norm": "final_layernorm",
        "self_attn.o_proj": "self_attn.dense",
        "self_attn": "attention",
        "e_score_correction_bias": "expert_bias",
    }
    published: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for part, published_part in parts.items():
            name = name.replace(part, published_part)
        published |= _expert_by_expert(name, tensor)
    return _write(path, target, tensors, published)


def _random_target(config: PreTrainedConfig) -> tuple[PreTrainedModel, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomize(target, generator)
    return target, generator


def _write(path: Path, target: PreTrainedModel, tensors: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> Path:
    """tensors: of the module as the reference names them."""
    target.save_pretrained(path)
    torch.save(dict(tensors), path / REFERENCE_FILE)
    edit_tensors(path, lambda inside: inside.update((name, part.contiguous()) for name, part in published.items()))
    return path
