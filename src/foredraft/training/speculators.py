"""Heads of the `speculators` package: those that are MTP modules, in the layout of transformers' `MtpModel`.

Of its kinds (as of 0.9) `mtp` is one: one module, `mtp_layers.0`, that projects a hidden state and an embedding.
The others read something else than a module does, and are refused with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import ModelLoadError
from foredraft.models.checkpoint_files import MTP_FILE_NAME, read_headers, resolve_directory, weight_files
from foredraft.models.loader import load_checkpoint
from foredraft.training.files import write_atomically

_BLOCK = "it drafts a block at once, from hidden states of several layers of the target"
_REFUSALS = {
    "eagle": "its layer has no norm of the embedding and none of the hidden state",
    "eagle3": "it reads hidden states of three layers of the target, and has a vocabulary of its own",
    "peagle": "it reads hidden states of several layers of the target, and drafts in parallel from mask tokens",
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": _BLOCK,
    "xpress": _BLOCK,
}
_PREFIX = "mtp_layers.0."
_RENAMES = {
    "input_proj": "eh_proj",
    "hidden_layernorm": "hnorm",
    "token_layernorm": "enorm",
    "final_layernorm": "post_norm",
}
_SHARED = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")


def import_head(source: Path, target: str | Path, out: Path) -> Path:
    """Convert the head in `source` for the engine, which must be able to load it over `target`; returns the file.

    ModelLoadError names what is missing, what kind it is and why it does not fit.
    """
    config = _config(source)
    _require_kind(source, config)
    headers = read_headers(weight_files(source))
    tensors: dict[str, Tensor] = {}
    for name, header in headers.items():
        if name.startswith(_SHARED):
            continue
        if not name.startswith(_PREFIX):
            raise ModelLoadError(f"{header.file}: {name} is no tensor of an MTP module of speculators")
        tensors[_renamed(name.removeprefix(_PREFIX))] = _read(header.file, name)
    if missing := [new for new in (f"layers.0.{each}.weight" for each in _RENAMES.values()) if new not in tensors]:
        raise ModelLoadError(f"{source}: not an MTP module of speculators: {', '.join(missing)} would be missing")
    file = out / MTP_FILE_NAME
    write_atomically(file, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    try:
        load_checkpoint(resolve_directory(target), file, dtype=torch.float32, device=torch.device("cpu"))
    except ModelLoadError:
        file.unlink()
        raise
    return file


def _config(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}; is {source} a checkpoint of speculators?") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} is not an object")
    return config


def _require_kind(source: Path, config: dict[str, Any]) -> None:
    kind = config.get("speculators_model_type")
    if kind is None:
        raise ModelLoadError(f"{source / 'config.json'} has no speculators_model_type: not a checkpoint of speculators")
    if kind != "mtp":
        reason = _REFUSALS.get(str(kind), "nothing is known of this kind")
        raise ModelLoadError(f"{source}: a head of kind {kind} is no MTP module: {reason}")
    if (number := config.get("num_nextn_predict_layers", 1)) != 1:
        raise ModelLoadError(
            f"{source}: num_nextn_predict_layers={number}, and speculators has heads of one module only"
        )


def _renamed(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"layers.0.{_RENAMES[part]}.{rest}" if part in _RENAMES else f"layers.0.mtp_block.{name}"


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
