"""Latent attention (MLA): DeepSeek-V3, GLM-4.7-Flash, Sarvam.

Beyond the rule:

- A layer stores one vector a row for all heads: the latent, which is the value too, and one rotated key behind it. That
  is 576 numbers where DeepSeek-V3's expanded heads would be 40960. The projection from the latent to a head's key is
  applied to the head's query instead, that to its value to what the head has attended to. Both are views of
  `kv_b_proj.weight`. Sums are rounded in another order than with expanded heads; nothing else differs.
- A head of a query is as wide as that vector, which is more than the Triton kernel takes: on a GPU torch's kernel
  attends, which waits for lengths. So passes are in no CUDA graph.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteAttention

from foredraft.errors import ConfigError
from foredraft.models.attention import PLAIN, PagedAttention, ScoreTerms
from foredraft.models.families.family import Family, replace_parts


class Latent(Family):
    """Architectures with latent attention in all layers, the modules' too."""

    is_capturable: ClassVar[bool] = False

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return None

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, DeepseekV3Attention | Glm4MoeLiteAttention, _paged)


def _paged(attention: DeepseekV3Attention | Glm4MoeLiteAttention) -> PagedLatentAttention:
    return PagedLatentAttention(attention, is_interleaved=bool(attention.config.rope_interleave))


class PagedLatentAttention(nn.Module):
    """Latent attention of transformers over paged rows, with its parts.

    attention: its parts are named as in transformers' DeepSeek-V3. is_interleaved: the numbers that are turned together
    lie side by side in a row, not half a row apart.
    """

    def __init__(self, attention: Any, *, is_interleaved: bool) -> None:
        super().__init__()
        if type(attention.kv_b_proj) is not nn.Linear:
            raise ConfigError("quantization=int8 does not run with latent attention: leave it out")
        self.has_query_latent = attention.q_lora_rank is not None
        if self.has_query_latent:
            self.q_a_proj, self.q_a_layernorm = attention.q_a_proj, attention.q_a_layernorm
            self.q_b_proj = attention.q_b_proj
        else:
            self.q_proj = attention.q_proj
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = attention.kv_a_proj_with_mqa, attention.kv_a_layernorm
        self.kv_b_proj, self.o_proj = attention.kv_b_proj, attention.o_proj
        self.layer_idx, self._scale = attention.layer_idx, attention.scaling
        self._num_heads, self._is_interleaved = attention.num_heads, is_interleaved
        self._query_dims = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        self._latent_dims = [attention.kv_lora_rank, attention.qk_rope_head_dim]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        paged: PagedAttention,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, hidden_size], as transformers calls it; masks and positions come with `paged`."""
        hidden, rotation = hidden_states[0], (position_embeddings[0][0], position_embeddings[1][0])
        return self.attend(hidden, self.query_latent(hidden), rotation, paged).unsqueeze(0), None

    def query_latent(self, hidden: Tensor) -> Tensor:
        """What the heads' queries are projected from, [T, q_lora_rank]; hidden itself where there is none."""
        latent: Tensor = self.q_a_layernorm(self.q_a_proj(hidden)) if self.has_query_latent else hidden
        return latent

    def attend(
        self,
        hidden: Tensor,
        query_latent: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedAttention,
        terms: ScoreTerms = PLAIN,
    ) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]. rotation: cosines and sines [T, rotated numbers]."""
        projection = self.q_b_proj if self.has_query_latent else self.q_proj
        query = projection(query_latent).view(len(hidden), self._num_heads, -1)
        plain, rotated = query.split(self._query_dims, dim=-1)
        rotated = turned(rotated, rotation, is_interleaved=self._is_interleaved)
        latent, key = self.kv_a_proj_with_mqa(hidden).split(self._latent_dims, dim=-1)
        key = turned(key.unsqueeze(1), rotation, is_interleaved=self._is_interleaved).squeeze(1)
        latent = torch.cat((self.kv_a_layernorm(latent), key), dim=-1)
        value_dim = self._latent_dims[0]
        to_key, to_value = self._from_latent()
        query = torch.cat((_by_head(plain, to_key), rotated), dim=-1)
        attended = paged.attend_latent(self.layer_idx, query, latent, value_dim, self._scale, terms)
        return self.project(hidden, _by_head(attended, to_value.transpose(1, 2)))

    def project(self, hidden: Tensor, heads: Tensor) -> Tensor:
        """From what the heads have attended to [T, heads, value_dim] to the output [T, hidden_size]."""
        output: Tensor = self.o_proj(heads.flatten(1))
        return output

    def _from_latent(self) -> tuple[Tensor, Tensor]:
        """From the latent to each head's key [heads, key_dim, kv_lora_rank] and value [heads, value_dim,
        kv_lora_rank]."""
        weight = self.kv_b_proj.weight.view(self._num_heads, -1, self._latent_dims[0])
        return weight[:, : self._query_dims[0]], weight[:, self._query_dims[0] :]


def _by_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows [T, heads, m] times matrices [heads, m, n], each head by its own: [T, heads, n]."""
    return torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1)


def turned(rows: Tensor, rotation: tuple[Tensor, Tensor], *, is_interleaved: bool) -> Tensor:
    """rows [T, heads, R] by cosines and sines [T, R], both halves of which are equal, as transformers' rotary gives
    them. The result lies in halves, however the pairs of `rows` lie."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    if is_interleaved:
        rows = rows.view(*rows.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat((-second, first), dim=-1) * sin
