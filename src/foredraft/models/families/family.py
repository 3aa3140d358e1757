"""What the runtime asks of an architecture; the answers here are those of a decoder with ordinary attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.media import Media, MediaKind


class NormedHead(nn.Module):
    """A head that norms its input by itself, where the state before it is passed on without."""

    def __init__(self, norm: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    @property
    def weight(self) -> Tensor:
        """[V, hidden_size]."""
        weight: Tensor = self.linear.get_parameter("weight")
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V]."""
        return getattr(self.linear, "bias", None)

    @property
    def scale(self) -> Tensor | None:
        """Of each row, if the head is int8."""
        return getattr(self.linear, "scale", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, V]."""
        logits: Tensor = self.linear(self.norm(hidden))
        return logits


class Family:
    """One architecture, or several alike. A subclass says what differs, and replaces what cannot run over paged rows.

    layer_kinds: entries of `layer_types` that run.
    is_chained: a module reads the hidden state of the one before it; otherwise every module reads the target's.
    is_capturable: a pass never waits for a GPU, so that CUDA graphs may hold it.
    mtp_renames: what checkpoints call parts of a module, to what `MtpModel` does; whole parts of a dotted name.
    """

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention", "sliding_attention"})
    is_chained: ClassVar[bool] = True
    is_capturable: ClassVar[bool] = True
    mtp_renames: ClassVar[Mapping[str, str]] = {}

    def model_class(self, config: PreTrainedConfig) -> Any:
        """The class of transformers that runs `config`; None if there is none."""
        return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)

    def own_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """What of `config` that class takes: all of it, or its text model."""
        is_whole = isinstance(config, self.model_class(config).config_class)
        return config if is_whole else config.get_text_config(decoder=True)

    def refusal(self, config: PreTrainedConfig) -> str | None:
        """Why a configuration does not run, if it does not; None: nothing is known against it."""
        name = self.model_class(config)
        if not name._supports_attention_backend or config.get_text_config(decoder=True).is_heterogeneous:
            return f"{name.__name__} does not have ordinary attention in all layers alike"
        return None

    def prepare(self, text_config: Any, num_modules: int) -> None:
        """Write into a configuration what it leaves unsaid of its modules, before they are built."""

    def complete(self, modules: MtpModel) -> None:
        """Replace or add parts of modules that `MtpModel` builds otherwise than they are published; no weight is read
        yet."""

    def adapt(self, model: nn.Module) -> None:
        """Replace the parts of a target, or of its `MtpModel`, that do not run over paged rows as they are."""

    def layers_that_keep_nothing(self, text_config: Any) -> frozenset[int]:
        """Numbers of those target layers that only look at a row itself, as an MLP does."""
        return frozenset()

    def head(self, model: PreTrainedModel) -> nn.Module:
        """What turns h0 [R, hidden_size] to logits [R, V]: a linear layer, or one with a `divisor` of its inputs."""
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def placeholders(self, config: PreTrainedConfig) -> Mapping[MediaKind, int]:
        """The tokens in whose place a prompt's images and sound stand, by kind; none: it is text only."""
        return {}

    def encode(self, model: PreTrainedModel, kind: MediaKind, features: Mapping[str, Tensor]) -> Tensor:
        """The embeddings that one image or piece of sound puts in place of its placeholders, [N, hidden_size].

        features: as transformers' processor names them, on the CPU. The same rows go to the target and to every module.
        """
        raise NotImplementedError(f"{type(model).__name__} takes text only")

    def media_fault(self, config: PreTrainedConfig, media: Media) -> str | None:
        """Why `encode` cannot read what is shown, if it cannot. A GPU that looks up what is not there is lost."""
        return None

    def draft_heads(self, modules: MtpModel) -> Sequence[NormedHead]:
        """The head of each module, where they have their own; none: they share the target's."""
        return ()

    def mtp_name(self, name: str, num_hidden_layers: int) -> tuple[int, str] | None:
        """The number of the module that a checkpoint's tensor belongs to, and its name in `MtpModel`; None: of none."""
        if match := _NAMED.fullmatch(name):
            index, rest = match["index"], self._renamed(match["rest"])
            return (0, rest) if index is None else (int(index), f"layers.{index}.{rest}")
        if (match := _NUMBERED.fullmatch(name)) and int(match["index"]) >= num_hidden_layers:
            index = int(match["index"]) - num_hidden_layers
            return index, f"layers.{index}.{self._renamed(match['rest'])}"
        return None

    def _renamed(self, rest: str) -> str:
        for part, new_part in self.mtp_renames.items():
            rest = re.sub(rf"(?<![^.]){re.escape(part)}(?![^.])", new_part, rest)
        return rest


def replace_parts(model: nn.Module, kinds: type | UnionType, make: Callable[[Any], nn.Module]) -> None:
    """Put make(part) in the place of every part of `model` that is of one of `kinds`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, make(child))


_NUMBERED = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.)?layers\.(?P<index>\d+)\.(?P<rest>.+)"
)
_NAMED = re.compile(r"(?:model\.)?mtp\.(?:layers\.(?P<index>\d+)\.)?(?P<rest>.+)")
