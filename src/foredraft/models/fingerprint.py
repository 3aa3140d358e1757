"""Whether two checkpoints are the same, told by their configuration and weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

_SAYS_NOTHING = ("_name_or_path", "architectures", "transformers_version")
"""Entries of a configuration that differ between copies of one checkpoint."""
_CHUNK = 1 << 22  # numbers that are summed at once
_FACTOR = -7046029254386353131  # odd, and its multiples look random (the golden ratio in 64 bits)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """A digest of all that decides what a model computes: configuration, names, shapes, types and values of tensors.

    Values enter as checksums that are made where the tensor lies: one pass over memory, for a large model too.
    """
    return _digest(model, _config(model))


def target_fingerprint(model: nn.Module) -> str:
    """The same of a target, however many MTP modules were loaded with it, of which its configuration then speaks."""
    return _digest(model, _without_modules(_config(model)))


def module_fingerprints(modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Of the tensors of each MTP module; what else decides what it computes is in the target's configuration."""
    return tuple(_digest(module, {}) for module in modules)


def _config(model: nn.Module) -> dict[str, Any]:
    settings: Any = model.config.to_dict() if hasattr(model, "config") else {}  # type: ignore[operator, union-attr]
    return {name: value for name, value in settings.items() if name not in _SAYS_NOTHING}


def _without_modules(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the entries that loading modules writes (`Family.prepare`), in parts of a configuration as well."""
    written = {"chain_hidden_post_norm", *(("rms_norm_eps",) if "layer_norm_epsilon" in config else ())}
    return {
        name: _without_modules(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if "mtp" not in str(name) and name not in written
    }


def _digest(model: nn.Module, config: Mapping[str, Any]) -> str:
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for checksum in _checksums(tensor.detach()):
            digest.update(checksum.to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def _checksums(tensor: Tensor) -> Iterator[int]:
    """For each chunk the sum, modulo 2^64, of the numbers' bits times a factor that depends on where they are."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        factors = torch.arange(1, 2 * chunk.numel(), 2, device=chunk.device) * _FACTOR
        yield int((chunk * factors).sum())
