"""Tiny Inkling checkpoints: the text model with modules beside it or inside, and the multimodal model as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tiny_models import SHARED_PREFIXES, new_mtp_model, randomize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpModel

Layout = Literal["beside", "inside", "multimodal"]

MODULES_FILE = Path("as drawn", "mtp.safetensors")
"""Where a checkpoint's modules lie as they were drawn, under `MtpModel`'s names: nothing but tests looks there."""

_EXTRAS = {"hnorm": "hidden_norm", "enorm": "embed_norm", "eh_proj": "input_proj"}
_MTP_FIELDS = {
    "num_mtp_layers": "num_nextn_predict_layers",
    "chain_hidden_post_norm": "chain_hidden_post_norm",
    "mtp_local_layer_ids": "local_layer_ids",
}
"""Names of the text configuration, and those of the published block `mtp_config`."""


def tiny_inkling(path: Path, *, num_modules: int = 8, layout: Layout = "beside", seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint with `num_modules` modules; changes: of the text configuration. Returns `path`."""
    config: Any = text_config(num_modules, **changes)
    if layout == "multimodal":
        target = AutoModelForMultimodalLM.from_config(_multimodal_config(config), dtype=torch.float32)  # type: ignore[no-untyped-call]
    else:
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    _randomize(target, generator)
    target.save_pretrained(path)
    modules = new_mtp_model(target, num_modules)
    _randomize(modules.layers, generator)
    if modules.use_shared_post_norm:
        _randomize(modules.shared_post_norm, generator)
    tensors = {n: t.contiguous() for n, t in modules.state_dict().items() if not n.startswith(SHARED_PREFIXES)}
    _write(path / MODULES_FILE, tensors)
    if layout == "beside":
        _write(path / "mtp.safetensors", tensors)
    else:
        _add_inside(path / "model.safetensors", target, tensors)
    if layout == "multimodal":
        _move_mtp_fields(path / "config.json")
    return path


def text_config(num_modules: int, **changes: Any) -> PreTrainedConfig:
    """Sliding and full layers and modules, with different heads; `changes` go before what is said here."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 12,
        "log_scaling_n_floor": 5,
        "log_scaling_alpha": 0.5,
        "local_layer_ids": [0, 2],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "vocab_size": 72,
        "unpadded_vocab_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "route_scale": 2.0,
        "logits_mup_width_multiplier": 2.0,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    modules = {"num_mtp_layers": num_modules, "chain_hidden_post_norm": True, "mtp_local_layer_ids": [1, 2, 4, 7]}
    return AutoConfig.for_model("inkling_text", **(sizes | modules | changes))


def _multimodal_config(text: PreTrainedConfig) -> PreTrainedConfig:
    return AutoConfig.for_model(
        "inkling_mm_model",
        text_config=text.to_dict(),
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 8},
        vision_config={"patch_size": 4, "temporal_patch_size": 2, "num_hidden_layers": 3},
        image_token_id=71,
        audio_token_id=70,
        image_bos_token_id=69,
        audio_bos_token_id=68,
    )


def _randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """As `randomize`, but factors near 1, so that MLPs count."""
    randomize(model, generator)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("global_scale"):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    file.parent.mkdir(exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})


def _add_inside(file: Path, target: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Add modules to the target's tensors, under published names."""
    inside = load_file(file)
    file.unlink()  # `inside` is mapped from it
    _write(file, inside | {f"model.mtp.{name}": tensor for name, tensor in _published(target, tensors).items()})


def _published(target: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under published names: the parts of a module's block have those of the target's layers."""
    published, blocks = {}, {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".mtp_block.")
        if rest:
            blocks[f"model.language_model.{part}.{rest}"] = tensor
        elif name == "shared_post_norm.weight":
            published["chain_norm.weight"] = tensor
        else:
            layer, extra, kind = name.rsplit(".", 2)
            published[f"{layer}.{_EXTRAS[extra]}.{kind}"] = tensor
    for name, tensor in revert_weight_conversion(target, blocks).items():
        _, index, rest = name.removeprefix("model.").removeprefix("llm.").removeprefix("language_model.").split(".", 2)
        published[f"layers.{index}.transformer_block.{rest}"] = tensor.contiguous()
    return published


def _move_mtp_fields(file: Path) -> None:
    """What a published config.json says of the modules stands in a block of its own."""
    config = json.loads(file.read_text())
    config["mtp_config"] = {theirs: config["text_config"].pop(ours) for ours, theirs in _MTP_FIELDS.items()}
    file.write_text(json.dumps(config))


def drawn_modules(path: Path, target: PreTrainedModel, num_modules: int) -> MtpModel:
    """transformers' own modules over `target`, with the weights that the checkpoint at `path` was made from."""
    config: Any = target.config.get_text_config(decoder=True)
    config.num_mtp_layers = num_modules
    modules = new_mtp_model(target, num_modules)
    drawn = {name: tensor for name, tensor in load_file(path / MODULES_FILE).items() if _is_of(name, num_modules)}
    report = modules.load_state_dict(drawn, strict=False)
    assert not report.unexpected_keys
    assert all(name.startswith(SHARED_PREFIXES) for name in report.missing_keys)
    with torch.no_grad():  # it is a copy, which has been drawn anew
        modules.embed_tokens.get_parameter("weight").copy_(target.get_input_embeddings().get_parameter("weight"))
    return modules


def _is_of(name: str, num_modules: int) -> bool:
    return not name.startswith("layers.") or int(name.split(".")[1]) < num_modules
