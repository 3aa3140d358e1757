"""The MTP modules: transformers' own layers, run over paged rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from foredraft.cache.groups import StoredRows
from foredraft.models.attention import PagedAttention
from foredraft.models.families.registry import family_of
from foredraft.models.fingerprint import module_fingerprints
from foredraft.models.fused_model import FusedDecoder, FusedModules, OwnRows, is_close
from foredraft.models.probe import RowProbe
from foredraft.models.quantization import attention_dtype

ModuleForward = Callable[[int, Tensor, Tensor, Tensor, PagedAttention], Tensor]
"""`MtpModules.forward`, or what runs the same in another way."""


class MtpModules:
    """Runs one module at a time over the rows of many requests. Embedding, head and rotary are the target's."""

    def __init__(self, mtp: MtpModel) -> None:
        family = family_of(mtp.config)
        family.adapt(mtp)
        self.is_chained = family.is_chained
        self._mtp = mtp
        self._fused: FusedModules | None = None
        self._attention_dtype = attention_dtype(mtp)
        self.num_modules = len(mtp.layers)
        self.stored = self._probe()

    def fuse(self, target: FusedDecoder, *, is_packed: bool = False) -> None:
        """Run in fused form from now on, if the modules are of a kind that has one and it computes the same. is_packed:
        as for the target."""
        fused = FusedModules.of(self._mtp, target, is_packed=is_packed)
        if fused is not None and all(self._equals(module, fused, target) for module in range(self.num_modules)):
            self._fused = fused

    def fingerprints(self) -> tuple[str, ...]:
        """What tells each module's weights from others."""
        return module_fingerprints(self._mtp.layers)

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def _equals(self, module: int, fused: FusedModules, target: FusedDecoder) -> bool:
        rows = OwnRows.new(target.kernels)
        weight = self._mtp.embed_tokens.get_parameter("weight")
        token_ids = torch.arange(4, device=weight.device) % weight.shape[0]
        hidden = weight[token_ids.flip(0)]
        with torch.inference_mode():
            own = fused.forward(module, token_ids, token_ids, hidden, rows)
            return is_close(own, self.forward(module, token_ids, token_ids, hidden, rows))

    def forward(
        self, module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run module number `module` (0 is the one of depth 1); all rows flattened.

        token_ids [T] the tokens one further per depth than the rows; positions [T] theirs; hidden [T, hidden_size]
        the previous depth's output at the rows (h0 for the first). Returns [T, hidden_size], what the head reads.
        """
        paged = replace(paged, dtype=self._attention_dtype, positions=positions)
        if self._fused is not None and paged.media is None:
            return self._fused.forward(module, token_ids, positions, hidden, paged)
        embeddings = self._mtp.embed_tokens(token_ids)
        if paged.media is not None:
            embeddings = paged.media.over(embeddings)
        embeddings, position_ids = embeddings.unsqueeze(0), positions.unsqueeze(0)
        output = self._mtp.layers[module](
            embeddings,
            hidden.unsqueeze(0),
            position_embeddings=self._rotary(module, embeddings, position_ids),
            position_ids=position_ids,
            attention_mask=None,
            cache=None,
            paged=paged,
        )
        if self._mtp.use_shared_post_norm:
            output = self._mtp.shared_post_norm(output)
        result: Tensor = output[0]
        return result

    def _rotary(self, module: int, embeddings: Tensor, position_ids: Tensor) -> Any:
        if self._mtp.rotary_emb is None:
            return None
        if self._mtp.has_per_layer_rope:
            layer_type = self._mtp.config.layer_types[module]
            return self._mtp.rotary_emb(embeddings, position_ids=position_ids, layer_type=layer_type)
        return self._mtp.rotary_emb(embeddings, position_ids=position_ids)

    def _probe(self) -> StoredRows:
        weight = self._mtp.embed_tokens.get_parameter("weight")
        row = torch.zeros(1, dtype=torch.int64, device=weight.device)
        probe = RowProbe.new(row)
        hidden = torch.zeros(1, self._mtp.config.hidden_size, dtype=weight.dtype, device=weight.device)
        with torch.inference_mode():
            for module in range(self.num_modules):
                self.forward(module, row, row, hidden, probe)
        return probe.stored(self.num_modules, type(self._mtp.layers[0].mtp_block).__name__)
