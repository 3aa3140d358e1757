"""The target model: any decoder of transformers with ordinary attention, run over paged rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.cache.groups import KVShape
from foredraft.errors import ModelLoadError
from foredraft.kernels.ops import Kernels
from foredraft.models.attention import ATTENTION_NAME, PagedAttention
from foredraft.models.fused_model import FusedDecoder
from foredraft.models.packed import pack
from foredraft.models.quantization import attention_dtype

TargetForward = Callable[[Tensor, Tensor, PagedAttention], Tensor]
"""`TargetModel.forward`, or what runs the same in another way."""


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
        self.fused: FusedDecoder | None = None
        self._attention_dtype = attention_dtype(model)
        self.kv_shapes = self._check_and_probe()

    def fuse(self, max_positions: int, kernels: Kernels | None = None, *, is_packed: bool = False) -> None:
        """Run the decoder in fused form from now on, if it is of a kind that has one. No position may be larger.

        is_packed: with a copy of all weights, the head's too, in the layout of a CPU's products.
        """
        self.fused = FusedDecoder.of(self._decoder, max_positions, kernels, is_packed=is_packed)
        if self.fused is not None and is_packed:
            self._head = pack(self._head)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._head.get_parameter("weight").shape[0])

    @property
    def head_weights(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of the head: weight [V, hidden_size], bias [V] or None, and if it is int8 the scale [V] of each row."""
        head = self._head
        return head.get_parameter("weight"), getattr(head, "bias", None), getattr(head, "scale", None)

    def forward(self, token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        """token_ids, positions [T] -> the state after the final norm (h0), [T, hidden_size]."""
        if self._attention_dtype is not None:
            paged = replace(paged, dtype=self._attention_dtype)
        if self.fused is not None:
            return self.fused.forward(token_ids, positions, paged)
        output = self._decoder(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, paged=paged
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The shared head: hidden [R, hidden_size] -> [R, vocab_size]."""
        logits: Tensor = self._head(hidden)
        return logits

    def greedy_ids(self, hidden: Tensor) -> Tensor:
        """The token that the head likes best after each row, the lowest id on a tie: hidden [R, hidden_size] -> [R]."""
        if self.fused is not None and type(self).logits is TargetModel.logits and type(self._head) is nn.Linear:
            return self.fused.kernels.argmax_head(hidden, self._head.weight, self._head.bias)
        return self.logits(hidden).argmax(dim=-1)

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
