"""Ling 3 (Bailing hybrid): layers of Kimi delta attention between layers of gated latent attention.

Beyond the rule:

- Kimi delta attention (arXiv 2510.26692) keeps a matrix for each head in place of keys and values, as a gated delta net
  does, and forgets at a rate of its own in every channel of a head. What each row gives to the state is cached, so that
  rows are replayed whose drafts were accepted (`models.recurrence`).
- Latent attention is DeepSeek's, but for a gate on what each head has attended to.
- The module is a layer of latent attention and experts behind the target's, with its last norm under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridAttention,
    BailingHybridDeltaAttention,
    causal_conv1d_fn,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from foredraft.errors import ModelLoadError
from foredraft.models.attention import PagedAttention
from foredraft.models.families.family import replace_parts
from foredraft.models.families.latent import Latent, PagedLatentAttention

_MAX_STEPS = 32
"""With more rows than this, the rule is applied in chunks instead of row by row."""
_MAX_CHUNKED_ROWS = 1024
"""Of so many rows at a time: each takes 64 numbers for every channel meanwhile."""


class Bailing(Latent):
    """inclusionAI's hybrids with Kimi delta attention."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention", "linear_attention"})
    mtp_renames: ClassVar[Mapping[str, str]] = {"final_layernorm": "post_norm"}

    def prepare(self, text_config: Any, num_modules: int) -> None:
        if text_config.layer_types[-1] != "full_attention":  # of which transformers takes the norm of modules
            raise ModelLoadError("MTP modules of bailing_hybrid run only if the target's last layer is full attention")
        text_config.mtp_layer_types = ["full_attention"] * num_modules
        text_config.mtp_mlp_layer_types = ["sparse"] * num_modules

    def adapt(self, model: nn.Module) -> None:
        replace_parts(model, BailingHybridAttention, partial(GatedLatentAttention, is_interleaved=True))
        replace_parts(model, BailingHybridDeltaAttention, PagedDeltaAttention)


class GatedLatentAttention(PagedLatentAttention):
    """Latent attention with a gate for each head."""

    def __init__(self, attention: Any, *, is_interleaved: bool) -> None:
        super().__init__(attention, is_interleaved=is_interleaved)
        self.g_proj = attention.g_proj

    def project(self, hidden: Tensor, heads: Tensor) -> Tensor:
        gate = self.g_proj(hidden).float().sigmoid().to(hidden.dtype)
        return super().project(hidden, heads * gate.unsqueeze(2))


class PagedDeltaAttention(nn.Module):
    """Kimi delta attention over paged rows, with the parts of transformers' own."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self._parts: Any = self._modules
        self._layer_idx, self._kernel_size = attention.layer_idx, attention.conv_kernel_size
        self._activation = attention.activation
        self._num_heads, self._head_dim = attention.num_heads, attention.head_dim
        self._width = attention.qkv_dim

    def forward(self, hidden_states: Tensor, *, paged: PagedAttention, **ignored: Any) -> Tensor:
        """hidden_states [1, T, hidden_size], as transformers calls it, and the same shape back."""
        mixed = [self._parts[name](hidden_states) for name in ("q_proj", "k_proj", "v_proj")]
        decay, beta = self._parts["forget_gate"](hidden_states).flatten(2), self._parts["b_proj"](hidden_states)
        rows = torch.cat((*mixed, decay, beta.sigmoid()), dim=2)[0]
        sizes = (self._num_heads, self._head_dim, self._head_dim)
        heads = paged.recur(self._layer_idx, rows, self._kernel_size - 1, sizes, self._rule)
        gate = self._parts["g_proj"](hidden_states)[0]
        normed = self._parts["o_norm"](*(part.view(len(rows), -1, self._head_dim) for part in (heads, gate)))
        output: Tensor = self._parts["o_proj"](normed.view(1, len(rows), -1))
        return output

    def _rule(self, seen: Tensor, is_real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `models.recurrence.Rule`."""
        batch, num_rows = is_real.shape
        conv, width = self._parts["conv1d"], self._width
        mixed = seen[..., : 3 * width].transpose(1, 2)
        mixed = causal_conv1d_fn(mixed, conv.weight.squeeze(1), conv.bias, activation=self._activation)
        own = torch.cat((mixed.transpose(1, 2), seen[..., 3 * width :]), dim=2)[:, -num_rows:]
        # A row that is none forgets nothing and writes nothing.
        own = own.masked_fill(~is_real.unsqueeze(2), 0.0)
        *heads, beta = torch.split(own, [*[width] * 4, self._num_heads], dim=2)
        given = [part.view(batch, num_rows, self._num_heads, self._head_dim) for part in heads]
        return _apply([*given, beta, state], num_rows)


def _apply(given: list[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """The rule for queries, keys, values, decay, beta and states of B requests: outputs [B, num_rows, heads * dim], and
    the states after the rows."""
    apply, at_once = recurrent_kimi_delta_attention, len(given[0])
    if num_rows > _MAX_STEPS:
        apply, at_once = chunk_kimi_delta_attention, max(1, _MAX_CHUNKED_ROWS // num_rows)
    results = []
    for query, key, value, decay, beta, state in zip(*(torch.split(part, at_once) for part in given)):
        results.append(
            apply(
                query,
                key,
                value,
                g=decay,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        )
    outputs, after = (torch.cat(parts) for parts in zip(*results))
    return outputs.flatten(2), after
