"""What a layer stores, learnt by running it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.cache.groups import NO_KV, InputShape, KVShape, StateShape, StoredRows
from foredraft.cache.storage import InputName
from foredraft.errors import ModelLoadError
from foredraft.kernels.lanes import MAX_HEAD_DIM
from foredraft.models.attention import PLAIN, RECURRENT, PagedAttention, ScoreTerms
from foredraft.models.recurrence import Rule


@dataclass(frozen=True)
class RowProbe(PagedAttention):
    """Stands in for a cache of no rows and records what the layers want to store."""

    seen: dict[int, KVShape] = field(default_factory=dict)
    kept: dict[InputName, InputShape] = field(default_factory=dict)
    recurring: dict[int, StateShape] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    @classmethod
    def new(cls, positions: Tensor) -> RowProbe:
        return cls(kv=(), rows=(), positions=positions)

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
        fold = query.shape[1] // key.shape[1]
        self._first_time(layer_idx)
        if terms.sinks is not None or query.shape[3] > MAX_HEAD_DIM:
            self.waiting.add(layer_idx)
        self.seen[layer_idx] = KVShape(key.shape[1], key.shape[3], value.shape[3], window, fold)
        return value.new_ones(1, query.shape[2], query.shape[1], value.shape[3])

    def attend_latent(
        self, layer_idx: int, query: Tensor, latent: Tensor, value_dim: int, scale: float, terms: ScoreTerms = PLAIN
    ) -> Tensor:
        self._first_time(layer_idx)
        self.seen[layer_idx] = KVShape(1, latent.shape[1], value_dim, None, query.shape[1], is_latent=True)
        return latent.new_ones(*query.shape[:2], value_dim)

    def _first_time(self, layer_idx: int) -> None:
        """A second call of a layer in one pass would write over the rows of the first, which later rows need."""
        if layer_idx in self.seen:
            raise ModelLoadError(f"layer {layer_idx} attends more than once in a pass: not an ordinary attention")

    def store_input(self, layer_idx: int, name: str, rows: Tensor, window: int | None) -> Tensor:
        self.kept[layer_idx, name] = InputShape(layer_idx, name, rows.shape[1], window)
        return rows

    def with_earlier(self, layer_idx: int, name: str, rows: Tensor, window: int) -> Tensor:
        stored = self.store_input(layer_idx, name, rows, window)
        return torch.stack([*(torch.zeros_like(stored),) * (window - 1), stored], dim=1)

    def choose(
        self, layer_idx: int, name: str, keys: Tensor, query: Tensor, weights: Tensor, scale: float, count: int
    ) -> Tensor:
        self.store_input(layer_idx, name, keys, None)
        return torch.ones(len(keys), len(keys), dtype=torch.bool, device=keys.device)

    def recur(self, layer_idx: int, rows: Tensor, earlier: int, sizes: tuple[int, ...], rule: Rule) -> Tensor:
        width, window = rows.shape[1], earlier + 1
        self.kept[layer_idx, RECURRENT] = InputShape(layer_idx, RECURRENT, width, window, is_replayed=True)
        self.recurring[layer_idx] = StateShape(layer_idx, sizes)
        seen = torch.cat((rows.new_zeros(earlier, width), rows)).unsqueeze(0)
        is_real = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
        return rule(seen, is_real, torch.zeros(1, *sizes, device=rows.device))[0][0]

    def stored(self, num_layers: int, name: str, keep_nothing: frozenset[int] = frozenset()) -> StoredRows:
        """What layers 0..num_layers-1 store. Raises ModelLoadError if one that should keep something did not attend."""
        known = self.seen.keys() | self.recurring.keys() | keep_nothing
        missing = [layer for layer in range(num_layers) if layer not in known]
        if missing:
            raise ModelLoadError(f"layers {missing} of {name} keep their state without ordinary attention")
        kv = tuple(self.seen.get(layer, NO_KV) for layer in range(num_layers))
        return StoredRows(kv, tuple(self.kept.values()), tuple(self.recurring.values()), bool(self.waiting))
