"""Qwen3-Next and Qwen3.5: layers that keep a state instead of keys and values, and a module of attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from families.case import TransformersReference
from families.contract import FamilyCase, FamilyContract
from safetensors.torch import load_file, save_file
from tiny_models import write_checkpoint
from transformers import AutoConfig
from transformers.modeling_layers import MtpModel

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
SETTINGS = {"state_interval": 4}


class NamedAsPublished(TransformersReference):
    """transformers can load the module if it is told that there is one, and of which kind."""

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        config = self.target.config
        config.num_mtp_layers, config.mtp_layer_types = num_modules, ["full_attention"]
        return MtpModel.from_pretrained(self.target).train(False)


def tiny(model_type: str, parts: dict[str, Any], path: Path) -> Path:
    """Two recurrent layers, one of attention, and once more; the last is of attention. The module as published."""
    kinds = ["linear_attention", "full_attention"] * 2
    config = AutoConfig.for_model(model_type, **BASE, **parts, layer_types=kinds)
    file = write_checkpoint(path, config, 1, mtp_names="mtp.fc") / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():  # norms multiply by 1 + weight, but for those of recurrent layers
        if is_norm(name) and not name.endswith("linear_attn.norm.weight"):
            tensor -= 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or ".pre_fc_norm_" in name


def case(model_type: str, **parts: Any) -> FamilyCase:
    aliases = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    return FamilyCase(
        model_type,
        partial(tiny, model_type, parts),
        num_modules=1,
        depths=(1, 3),
        reference=NamedAsPublished,
        module_prefix=lambda module: "mtp.",
        aliases=aliases,
        settings=SETTINGS,
        bound=5e-5,  # the rule forgets and adds up in another order in chunks
        is_resident=False,
    )


class TestQwen3Next(FamilyContract):
    case = case("qwen3_next", **EXPERTS)


class TestQwen35(FamilyContract):
    case = case("qwen3_5_text", **ROPE)


class TestQwen35Moe(FamilyContract):
    case = case("qwen3_5_moe_text", **ROPE, **EXPERTS)
