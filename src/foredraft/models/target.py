"""The target model: any decoder of transformers with ordinary attention, run over paged rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from foredraft.cache.groups import KVShape
from foredraft.errors import ModelLoadError
from foredraft.models.attention import ATTENTION_NAME, PagedAttention


class TargetModel:
    """Runs a transformers decoder over the flattened rows of many requests, and its head over chosen rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device = model.device
        self.dtype = model.dtype
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.kv_shapes = self._check_and_probe()

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._head.get_parameter("weight").shape[0])

    def forward(self, token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        """token_ids, positions [T] -> the state after the final norm (h0), [T, hidden_size]."""
        output = self._decoder(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, paged=paged
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The shared head: hidden [R, hidden_size] -> [R, vocab_size]."""
        logits: Tensor = self._head(hidden)
        return logits

    def draft_logits(self, hidden: Tensor, vocab_size: int | None) -> Tensor:
        """The head's first `vocab_size` rows, a view of its weight: hidden [R, hidden_size] -> [R, vocab_size].

        Byte-pair vocabularies list the frequent tokens first, and the head is the largest cost of a draft on a small
        batch. The target verifies with the whole head, so that the output is the same. None: the whole head.
        """
        if vocab_size is None:
            return self.logits(hidden)
        weight, bias = self._head.get_parameter("weight"), getattr(self._head, "bias", None)
        return F.linear(hidden, weight[:vocab_size], None if bias is None else bias[:vocab_size])

    def _check_and_probe(self) -> tuple[KVShape, ...]:
        """Run two rows to learn what each layer stores, and that nothing lies between h0, the head and the logits.

        Raises ModelLoadError for a decoder that Foredraft would run wrongly.
        """
        name = type(self.model).__name__
        token_ids = torch.tensor([0, 1], device=self.device)
        probe = AttentionProbe.new()
        with torch.inference_mode():
            hidden = self.forward(token_ids, token_ids, probe)
            logits = self.model(
                input_ids=token_ids.unsqueeze(0), position_ids=token_ids.unsqueeze(0), use_cache=False, paged=probe
            ).logits[0]
            own = self.logits(hidden)
            if logits.shape != own.shape or not torch.allclose(logits, own, atol=1e-3, rtol=1e-2):
                raise ModelLoadError(f"{name} changes its logits after the head (a scale or a cap); not supported yet")
        return probe.shapes(self.config.num_hidden_layers, name)


@dataclass(frozen=True)
class AttentionProbe(PagedAttention):
    """Stands in for a cache of no rows and records what the layers want to store."""

    seen: dict[int, KVShape] = field(default_factory=dict)

    @classmethod
    def new(cls) -> AttentionProbe:
        return cls(kv=(), rows=())

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        self.seen[layer_idx] = KVShape(
            key.shape[1], key.shape[3], value.shape[3], window, query.shape[1] // key.shape[1]
        )
        return value.new_ones(1, query.shape[2], query.shape[1], value.shape[3])

    def shapes(self, num_layers: int, name: str) -> tuple[KVShape, ...]:
        """The shapes of layers 0..num_layers-1. Raises ModelLoadError if one of them did not attend."""
        missing = [layer for layer in range(num_layers) if layer not in self.seen]
        if missing:
            raise ModelLoadError(f"layers {missing} of {name} keep their state without ordinary attention")
        return tuple(self.seen[layer] for layer in range(num_layers))
