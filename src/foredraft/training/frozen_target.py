"""The target as training sees it: plain transformers, without a cache, and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigError
from foredraft.models.families.family import NormedHead
from foredraft.models.families.registry import family_of
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.models.mtp_weights import set_mtp_fields
from foredraft.training.recipe import Precision

ATTENTION = "sdpa"


@dataclass(frozen=True)
class HeadRows:
    """Rows of the head that drafts are chosen by: weight [V, H], bias [V] or None. token_ids [V]: whose they are, None:
    of all, in order."""

    weight: Tensor
    bias: Tensor | None
    token_ids: Tensor | None = None


class FrozenTarget:
    """Hidden states and head of a target that nothing trains."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model = loaded.target
        self.family = family_of(self.model.config)
        self.config = self.model.config.get_text_config(decoder=True)
        self.device, self.dtype = self.model.device, self.model.dtype
        self._decoder: nn.Module = self.model.get_decoder()  # type: ignore[no-untyped-call]
        self._head = self.family.head(self.model)
        self.model.train(False).requires_grad_(False)

    @classmethod
    def load(cls, target: str | Path, num_modules: int, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Read a target whose configuration is made ready for so many modules. ModelLoadError, ConfigError."""
        loaded = load_checkpoint(target, num_modules=0, dtype=dtype, device=device, attn_implementation=ATTENTION)
        set_mtp_fields(loaded.target.config, num_modules)
        frozen = cls(loaded)
        frozen._check()
        return frozen

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def last_layer(self) -> nn.Module:
        """The decoder layer that modules begin as."""
        layers: nn.ModuleList = self._decoder.get_submodule("layers")  # type: ignore[assignment]
        return layers[self.num_layers - 1]

    @property
    def final_norm_weight(self) -> Tensor | None:
        """Of the norm after the last layer, if it has a plain weight."""
        norm = getattr(self._decoder, "norm", None)
        return getattr(norm, "weight", None)

    def compile(self) -> None:
        """Compile the decoder layer by layer: layers of one kind share the code, so that it takes seconds."""
        layers: nn.ModuleList = self._decoder.get_submodule("layers")  # type: ignore[assignment]
        for layer in layers:
            layer.compile(dynamic=False)

    @torch.no_grad()
    def hidden(self, token_ids: Tensor) -> Tensor:
        """token_ids [B, L] -> what modules and head read (h0), [B, L, H]."""
        output = self._decoder(input_ids=token_ids, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def before_head(self, hidden: Tensor) -> Tensor:
        """What the rows of the head are multiplied with: hidden itself, for most."""
        if isinstance(self._head, NormedHead):
            normed: Tensor = self._head.norm(hidden)
            return normed
        divisor = float(getattr(self._head, "divisor", 1.0))
        return hidden if divisor == 1.0 else hidden / divisor

    def head(self, token_ids: list[int] | None = None) -> HeadRows:
        """The rows of the head for these tokens; None: all."""
        weight = self._head.get_parameter("weight") if not isinstance(self._head, NormedHead) else self._head.weight
        bias: Tensor | None = getattr(self._head, "bias", None)
        weight = weight.detach()
        if token_ids is None:
            return HeadRows(weight, None if bias is None else bias.detach())
        chosen = torch.tensor(token_ids, device=weight.device)
        rows = weight.index_select(0, chosen).contiguous()
        return HeadRows(rows, None if bias is None else bias.detach().index_select(0, chosen), chosen)

    def _check(self) -> None:
        """That hidden states and head give the logits of the model, as drafts are verified with them."""
        token_ids = torch.arange(4, device=self.device)[None] % int(self.config.vocab_size)
        with torch.no_grad():
            rows = self.head()
            own = nn.functional.linear(self.before_head(self.hidden(token_ids)), rows.weight, rows.bias)
            logits = self.model(input_ids=token_ids, use_cache=False).logits
        size = min(own.shape[-1], logits.shape[-1])
        if not torch.allclose(own[..., :size].float(), logits[..., :size].float(), atol=1e-2, rtol=2e-2):
            name = type(self.model).__name__
            raise ConfigError(f"{name} changes its logits after the head (a scale or a cap), which training does not")


def precision_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What the passes compute in."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, precision)
    return dtype
