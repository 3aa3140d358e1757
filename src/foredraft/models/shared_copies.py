"""What checkpoints repeat in their modules of the target's embedding and head, which must be the target's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ModelLoadError
from foredraft.models.checkpoint_files import TensorHeader

_MAX_NUMBERS = 1 << 24
"""Numbers of a copy that are held at once."""


def check_copies(target: PreTrainedModel, copies: Iterable[TensorHeader]) -> None:
    """Compare copies, which are read for it, with what the modules share instead.

    A copy may have more rows, as padding of the vocabulary. ModelLoadError names one with other numbers, in the
    target's dtype: such modules were trained with an embedding or a head of their own.
    """
    for header in copies:
        *path, part = header.name.split(".")
        is_embedding = path[-1] == "embed_tokens"
        owner = target.get_input_embeddings() if is_embedding else target.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not _is_copy(header, getattr(owner, part, None)):
            raise ModelLoadError(
                f"{header.file}: {header.name} is not the target's {'embedding' if is_embedding else 'head'}, and MTP "
                f"modules with one of their own do not run; num_speculative_tokens=0 runs the model without modules"
            )


def _is_copy(header: TensorHeader, own: Tensor | None) -> bool:
    if own is None or header.shape[1:] != own.shape[1:] or header.shape[0] < own.shape[0]:
        return False
    step = max(1, _MAX_NUMBERS * own.shape[0] // own.numel())
    with safe_open(header.file, framework="pt") as tensors:
        copy = tensors.get_slice(header.name)
        return all(
            torch.equal(copy[first : min(first + step, len(own))].to(own.device, own.dtype), own[first : first + step])
            for first in range(0, len(own), step)
        )
