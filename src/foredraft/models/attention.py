"""Attention over paged rows, registered with transformers under `ATTENTION_NAME`.

A forward pass sees the rows of many requests laid end to end as one sequence of T rows. Each layer writes its new
keys and values to the slots that the pass names, then every group of requests attends to its own slots. What a pass
needs is one `PagedAttention` object, handed through transformers' keyword arguments: there is no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from foredraft.cache.storage import CacheStorage, InputName, LayerKV
from foredraft.errors import ModelLoadError
from foredraft.kernels.lanes import Lanes
from foredraft.kernels.ops import Kernels, kernels_of
from foredraft.kernels.torch.indexer import choose_rows
from foredraft.models.media_store import MediaRows
from foredraft.models.recurrence import RecurrentRows, Rule
from foredraft.models.row_layout import AttentionGroup, EarlierRows, GroupRows, earlier_rows

ATTENTION_NAME = "foredraft_paged"
RECURRENT = "recurrence"
"""What the inputs of a recurrent layer are called in the cache."""


class Rotation(NamedTuple):
    """How the rows of a pass become queries and keys: their positions, the rotary tables [P, size], the heads that lie
    in a row of query, key and value, and the norms of each head [head_dim], if there are any."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    def apply(self, kernels: Kernels, qkv: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        """Turn qkv [T, heads * dim], store keys and values at `slots` [T]; the queries [T, num_heads, head_dim]."""
        positions, cos, sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps = self
        return kernels.rotate_and_store(
            qkv, positions, cos, sin, keys, values, slots, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps
        )


class ScoreTerms(NamedTuple):
    """What some architectures add to plain attention.

    bias: [T, heads, extent], added to the scaled score of the key at distance d < extent. sinks: [heads], a score that
    takes part in the softmax and has no value. chosen: [T, N] bool, which rows of its sequence a row may attend to.
    """

    bias: Tensor | None = None
    sinks: Tensor | None = None
    chosen: Tensor | None = None


PLAIN = ScoreTerms()


@dataclass(frozen=True)
class PagedAttention:
    """All that the layers of one forward pass need to know; `kv` and `rows` have an entry a layer, by `layer_idx`.

    inputs: what layers keep beside keys and values, and the rows of the pass in its cache group. states, recurrent: of
    recurrent layers.
    block_size: rows of a block. kernels: those of the device if left out. dtype: what queries, keys and values are
    converted to before they meet, if it is not their own. positions: [T], of the tokens that the rows read. media: the
    rows that read none, but what a prompt shows.
    """

    kv: Sequence[LayerKV]
    rows: Sequence[GroupRows]
    block_size: int = 0
    kernels: Kernels | None = None
    dtype: torch.dtype | None = None
    positions: Tensor | None = None
    media: MediaRows | None = None
    inputs: Mapping[InputName, tuple[Tensor, GroupRows]] = field(default_factory=dict)
    states: Mapping[int, Tensor] = field(default_factory=dict)
    recurrent: RecurrentRows | None = None
    _earlier: dict[int, EarlierRows] = field(default_factory=dict, repr=False)

    @classmethod
    def of_target(
        cls,
        storage: CacheStorage,
        rows: Mapping[int, GroupRows],
        kernels: Kernels | None = None,
        recurrent: RecurrentRows | None = None,
        media: MediaRows | None = None,
    ) -> PagedAttention:
        """For a pass of the target; rows: by cache group."""
        inputs = {name: (stored.rows, rows[stored.group]) for name, stored in storage.target_inputs.items()}
        by_layer = [rows[group] for group in storage.layout.group_of_layer]
        size, states = storage.block_size, storage.states
        return cls(
            storage.target, by_layer, size, kernels, media=media, inputs=inputs, states=states, recurrent=recurrent
        )

    @classmethod
    def of_module(
        cls,
        storage: CacheStorage,
        module: int,
        rows: Mapping[int, GroupRows],
        kernels: Kernels | None = None,
        media: MediaRows | None = None,
    ) -> PagedAttention:
        """For a pass of one module; rows: by cache group, of those that hold rows of it."""
        inputs = {
            name: (stored.rows, rows[stored.group])
            for name, stored in storage.module_inputs.items()
            if name[0] == module
        }
        own = rows[storage.layout.group_of_module[module]]
        by_layer = [own] * len(storage.modules)
        return cls(storage.modules, by_layer, storage.block_size, kernels, media=media, inputs=inputs)

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        terms: ScoreTerms = PLAIN,
    ) -> Tensor:
        """Store `key` and `value` [1, kv_heads, T, dim], attend with `query` [1, heads, T, dim]; [1, T, heads, dim].

        `window` is the one that the cache group of the layer was made for.
        """
        kv, slots = self.kv[layer_idx], self.rows[layer_idx].slots
        num_rows = query.shape[2]
        kv.key.index_copy_(0, slots, key[0].transpose(0, 1).reshape(num_rows, -1))
        kv.value.index_copy_(0, slots, value[0].transpose(0, 1).reshape(num_rows, -1))
        return self._attend(layer_idx, query[0].transpose(0, 1), scale, terms).unsqueeze(0)

    def attend_latent(
        self, layer_idx: int, query: Tensor, latent: Tensor, value_dim: int, scale: float, terms: ScoreTerms = PLAIN
    ) -> Tensor:
        """Attention of all heads over one shared key whose first `value_dim` numbers are its value.

        Store `latent` [T, dim], attend with `query` [T, heads, dim]; returns [T, heads, value_dim].
        """
        self.kv[layer_idx].key.index_copy_(0, self.rows[layer_idx].slots, latent)
        return self._attend(layer_idx, query, scale, terms)

    def store_input(self, layer_idx: int, name: str, rows: Tensor, window: int | None) -> Tensor:
        """Keep `rows` [T, width] for later rows of the same sequences; returns all that is stored, by slot.

        `window` is the one that the cache group was made for.
        """
        stored, group = self.inputs[layer_idx, name]
        stored.index_copy_(0, group.slots, rows.to(stored.dtype))
        return stored

    def with_earlier(self, layer_idx: int, name: str, rows: Tensor, window: int) -> Tensor:
        """Keep `rows` [T, width], and return each behind the window - 1 rows before it: [T, window, width].

        Before the first row of a sequence there are zeros.
        """
        stored = self.store_input(layer_idx, name, rows, window)
        group = self.inputs[layer_idx, name][1]
        earlier = self._earlier.get(id(group))
        if earlier is None:
            earlier = self._earlier[id(group)] = earlier_rows(group.lanes, len(rows), window - 1, self.block_size)
        before = stored.index_select(0, earlier.slots.flatten()).view(len(rows), window - 1, stored.shape[1])
        before = torch.where(earlier.exists.unsqueeze(2), before, before.new_zeros(()))
        return torch.cat((before, rows.to(stored.dtype).unsqueeze(1)), dim=1)

    def choose(
        self, layer_idx: int, name: str, keys: Tensor, query: Tensor, weights: Tensor, scale: float, count: int
    ) -> Tensor:
        """Keep index keys `keys` [T, dim], and choose the `count` rows that each row scores highest, as `choose_rows`
        does for `query` [T, heads, dim] and `weights` [T, heads]: [T, N] bool, for `ScoreTerms`."""
        stored = self.store_input(layer_idx, name, keys, None)
        lanes = self.inputs[layer_idx, name][1].lanes
        return choose_rows(query, weights, stored, lanes, self.block_size, scale, count)

    def recur(self, layer_idx: int, rows: Tensor, earlier: int, sizes: tuple[int, ...], rule: Rule) -> Tensor:
        """Keep the inputs `rows` [T, width] of a recurrent layer, and apply its rule: [T, out].

        sizes: of its state. The rule sees the inputs of `earlier` rows before its own.
        """
        assert self.recurrent is not None
        stored = self.store_input(layer_idx, RECURRENT, rows, earlier + 1)
        return self.recurrent.run(stored, self.states[layer_idx], earlier, rule)

    def attend_rotated(self, layer_idx: int, qkv: Tensor, rotation: Rotation, scale: float) -> Tensor:
        """The same for rows as a projection leaves them, qkv [T, heads * dim]: turn, store and attend; [T, heads *
        dim]."""
        kv = self.kv[layer_idx]
        kernels, slots = self.kernels or kernels_of(qkv.device), self.rows[layer_idx].slots
        query = rotation.apply(kernels, qkv, kv.key, kv.value, slots)
        return self._attend(layer_idx, query, scale).flatten(1)

    def _attend(self, layer_idx: int, query: Tensor, scale: float, terms: ScoreTerms = PLAIN) -> Tensor:
        """query [T, heads, dim] -> [T, heads, value_dim]; keys and values are stored."""
        if self.dtype is not None and query.dtype != self.dtype:
            return self._attend(layer_idx, query.to(self.dtype), scale, terms).to(query.dtype)
        kv, rows = self.kv[layer_idx], self.rows[layer_idx]
        groups = rows.attention
        if terms is not PLAIN or isinstance(groups, Lanes):
            kernels = self.kernels or kernels_of(query.device)
            return kernels.paged_attention(
                query.contiguous(), kv.key, kv.value, rows.lanes, self.block_size, scale, rows.window, *terms
            )
        if len(groups) == 1 and groups[0].real is None:
            return _attend_group(groups[0], kv, query, scale)
        output = query.new_empty(*query.shape[:2], kv.value.shape[1] // kv.num_kv_heads)
        for group in groups:
            attended = _attend_group(group, kv, query.index_select(0, group.rows), scale)
            if group.real is None:
                output.index_copy_(0, group.rows, attended)
            else:
                output.index_copy_(0, group.rows.index_select(0, group.real), attended.index_select(0, group.real))
        return output


def _attend_group(group: AttentionGroup, kv: LayerKV, query: Tensor, scale: float) -> Tensor:
    """query [B * Q, heads, dim] -> [B * Q, heads, value_dim], in the query's dtype.

    The heads that share a key head are folded into its query rows, so keys are never repeated in memory.
    """
    batch, kv_heads = group.num_requests, kv.num_kv_heads
    num_queries, heads, dim = query.shape[0] // batch, query.shape[1], query.shape[2]
    fold = heads // kv_heads
    keys, values = (_rows_at(rows, group.slots).to(query.dtype) for rows in (kv.key, kv.value))
    keys = keys.view(batch, -1, kv_heads, dim).transpose(1, 2)
    values = values.view(batch, keys.shape[2], kv_heads, -1).transpose(1, 2)
    mask = group.masks[fold]
    mask = None if mask is None else mask.to(query.dtype)
    if num_queries == 1:  # plain decoding: folded as it lies
        folded = query.view(batch, kv_heads, fold, dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
        return attended.reshape(batch, heads, -1)  # on a GPU its strides may be those of another layout
    folded = query.view(batch, num_queries, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, fold * num_queries, dim)
    attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    attended = attended.view(batch, kv_heads, fold, num_queries, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch * num_queries, heads, -1)


def _rows_at(rows: Tensor, slots: Tensor | slice) -> Tensor:
    return rows[slots] if isinstance(slots, slice) else rows.index_select(0, slots)


def _paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged: PagedAttention | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call; query, key, value are [1, heads, T, dim]."""
    if paged is None:
        raise ModelLoadError(f"{type(module).__name__} does not hand on the keyword `paged`: not an ordinary attention")
    if attention_mask is not None:
        raise ModelLoadError(
            f"{type(module).__name__} builds an attention mask of its own, which Foredraft does not run"
        )
    unknown = [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ModelLoadError(f"{type(module).__name__} uses {', '.join(unknown)}, which Foredraft does not run yet")
    if not getattr(module, "is_causal", True):
        raise ModelLoadError(f"{type(module).__name__} looks ahead: only decoders run")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    terms = PLAIN if s_aux is None else ScoreTerms(sinks=s_aux)
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    return paged.attend(layer_idx, query, key, value, scale, sliding_window, terms).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """`PagedAttention` masks by itself, so transformers need not build a mask."""


AttentionInterface.register(ATTENTION_NAME, _paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
