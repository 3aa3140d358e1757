"""Modules of models with sparse attention as transformers has them: it builds their layers, and cannot run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families.case import TransformersReference
from torch import Tensor


class StraightReference(TransformersReference):
    """The whole history in every call, through transformers' own eager layers."""

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        config = self.target.config
        config.mtp_layer_types = config.layer_types[-1:] * num_modules
        config.mtp_mlp_layer_types = config.mlp_layer_types[-1:] * num_modules
        return StraightModules(super().load_modules(directory, num_modules))


class StraightModules:
    """Transformers' `MtpModel`, as far as the reference asks it."""

    def __init__(self, mtp: Any) -> None:
        self.layers, self.config = mtp.layers, mtp.config
        assert mtp.config._attn_implementation == "eager"
        self._mtp = mtp

    def forward_layer(
        self, index: int, hidden: Tensor, position_ids: Tensor, cache: Any, *, input_ids: Tensor
    ) -> Tensor:
        """hidden [1, T, hidden_size], the previous depth's -> [1, T, hidden_size]."""
        layer = self.layers[index]
        embeddings = self._mtp.embed_tokens(input_ids)
        mask = torch.full((hidden.shape[1], hidden.shape[1]), torch.finfo(hidden.dtype).min).triu(1)
        output = layer.mtp_block(
            layer.eh_proj(torch.cat([layer.enorm(embeddings), layer.hnorm(hidden)], dim=-1)),
            attention_mask=mask[None, None],
            position_embeddings=self._mtp.rotary_emb(embeddings, position_ids=position_ids),
            position_ids=position_ids,
            cache=None,
        )
        rows = output[0] if isinstance(output, tuple) else output
        normed: Tensor = layer.post_norm(rows)
        return normed

    def _project_to_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._mtp.shared_head(hidden)
        return logits
