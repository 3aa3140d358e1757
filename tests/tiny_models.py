"""Builders of tiny random checkpoints on disk, for any test: each writes a directory and returns its path.

Weights are float32 and drawn so that logits are well apart (no near ties in greedy decoding) and depend on the whole
history. Nothing here uses Foredraft, so what it writes checks how Foredraft reads.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

MtpStorage = Literal["float32", "bfloat16", "int8"]
MtpNames = Literal["beside", "model.layers", "mtp.layers", "model.mtp.layers", "mtp.fc"]

SHARED_PREFIXES = ("embed_tokens.", "shared_head.")


def tiny_llama(
    path: Path,
    *,
    num_modules: int = 3,
    hidden_size: int = 32,
    num_layers: int = 2,
    vocab_size: int = 64,
    max_position_embeddings: int = 256,
    tie_word_embeddings: bool = False,
    eos_token_id: int | list[int] | None = None,
    seed: int = 0,
    mtp_storage: MtpStorage = "float32",
    mtp_names: MtpNames = "beside",
    tokenizer: bool = False,
) -> Path:
    """Llama with `num_modules` MTP modules in mtp.safetensors (none for 0, and then no file)."""
    config = AutoConfig.for_model(
        "llama",
        **_sizes(hidden_size, num_layers, vocab_size, max_position_embeddings),
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=eos_token_id,
    )
    return write_checkpoint(
        path, config, num_modules, seed=seed, mtp_storage=mtp_storage, mtp_names=mtp_names, tokenizer=tokenizer
    )


def tiny_mistral(path: Path, *, num_modules: int = 2, sliding_window: int | None = 8, seed: int = 0) -> Path:
    """Mistral: every layer, the modules' too, attends to the last `sliding_window` rows."""
    config = AutoConfig.for_model("mistral", **_sizes(), head_dim=8, sliding_window=sliding_window, eos_token_id=None)
    return write_checkpoint(path, config, num_modules, seed=seed)


def tiny_qwen2(path: Path, *, num_modules: int = 2, sliding_window: int | None = None, seed: int = 0) -> Path:
    """Qwen2 (biases on q, k, v); with a window, its last layer and the modules slide and the first does not."""
    config = AutoConfig.for_model(
        "qwen2",
        **_sizes(),
        use_sliding_window=sliding_window is not None,
        sliding_window=sliding_window,
        max_window_layers=1,
        eos_token_id=None,
    )
    return write_checkpoint(path, config, num_modules, seed=seed)


def tiny_qwen3(path: Path, *, num_modules: int = 2, seed: int = 0, mtp_storage: MtpStorage = "float32") -> Path:
    """Qwen3 (normed q and k), whose configuration lists the kind of every layer but none of the modules'."""
    config = AutoConfig.for_model("qwen3", **_sizes(), head_dim=8, eos_token_id=None)
    return write_checkpoint(path, config, num_modules, seed=seed, mtp_storage=mtp_storage)


def tiny_alternating(
    path: Path, *, num_modules: int = 3, sliding_window: int = 16, is_sliding_last: bool = True, seed: int = 0
) -> Path:
    """Qwen3 whose layers attend to all rows and to the last `sliding_window` in turn; modules are as the last layer."""
    kinds = ["full_attention", "sliding_attention"] if is_sliding_last else ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "qwen3",
        **_sizes(num_layers=4),
        head_dim=8,
        use_sliding_window=True,
        sliding_window=sliding_window,
        layer_types=2 * kinds,
        eos_token_id=None,
    )
    return write_checkpoint(path, config, num_modules, seed=seed)


def tiny_glm4_moe(
    path: Path, *, num_modules: int = 1, num_layers: int = 2, seed: int = 0, mtp_names: MtpNames = "model.layers"
) -> Path:
    """GLM-4 MoE, its module inside the checkpoint as published: layers.{num_layers}, expert by expert."""
    config = AutoConfig.for_model(
        "glm4_moe",
        **_sizes(num_layers=num_layers),
        head_dim=8,
        moe_intermediate_size=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=num_modules,
        use_qk_norm=True,
        eos_token_id=None,
    )
    return write_checkpoint(path, config, num_modules, seed=seed, mtp_names=mtp_names)


def tiny_mellum(path: Path, *, seed: int = 0, mtp_names: MtpNames = "mtp.fc") -> Path:
    """Mellum: one sliding module inside, as mtp.layers.0 with its projection and norms one level up (mtp.fc, ...)."""
    config = AutoConfig.for_model(
        "mellum",
        **_sizes(),
        head_dim=8,
        moe_intermediate_size=16,
        num_experts_per_tok=2,
        num_experts=4,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
        num_nextn_predict_layers=1,
        eos_token_id=None,
    )
    return write_checkpoint(path, config, 1, seed=seed, mtp_names=mtp_names)


def write_checkpoint(
    path: Path,
    config: PreTrainedConfig,
    num_modules: int,
    *,
    seed: int = 0,
    mtp_storage: MtpStorage = "float32",
    mtp_names: MtpNames = "beside",
    tokenizer: bool = False,
) -> Path:
    """Write a random checkpoint of any decoder's `config` with `num_modules` MTP modules; returns `path`."""
    generator = torch.Generator().manual_seed(seed)
    target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomize(target, generator)
    target.save_pretrained(path)
    if num_modules:
        tensors = _random_modules(target, num_modules, generator)
        if mtp_names == "beside":
            save_file(_stored(tensors, mtp_storage), path / "mtp.safetensors")
        else:
            _add_inside(path, target, tensors, mtp_names)
    if tokenizer:
        write_tokenizer(path, config.get_text_config().vocab_size)
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer of words `w0`, `w1`, ... separated by spaces, with a chat template."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=words)  # type: ignore[no-untyped-call]
    fast.chat_template = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w2"
    fast.save_pretrained(path)


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fill parameters (in order of name): embeddings and head wide, matrices by fan-in, norms near 1, biases small."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("norm.weight") else 0.0))
            else:
                parameter.copy_(1.5 / math.sqrt(parameter.shape[-1]) * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def new_mtp_model(target: PreTrainedModel, num_modules: int) -> MtpModel:
    """transformers' `MtpModel` over `target`, built directly, its weights random; the target is left as it was.

    The kinds of its layers are those of the target's last one, unless the target's config names them.
    """
    kept_config, kept_weights = target.config, {name: tensor.clone() for name, tensor in target.state_dict().items()}
    config: Any = copy.deepcopy(kept_config)
    config.num_mtp_layers = num_modules
    for field in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, field, None)
        if kinds is not None and not getattr(config, f"mtp_{field}", None):
            setattr(config, f"mtp_{field}", [kinds[-1]] * num_modules)
    target.config = config
    try:
        mtp = MtpModel(target, num_modules)
    finally:
        target.config = kept_config
    # Building it initialises everything that it holds, the target's embedding and head included.
    target.load_state_dict(kept_weights)
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        mtp.config.layer_types = ["sliding_attention"] * num_modules
    mtp.train(False)
    return mtp


def _sizes(
    hidden_size: int = 32, num_layers: int = 2, vocab_size: int = 64, max_position_embeddings: int = 256
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _random_modules(target: PreTrainedModel, num_modules: int, generator: torch.Generator) -> dict[str, Tensor]:
    mtp = new_mtp_model(target, num_modules)
    randomize(mtp.layers, generator)
    state = {name: tensor for name, tensor in mtp.state_dict().items() if not name.startswith(SHARED_PREFIXES)}
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


def _stored(tensors: dict[str, Tensor], storage: MtpStorage) -> dict[str, Tensor]:
    if storage == "float32":
        return tensors
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if storage == "int8" and tensor.dim() == 2:
            scale = tensor.abs().amax(dim=1) / 127
            stored[name] = (tensor / scale[:, None]).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def _add_inside(path: Path, target: PreTrainedModel, tensors: dict[str, Tensor], names: MtpNames) -> None:
    """Add the modules to model.safetensors under published names, with the copies of embedding and head they have."""
    file = path / "model.safetensors"
    inside = load_file(file)
    first = target.config.get_text_config().num_hidden_layers
    for name, tensor in tensors.items():
        for published, part in _expert_by_expert(name, tensor).items():
            inside[_published_name(published, first, names)] = part.contiguous()
    if names == "model.layers":
        for index in range(1 + max(int(name.split(".")[1]) for name in tensors)):
            prefix = f"model.layers.{first + index}"
            inside[f"{prefix}.embed_tokens.weight"] = target.get_parameter("model.embed_tokens.weight").detach().clone()
            inside[f"{prefix}.shared_head.head.weight"] = target.get_parameter("lm_head.weight").detach().clone()
    file.unlink()  # `inside` is mapped from it
    save_file(inside, file, metadata={"format": "pt"})


def _published_name(name: str, first: int, names: MtpNames) -> str:
    _, index, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.")
    if names == "mtp.fc":
        top = {
            "eh_proj.weight": "fc.weight",
            "enorm.weight": "pre_fc_norm_embedding.weight",
            "hnorm.weight": "pre_fc_norm_hidden.weight",
            "post_norm.weight": "norm.weight",
        }
        return f"mtp.{top[rest]}" if rest in top else f"mtp.layers.{index}.{rest}"
    rest = "shared_head.norm.weight" if rest == "post_norm.weight" else rest
    return f"model.layers.{first + int(index)}.{rest}" if names == "model.layers" else f"{names}.{index}.{rest}"


def _expert_by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split the stacked experts that transformers holds into the matrices that checkpoints hold."""
    stem, _, kind = name.rpartition(".experts.")
    if kind == "gate_up_proj":
        halves = {"gate_proj": tensor.chunk(2, dim=1)[0], "up_proj": tensor.chunk(2, dim=1)[1]}
    elif kind == "down_proj":
        halves = {"down_proj": tensor}
    else:
        return {name: tensor}
    return {
        f"{stem}.experts.{expert}.{half}.weight": stack[expert]
        for half, stack in halves.items()
        for expert in range(len(stack))
    }


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of a written config.json; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def shard(path: Path, num_files: int = 2) -> None:
    """Split model.safetensors into `num_files` files with an index, the last names last."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    size = -(-len(names) // num_files)
    for index in range(num_files):
        shard_name = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        chosen = names[index * size : (index + 1) * size]
        save_file({name: tensors[name] for name in chosen}, path / shard_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, shard_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
