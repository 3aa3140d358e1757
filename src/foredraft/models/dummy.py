"""Models with random weights, of the shape that a configuration describes: for speed, where no checkpoint is at hand.

Weights are drawn on the device, as transformers initialises the architecture (normal, with the configuration's standard
deviation; norms are 1), from one fixed seed: the same on every run on that kind of device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from foredraft.errors import ModelLoadError, described
from foredraft.models.families.registry import family_of
from foredraft.models.mtp_weights import new_mtp_model, set_mtp_fields

SEED = 0
MAX_MODULES = 64
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_COUNT_FIELDS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def declared_modules(config: PreTrainedConfig) -> int:
    """How many MTP modules the configuration says there are; 0 if it says nothing.

    Raises ModelLoadError if what it says is no count, or if two fields of it disagree.
    """
    text_config = config.get_text_config(decoder=True)
    found = {name: getattr(text_config, name, None) for name in _COUNT_FIELDS}
    counts = {name: count for name, count in found.items() if count is not None}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_MODULES:
            raise ModelLoadError(f"config.json: {name} must be an integer from 0 to {MAX_MODULES}, not {count!r:.40}")
    if len(set(counts.values())) > 1:
        raise ModelLoadError(f"config.json: these must agree: {', '.join(f'{n}={c}' for n, c in counts.items())}")
    return next(iter(counts.values()), 0)


def _check_sizes(config: PreTrainedConfig) -> None:
    text_config = config.get_text_config(decoder=True)
    for name in _SIZES:
        if name == "num_attention_heads" and text_config.is_heterogeneous:
            continue  # there is one for each layer, and transformers does not tell that of all
        size = getattr(text_config, name, None)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ModelLoadError(f"config.json: {name} must be an integer from 1 on, not {size!r:.40}")


def count_parameters(config: PreTrainedConfig, num_modules: int) -> tuple[int, int]:
    """Numbers that a checkpoint of this shape holds: of the target (a tied head once), and of `num_modules` modules.

    Nothing is allocated.
    """
    config = copy.deepcopy(config)
    _check_sizes(config)
    if num_modules:
        set_mtp_fields(config, num_modules)
    meta = torch.device("meta")
    target = _new_target(config, torch.float32, meta)
    stored = target.state_dict(keep_vars=True).values()
    num_own = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in stored}.values())
    if not num_modules:
        return num_own, 0
    modules = new_mtp_model(target, num_modules, torch.float32)
    own = [module.state_dict() for module in (modules.layers, *_shared_norm(modules))]
    return num_own, sum(tensor.numel() for state in own for tensor in state.values())


def build_target(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random target in `dtype` (but for what its class keeps in float32) on `device`."""
    with _seeded(SEED, device):
        target = _new_target(config, dtype, device)
    plan = target._get_dtype_plan(dtype)
    for name, parameter in target.named_parameters():
        for pattern, kept in plan.items():
            if re.search(pattern, name):
                parameter.data = parameter.data.to(kept)
    target.train(False)
    return target.requires_grad_(False)


def build_mtp(target: PreTrainedModel, num_modules: int, dtype: torch.dtype, device: torch.device) -> MtpModel:
    """`num_modules` random modules for a target whose configuration has been through `set_mtp_fields`."""
    model = new_mtp_model(target, num_modules, dtype)
    plan = target._get_dtype_plan(dtype)
    for module in _own_modules(model):
        for name, tensor in _direct_tensors(module):
            kept = next((kind for pattern, kind in plan.items() if re.search(pattern, name)), tensor.dtype)
            empty = torch.zeros(tensor.shape, dtype=kept, device=device)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
            else:
                module._buffers[name] = empty
    with _seeded(SEED + 1, device), torch.no_grad():
        for module in _own_modules(model):
            target._init_weights(module)  # type: ignore[no-untyped-call]
    model.train(False)
    return model.requires_grad_(False)


def _new_target(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        with device:
            family = family_of(config)
            target: PreTrainedModel = family.model_class(config)._from_config(family.own_config(config), dtype=dtype)
    except Exception as error:  # transformers checks little of what a configuration says
        reason = described(error)
        raise ModelLoadError(f"transformers cannot build a {config.model_type} from config.json: {reason}") from error
    return target


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's own generators start from `seed`, and go on afterwards as if nothing had been drawn."""
    devices: list[Any] = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _own_modules(model: MtpModel) -> Iterator[nn.Module]:
    """Those that are not the target's."""
    for part in (model.layers, *_shared_norm(model)):
        yield from part.modules()


def _shared_norm(model: MtpModel) -> list[nn.Module]:
    return [model.shared_post_norm] if model.use_shared_post_norm else []


def _direct_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in own if tensor.is_meta]
