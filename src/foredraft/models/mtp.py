"""The MTP modules: transformers' own layers, run over paged rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from foredraft.cache.groups import KVShape
from foredraft.models.attention import PagedAttention
from foredraft.models.target import AttentionProbe


class MtpModules:
    """Runs one module at a time over the rows of many requests. Embedding, head and rotary are the target's."""

    def __init__(self, mtp: MtpModel) -> None:
        self._mtp = mtp
        self.num_modules = len(mtp.layers)
        self.kv_shapes = self._probe()

    def forward(
        self, module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run module number `module` (0 is the one of depth 1); all rows flattened.

        token_ids [T] the tokens one further per depth than the rows; positions [T] theirs; hidden [T, hidden_size]
        the previous depth's output at the rows (h0 for the first). Returns [T, hidden_size], what the head reads.
        """
        embeddings = self._mtp.embed_tokens(token_ids.unsqueeze(0))
        position_ids = positions.unsqueeze(0)
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

    def _probe(self) -> tuple[KVShape, ...]:
        probe = AttentionProbe.new()
        weight = self._mtp.embed_tokens.get_parameter("weight")
        row = torch.zeros(1, dtype=torch.int64, device=weight.device)
        hidden = torch.zeros(1, self._mtp.config.hidden_size, dtype=weight.dtype, device=weight.device)
        with torch.inference_mode():
            for module in range(self.num_modules):
                self.forward(module, row, row, hidden, probe)
        return probe.shapes(self.num_modules, type(self._mtp.layers[0].mtp_block).__name__)
