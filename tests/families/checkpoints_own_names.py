"""Tiny checkpoints of families that name the parts of their modules in ways of their own.

Each directory has, beside the published names, the modules as the reference names them, in `REFERENCE_FILE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from families.case import TransformersReference
from safetensors.torch import load_file, save_file
from tiny_models import SHARED_PREFIXES, _random_modules, edit_config, new_mtp_model, randomize
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashMLA,
    LongcatFlashMLP,
    LongcatFlashRMSNorm,
)
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm

REFERENCE_FILE = "reference_modules.pt"
WHOLE = "whole"

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}


def tiny_mimo(path: Path) -> Path:
    """MiMo-V2-Flash: sinks in two of four layers, and three sliding, dense modules of which the configuration says
    nothing."""
    config = AutoConfig.for_model(
        "mimo_v2_flash",
        **SIZES,
        intermediate_size=48,
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=12,
        v_head_dim=8,
        sliding_window=5,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mtp_layer_types=["sliding_attention"] * 3,
        mtp_mlp_layer_types=["dense"] * 3,
    )
    target, generator = _random_target(config)
    target.save_pretrained(path)
    edit_config(path, mtp_layer_types=None, mtp_mlp_layer_types=None)
    parts = {
        "post_attention_layernorm": "pre_mlp_layernorm",
        "post_norm": "final_layernorm",
        "self_attn.sinks": "self_attn.attention_sink_bias",
    }

    def publish(index: int, rest: str) -> str:
        for part, published in parts.items():
            rest = rest.replace(part, published)
        rest = rest.removesuffix(".weight") if rest.endswith("sink_bias.weight") else rest
        return f"model.mtp.layers.{index}.{rest.removeprefix('mtp_block.')}"

    add_modules(path, _random_modules(target, 3, generator), publish)
    return path


def tiny_ernie(path: Path) -> Path:
    """ERNIE 4.5 MoE: a dense module without a norm before the head."""
    config = AutoConfig.for_model(
        "ernie4_5_moe",
        **SIZES,
        intermediate_size=48,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        num_nextn_predict_layers=1,
        use_bias=False,
    )
    target, generator = _random_target(config)
    target.save_pretrained(path)
    target.config.chain_hidden_post_norm = False
    parts = {
        "enorm": "mtp_emb_norm",
        "hnorm": "mtp_hidden_norm",
        "eh_proj": "mtp_linear_proj",
        "mtp_block": "mtp_block",
    }

    def publish(index: int, rest: str) -> str:
        part, _, rest = rest.partition(".")
        return f"model.{parts[part]}.{index}.{rest}"

    add_modules(path, _random_modules(target, 1, generator), publish)
    return path


def tiny_longcat(path: Path) -> Path:
    """LongCat-Flash: two layers of two attentions each, and a module with one.

    Experts that return their input have weights in `WHOLE` only, where the target is as transformers reads it.
    """
    config = AutoConfig.for_model(
        "longcat_flash",
        **SIZES,
        num_layers=2,
        num_key_value_heads=4,
        head_dim=8,
        kv_lora_rank=16,
        q_lora_rank=12,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        n_routed_experts=6,
        zero_expert_num=2,
        moe_topk=2,
        routed_scaling_factor=1.0,
    )
    target, generator = _random_target(config)
    target.save_pretrained(path / WHOLE)
    target.save_pretrained(path)
    unused = re.compile(r".*experts\.[67]\..*")
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if unused.fullmatch(name)])
    module = LongcatModule(target.config)
    randomize(module, generator)

    def publish(index: int, rest: str) -> str:
        rest = re.sub(r"^(enorm|hnorm)\.", r"\1.m.", rest).replace("mlp.", "transformer_layer.mlp.")
        return "model.mtp.norm.weight" if rest == "norm.weight" else f"model.mtp.layers.{index}.{rest}"

    tensors = {f"layers.0.{name}": tensor.detach() for name, tensor in module.named_parameters()}
    embedding = target.get_parameter("model.embed_tokens.weight").detach().clone()
    add_modules(path, tensors, publish, {"model.mtp.embed_tokens.weight": embedding})
    return path


class LongcatModule(nn.Module):
    """A module of LongCat-Flash, put together from the parts of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm, self.hnorm = LongcatFlashRMSNorm(size), LongcatFlashRMSNorm(size)
        self.input_layernorm, self.post_attention_layernorm = LongcatFlashRMSNorm(size), LongcatFlashRMSNorm(size)
        self.norm = LongcatFlashRMSNorm(size)
        for norm in self.children():
            norm.variance_epsilon = config.rms_norm_eps
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.self_attn = LongcatFlashMLA(config, layer_idx=0)
        self.mlp = LongcatFlashMLP(config)  # type: ignore[no-untyped-call]


def tiny_step(path: Path) -> Path:
    """Step-3.7: more heads in sliding layers than in full ones, a limit of gates in one of them, and three modules,
    sliding and dense, with heads of their own."""
    text_config = {
        **SIZES,
        "pad_token_id": 0,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
        "sliding_window": 5,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 3],
        "moe_layers_enum": "1,2,3",
        "num_nextn_predict_layers": 3,
        "attention_other_setting": {"num_attention_heads": 6},
        "swiglu_limits": [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0],
        "rope_theta": [10000.0, 5000.0, 5000.0, 10000.0, 5000.0, 5000.0, 5000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
    }
    vision_config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = AutoConfig.for_model("step3p7", text_config=text_config, vision_config=vision_config)
    generator = torch.Generator().manual_seed(0)
    target = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomize(target, generator)
    with torch.no_grad():
        for norm in target.modules():
            if isinstance(norm, Step3p7RMSNorm):  # which adds 1 by itself; with 2, scores and rounding grow fourfold
                norm.weight.sub_(1.0)
    target.save_pretrained(path)
    target.config.text_config.mtp_per_layer_config = {module: {"num_attention_heads": 6} for module in range(3)}
    tensors = _random_modules(target, 3, generator)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.sub_(1.0)
    for module in range(3):
        tensors[f"layers.{module}.own_head.weight"] = 0.5 * torch.randn(64, 32, generator=generator)

    def publish(index: int, rest: str) -> str:
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "transformer.shared_head.norm")
        return f"model.layers.{4 + index}.{rest.replace('own_head', 'transformer.shared_head.output')}"

    add_modules(path, tensors, publish)
    return path


class OwnNames(TransformersReference):
    """Modules that transformers has, but reads under other names."""

    fields: ClassVar[Mapping[str, Any]] = {}
    """Of the configuration, that the checkpoint does not have."""

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        for name, value in self.fields.items():
            setattr(self.target.config, name, value)
        modules = new_mtp_model(self.target, num_modules)
        report = modules.load_state_dict(torch.load(directory / REFERENCE_FILE), strict=False)
        assert not report.unexpected_keys
        assert all(name.startswith(SHARED_PREFIXES) for name in report.missing_keys)
        return modules


def add_modules(
    path: Path,
    tensors: Mapping[str, Tensor],
    publish: Callable[[int, str], str],
    copies: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Add modules to model.safetensors. publish: from the number of a module and what follows it in the name that the
    reference has. copies: what modules repeat of their target, by published name."""
    torch.save(dict(tensors), path / REFERENCE_FILE)
    published = dict(copies)
    for name, tensor in tensors.items():
        _, index, rest = name.split(".", 2)
        published[publish(int(index), rest)] = tensor.contiguous()
    edit_tensors(path, lambda inside: inside.update(published))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a written model.safetensors."""
    file = path / "model.safetensors"
    inside = load_file(file)
    edit(inside)
    file.unlink()  # `inside` is mapped from it
    save_file(inside, file, metadata={"format": "pt"})


def _random_target(config: Any) -> tuple[PreTrainedModel, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomize(target, generator)
    return target, generator
