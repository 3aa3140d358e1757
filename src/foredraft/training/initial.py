"""What modules begin as: the target's last block, reading the hidden state and a little of the embedding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from foredraft.errors import ConfigError, ModelLoadError
from foredraft.models.checkpoint_files import mtp_file
from foredraft.models.mtp_weights import build_mtp_model, find_mtp_beside, new_mtp_model
from foredraft.training.frozen_target import FrozenTarget
from foredraft.training.recipe import Recipe

_NORM = 0.5
"""Weight of the norms before the projection, on average: with it the sum is about as large as the target's states."""


def initial_modules(target: FrozenTarget, recipe: Recipe) -> MtpModel:
    """New modules over a target, in float32, or those that the recipe starts from.

    ConfigError for a target whose modules have other parts than the recipe can begin or train; ModelLoadError.
    """
    if recipe.start is not None:
        return _begun_before(target, recipe)
    modules = empty_modules(target, recipe.depths, recipe.block_width)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for layer in modules.layers:
            _begin_block(layer.get_submodule("mtp_block"), target)
            _begin_projection(layer, recipe, generator)
            if layer.post_norm is not None:
                _copy_final_norm(layer.get_submodule("post_norm"), target)
        if modules.use_shared_post_norm:
            _copy_final_norm(modules.shared_post_norm, target)
    return modules


def empty_modules(target: FrozenTarget, depths: int, block_width: int | None) -> MtpModel:
    """Modules whose own weights, in float32 where the target is, hold nothing yet. ConfigError as `initial_modules`."""
    name = type(target.model).__name__
    modules = new_mtp_model(target.model, depths, torch.float32, block_width)
    if target.family.draft_heads(modules):
        raise ConfigError(f"modules of {name} have heads of their own, which training does not make")
    for part in (modules.layers, *([modules.shared_post_norm] if modules.use_shared_post_norm else [])):
        part.to_empty(device=target.device)
        if buffers := [buffer for buffer, _ in part.named_buffers()]:
            raise ConfigError(f"modules of {name} have buffers ({buffers[0]}), which training does not make")
    return modules


def own_parts(modules: MtpModel) -> dict[str, Tensor]:
    """The weights of the modules themselves, by `MtpModel`'s names: without the embedding and head of the target."""
    shared = ("embed_tokens.", "shared_head.", "rotary_emb.")
    return {name: tensor for name, tensor in modules.state_dict().items() if not name.startswith(shared)}


def _begun_before(target: FrozenTarget, recipe: Recipe) -> MtpModel:
    file = mtp_file(Path(), recipe.start)
    assert file is not None
    source = find_mtp_beside(file, int(target.config.hidden_size))
    if len(source.modules) < recipe.depths:
        raise ConfigError(
            f"start={recipe.start!r} has {len(source.modules)} modules, fewer than depths={recipe.depths}"
        )
    return build_mtp_model(target.model, source, recipe.depths, torch.float32, target.device)


def _begin_block(block: nn.Module, target: FrozenTarget) -> None:
    """As the target's last layer; of a wider MLP the neurons with the largest weights."""
    weights = {name: tensor.float() for name, tensor in target.last_layer.state_dict().items()}
    own = block.state_dict()
    if set(weights) != set(own):
        parts = ", ".join(sorted(set(weights) ^ set(own))[:4])
        raise ConfigError(
            f"modules of {type(target.model).__name__} are not like its last layer: they differ in {parts}"
        )
    wide = weights.get("mlp.down_proj.weight")
    if wide is not None and own["mlp.down_proj.weight"].shape != wide.shape:
        _narrow(weights, own["mlp.down_proj.weight"].shape[1])
    try:
        block.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(
            f"modules of {type(target.model).__name__} have other shapes than its last layer: {error}"
        ) from error


def _narrow(weights: dict[str, Tensor], width: int) -> None:
    down = weights["mlp.down_proj.weight"]
    if width > down.shape[1]:
        raise ConfigError(f"block_width={width} is more than the target's {down.shape[1]}")
    sizes = down.norm(dim=0) * weights["mlp.up_proj.weight"].norm(dim=1)
    kept = sizes.topk(width).indices.sort().values
    weights["mlp.down_proj.weight"] = down[:, kept]
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.bias", "mlp.up_proj.bias"):
        if name in weights:
            weights[name] = weights[name][kept]


def _begin_projection(layer: nn.Module, recipe: Recipe, generator: torch.Generator) -> None:
    projection = layer.get_parameter("eh_proj.weight")
    size = projection.shape[0]
    eye = torch.eye(size)
    halves = [recipe.projection_embedding * eye, recipe.projection_hidden * eye]
    if getattr(layer.config, "mtp_hidden_states_first", False):
        halves.reverse()
    noise = recipe.projection_noise * torch.randn(size, 2 * size, generator=generator)
    projection.copy_(torch.cat(halves, dim=1) + noise)
    for name in ("enorm", "hnorm"):
        _fill_norm(layer.get_submodule(name), _NORM, size)


def _fill_norm(norm: nn.Module, value: float, size: int) -> None:
    """Make a norm multiply by `value`, whether its weight is the factor or what is added to 1."""
    weight = norm.get_parameter("weight")
    weight.zero_()
    probe = torch.linspace(-1, 1, size, device=weight.device)[None]
    is_offset = bool(norm(probe).abs().max() > 0)
    weight.fill_(value - 1 if is_offset else value)


def _copy_final_norm(norm: nn.Module, target: FrozenTarget) -> None:
    weight, own = target.final_norm_weight, norm.get_parameter("weight")
    if weight is None or weight.shape != own.shape:
        raise ModelLoadError(f"{type(target.model).__name__} has no final norm that modules could begin with")
    own.copy_(weight)
