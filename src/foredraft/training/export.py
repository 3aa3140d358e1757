"""Modules as a directory that the engine and transformers' `MtpModel` load: weights, configuration, card."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from foredraft.models.checkpoint_files import MTP_FILE_NAME
from foredraft.models.mtp_weights import SCALE_SUFFIX
from foredraft.training.files import write_atomically, write_text
from foredraft.training.recipe import Storage

DRAFT_VOCAB_NAME = "draft_vocab.json"
_WIDTH = "mtp_intermediate_size"


def write_modules(directory: Path, weights: Mapping[str, Tensor], storage: Storage) -> Path:
    """Write mtp.safetensors in `MtpModel`'s names; returns the file.

    int8: matrices as int8 with a float32 scale for each row beside them, everything else in bfloat16.
    """
    file = directory / MTP_FILE_NAME
    tensors = stored_tensors(weights, storage)
    write_atomically(file, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    return file


def stored_tensors(weights: Mapping[str, Tensor], storage: Storage) -> dict[str, Tensor]:
    """The tensors of the file, on the CPU."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensor = weight.detach().float().cpu()
        if storage == "int8" and tensor.dim() == 2:
            scale = tensor.abs().amax(1).div(127).clamp_min(torch.finfo(torch.float32).tiny)
            stored[name] = (tensor / scale[:, None]).round().to(torch.int8)
            stored[name + SCALE_SUFFIX] = scale
        else:
            stored[name] = tensor.to(torch.float32 if storage == "float32" else torch.bfloat16).contiguous()
    return stored


def write_config(directory: Path, target_config: PreTrainedConfig, depths: int, block_width: int | None) -> None:
    """The target's configuration, as it is to be for `MtpModel` with these modules."""
    config: Any = copy.deepcopy(target_config)
    text_config = config.get_text_config(decoder=True)
    text_config.num_mtp_layers = depths
    if block_width is not None:
        setattr(text_config, _WIDTH, block_width)
    write_text(directory / "config.json", config.to_json_string(use_diff=False))


def write_draft_vocab(directory: Path, token_ids: list[int]) -> None:
    """The tokens that the modules were trained to choose among, for `draft_vocab`."""
    write_text(directory / DRAFT_VOCAB_NAME, json.dumps(token_ids, separators=(",", ":")) + "\n")
