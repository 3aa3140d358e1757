"""The target model: a decoder of transformers, run over paged rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.cache.groups import StoredRows
from foredraft.errors import ModelLoadError
from foredraft.kernels.ops import Kernels
from foredraft.media import Media, MediaKind
from foredraft.models.attention import ATTENTION_NAME, PagedAttention
from foredraft.models.families.registry import family_of
from foredraft.models.fused_model import FusedDecoder
from foredraft.models.packed import pack
from foredraft.models.probe import RowProbe
from foredraft.models.quantization import attention_dtype

TargetForward = Callable[[Tensor, Tensor, PagedAttention], Tensor]
"""`TargetModel.forward`, or what runs the same in another way."""


def head_weights(head: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of a head: weight [V, hidden_size], bias [V] or None, and if it is int8 the scale [V] of each row."""
    return head.get_parameter("weight"), getattr(head, "bias", None), getattr(head, "scale", None)


class TargetModel:
    """Runs a transformers decoder over the flattened rows of many requests, and its head over chosen rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = family_of(model.config)
        model.set_attn_implementation(ATTENTION_NAME)
        self.family.adapt(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device = model.device
        self.dtype = model.dtype
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        self._head = self.family.head(model)
        self.fused: FusedDecoder | None = None
        self._attention_dtype = attention_dtype(model)
        self.stored = self._check_and_probe()

    def fuse(self, max_positions: int, kernels: Kernels | None = None, *, is_packed: bool = False) -> None:
        """Run the decoder in fused form from now on, if it is of a kind that has one. No position may be larger.

        is_packed: with a copy of all weights, the head's too, in the layout of a CPU's products.
        """
        self.fused = FusedDecoder.of(self._decoder, max_positions, kernels, is_packed=is_packed)
        if self.fused is not None and is_packed:
            self._head = pack(self._head)

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs may hold a pass: nothing in it waits for the device."""
        return self.family.is_capturable and not self.stored.waits

    @property
    def placeholders(self) -> Mapping[MediaKind, int]:
        """The tokens in whose place rows of media stand, by kind; none: the model takes text only."""
        return self.family.placeholders(self.model.config)

    def media_fault(self, media: Media) -> str | None:
        """Why no tower can read one image or piece of sound, if none can."""
        return self.family.media_fault(self.model.config, media)

    @torch.inference_mode()
    def encode(self, media: Media) -> Tensor:
        """What a tower makes of one image or piece of sound: [num_tokens, hidden_size]."""
        rows = self.family.encode(self.model, media.kind, media.features)
        if rows.shape != (media.num_tokens, self.hidden_size):
            wanted = f"{media.num_tokens} rows of {self.hidden_size} numbers"
            raise ValueError(f"the {media.kind.value} tower gave {list(rows.shape)}, not {wanted}")
        return rows

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._head.get_parameter("weight").shape[0])

    @property
    def head_weights(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of the head: weight [V, hidden_size], bias [V] or None, and if it is int8 the scale [V] of each row."""
        return head_weights(self._head)

    @property
    def head_divisor(self) -> float:
        """What h0 is divided by before the head."""
        return float(getattr(self._head, "divisor", 1.0))

    def forward(self, token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        """token_ids, positions [T] -> the state after the final norm (h0), [T, hidden_size]."""
        paged = replace(paged, dtype=self._attention_dtype, positions=positions)
        if self.fused is not None and paged.media is None:
            return self.fused.forward(token_ids, positions, paged)
        inputs = {"input_ids": token_ids.unsqueeze(0)}
        if paged.media is not None:
            embeddings = self._decoder.get_input_embeddings()(token_ids)  # type: ignore[operator]
            inputs = {"inputs_embeds": paged.media.over(embeddings).unsqueeze(0)}
        output = self._decoder(**inputs, position_ids=positions.unsqueeze(0), use_cache=False, paged=paged)
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

    def _check_and_probe(self) -> StoredRows:
        """Run two rows to learn what each layer stores, and that nothing lies between h0, the head and the logits.

        Raises ModelLoadError for a decoder that Foredraft would run wrongly.
        """
        name = type(self.model).__name__
        token_ids = torch.tensor([0, 1], device=self.device)
        probe = RowProbe.new(token_ids)
        with torch.inference_mode():
            hidden = self.forward(token_ids, token_ids, probe)
            logits = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=token_ids.unsqueeze(0),
                use_cache=False,
                paged=replace(RowProbe.new(token_ids), dtype=self._attention_dtype),
            ).logits[0]
            own = self.logits(hidden)
            if not bool(own.isfinite().all()):
                raise ModelLoadError(f"{name} has logits that are not finite (NaN or infinity): damaged weights?")
            if logits.shape != own.shape or not torch.allclose(logits.float(), own.float(), atol=1e-3, rtol=1e-2):
                raise ModelLoadError(f"{name} changes its logits after the head (a scale or a cap); not supported yet")
        return probe.stored(self.config.num_hidden_layers, name, self.family.layers_that_keep_nothing(self.config))
