"""Sparse attention (DSA) over latents: DeepSeek-V3.2 and GLM-5.

Beyond latent attention:

- A layer's indexer scores all earlier rows of a sequence with small heads of its own, and the row attends to the
  `index_topk` highest. It keeps one key a row beside the latent, in the same cache group. Modules have an indexer, and
  keys, of their own.
- GLM-5's layers may share the choice of the layer before them. They return it beside their output, and the target's
  decoder hands it on; a module has nobody to share with, and its block must return the output alone.
- Of equal scores the earlier row is chosen, so that a row's choice does not depend on the batch. Transformers leaves
  that open.
- Scores are by torch on every device, which waits for lengths, as attention to chosen rows does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from foredraft.errors import ModelLoadError
from foredraft.models.attention import PagedAttention, ScoreTerms
from foredraft.models.families.family import Family, replace_parts
from foredraft.models.families.latent import PagedLatentAttention, turned


class Sparse(Family):
    """DeepSeek-V3.2, whose indexers turn halves."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"indexed_attention"})
    is_capturable: ClassVar[bool] = False

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return None

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, DeepseekV32Attention, partial(PagedSparseAttention, is_index_interleaved=False))


class SharingSparse(Sparse):
    """GLM-5, whose indexers turn pairs, and whose layers may share the choice of the one before."""

    def refusal(self, config: PreTrainedConfig) -> str | None:
        text_config: Any = config.get_text_config(decoder=True)
        if text_config.indexer_types[0] != "full":
            return "indexer_types: the first layer must be `full`: it has no layer before it to share with"
        return None

    def prepare(self, text_config: Any, num_modules: int) -> None:
        kinds = text_config.indexer_types[:num_modules]  # transformers makes module k as the target's layer k in this
        if "shared" in kinds:
            module = kinds.index("shared")
            raise ModelLoadError(
                f"config.json: indexer_types[{module}] is `shared`, so that MTP module {module} would have no indexer, "
                f"and none to share with; with num_speculative_tokens of at most {module} the others run"
            )

    def adapt(self, model: nn.Module) -> None:
        for layer in list(model.modules()):
            if isinstance(attention := getattr(layer, "self_attn", None), GlmMoeDsaAttention):
                layer.self_attn = PagedSharingAttention(attention, is_index_interleaved=True)
                if isinstance(model, MtpModel):
                    layer.register_forward_hook(_output_alone)


def _output_alone(layer: nn.Module, args: Any, returned: tuple[Tensor, Tensor]) -> Tensor:
    """Without the choice of rows."""
    return returned[0]


class PagedIndexer(nn.Module):
    """The indexer of a layer over paged rows, with its parts."""

    def __init__(self, indexer: Any, *, is_interleaved: bool) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm = indexer.wq_b, indexer.wk, indexer.k_norm
        self.weights_proj = indexer.weights_proj
        self._layer_idx, self._num_chosen = indexer.layer_idx, indexer.index_topk
        self._num_heads, self._head_dim = indexer.n_heads, indexer.head_dim
        self._rotated_dim, self._is_interleaved = indexer.qk_rope_head_dim, is_interleaved

    def forward(
        self, hidden: Tensor, query_latent: Tensor, rotation: tuple[Tensor, Tensor], paged: PagedAttention
    ) -> Tensor:
        """Which rows of its sequence each row attends to: hidden [T, hidden_size], query_latent [T, q_lora_rank] ->
        bool [T, N], N at least the number of rows."""
        query = self._turned(self.wq_b(query_latent).view(len(hidden), self._num_heads, self._head_dim), rotation)
        key = self._turned(self.k_norm(self.wk(hidden)).unsqueeze(1), rotation).squeeze(1)
        weights = self.weights_proj(hidden.to(self.weights_proj.weight.dtype)).float() * self._num_heads**-0.5
        scale = self._head_dim**-0.5
        return paged.choose(self._layer_idx, "indexer", key, query, weights, scale, self._num_chosen)

    def _turned(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The first numbers of each head by position, the others as they are: [T, heads, head_dim]."""
        rotated, plain = rows.tensor_split([self._rotated_dim], dim=-1)
        return torch.cat((turned(rotated, rotation, is_interleaved=self._is_interleaved), plain), dim=-1)


class PagedSparseAttention(PagedLatentAttention):
    """DeepSeek-V3.2's attention over paged rows, with its parts; its own rotation is always of pairs."""

    def __init__(self, attention: Any, *, is_index_interleaved: bool) -> None:
        super().__init__(attention, is_interleaved=True)
        indexer = attention.indexer
        self.indexer = None if indexer is None else PagedIndexer(indexer, is_interleaved=is_index_interleaved)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        paged: PagedAttention,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        output, _ = self.attend_to_chosen(hidden_states[0], position_embeddings, paged, None)
        return output.unsqueeze(0), None

    def attend_to_chosen(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedAttention,
        chosen_before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size] -> [T, hidden_size], and which rows were attended to. chosen_before: the choice of
        the layer before, which a layer without an indexer shares."""
        rotation = (position_embeddings[0][0], position_embeddings[1][0])
        query_latent = self.query_latent(hidden)
        chosen = chosen_before
        if self.indexer is not None:
            chosen = self.indexer(hidden, query_latent, rotation, paged)
        assert chosen is not None
        return self.attend(hidden, query_latent, rotation, paged, ScoreTerms(chosen=chosen)), chosen


class PagedSharingAttention(PagedSparseAttention):
    """GLM-5's attention over paged rows, with its parts."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        paged: PagedAttention,
        prev_topk_indices: Tensor | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None, Tensor]:
        output, chosen = self.attend_to_chosen(hidden_states[0], position_embeddings, paged, prev_topk_indices)
        return output.unsqueeze(0), None, chosen
