"""The chain of modules over whole rows of text, every token known: what training and evaluation run."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import MtpModel

from foredraft.training.frozen_target import FrozenTarget


class TeacherForcedChain:
    """Runs modules one after the other over texts [B, L].

    Module k (0 is the one of depth 1) at row i reads the output of the one before at i (the target's hidden state for
    the first, or for all in families that do not chain), the embedding of token i+k+1 and position i+k+1; it predicts
    token i+k+2. Its last k+2 rows of a text predict nothing that is in it, and are to be left out.
    """

    def __init__(self, target: FrozenTarget, modules: MtpModel, *, is_checkpointed: bool = False) -> None:
        self.modules: Any = modules  # `MtpModel` annotates arguments that may be None as if they could not
        self._is_chained = target.family.is_chained
        self._is_checkpointed = is_checkpointed
        self._constants: dict[tuple[int, int, int, torch.dtype], dict[str, Any]] = {}

    def compile(self) -> None:
        """Compile the modules one by one, which share the code."""
        for layer in self.modules.layers:
            layer.compile(dynamic=False)

    def run(
        self, token_ids: Tensor, hidden: Tensor, depths: int, dtype: torch.dtype
    ) -> Generator[Tensor, Tensor | None, None]:
        """Yield the output of each module, [B, L, H]. hidden: of the target.

        A generator: what is sent to it after an output are the embeddings [B, L, H] that the next module is to read.
        """
        of_target = hidden
        replaced: Tensor | None = None
        for module in range(depths):
            embeddings = self.inputs(token_ids, module) if replaced is None else replaced
            hidden = self._forward(module, embeddings, hidden if self._is_chained else of_target, dtype)
            replaced = yield hidden

    def inputs(self, token_ids: Tensor, module: int) -> Tensor:
        """The embeddings [B, L, H] that a module reads: of the tokens module + 1 further on, zeros after the last."""
        embeddings: Tensor = self.modules.embed_tokens(token_ids[:, module + 1 :])
        return F.pad(embeddings, (0, 0, 0, module + 1))

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embedding."""
        embeddings: Tensor = self.modules.embed_tokens(token_ids)
        return embeddings

    def _forward(self, module: int, embeddings: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        constants = self._constants_of(module, embeddings, dtype)
        device_type = embeddings.device.type
        with torch.autocast(device_type, dtype, enabled=dtype != torch.float32):
            layer = self.modules.layers[module]
            if self._is_checkpointed and torch.is_grad_enabled():
                output = checkpoint(layer, embeddings, hidden, use_reentrant=False, **constants)
            else:
                output = layer(embeddings, hidden, **constants)
            if self.modules.use_shared_post_norm:
                output = self.modules.shared_post_norm(output)
        result: Tensor = output.to(dtype)  # as it is where modules run in this dtype
        return result

    def _constants_of(self, module: int, embeddings: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Masks and rotary embedding, which depend on the shape alone."""
        batch_size, length = embeddings.shape[:2]
        key = module, batch_size, length, dtype
        if key not in self._constants:
            modules = self.modules
            positions = torch.arange(module + 1, module + 1 + length, device=embeddings.device)[None]
            positions = positions.expand(batch_size, -1)
            rotary = None
            with torch.no_grad():
                # The masks do not know of positions: they are alike for all depths, counted from a text's first row.
                masks = modules.create_masks_for_mtp_layer(module, embeddings, None, None)
                if modules.rotary_emb is not None:
                    kinds = {"layer_type": modules.config.layer_types[module]} if modules.has_per_layer_rope else {}
                    rotary = modules.rotary_emb(embeddings.to(dtype), position_ids=positions, **kinds)
            constants = {"position_embeddings": rotary, "position_ids": positions, "cache": None, **masks}
            self._constants[key] = constants
        return self._constants[key]
