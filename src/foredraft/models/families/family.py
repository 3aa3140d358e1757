"""What the runtime asks of an architecture; the answers here are those of a decoder with ordinary attention."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


class Family:
    """One architecture, or several alike. A subclass says what differs, and replaces what cannot run over paged rows.

    model_types: of transformers' configurations. layer_kinds: entries of `layer_types` that run.
    is_chained: a module reads the hidden state of the one before it; otherwise every module reads the target's.
    is_capturable: a pass never waits for a GPU, so that CUDA graphs may hold it.
    """

    model_types: ClassVar[frozenset[str]] = frozenset()
    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention", "sliding_attention"})
    is_chained: ClassVar[bool] = True
    is_capturable: ClassVar[bool] = True

    def model_class(self, config: PreTrainedConfig) -> Any:
        """The class of transformers that runs `config`; None if there is none."""
        return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)

    def auto_class(self, config: PreTrainedConfig) -> Any:
        """What loads a checkpoint of it."""
        return AutoModelForCausalLM

    def refusal(self, config: PreTrainedConfig) -> str | None:
        """Why a configuration does not run, if it does not; None: nothing is known against it."""
        name = self.model_class(config)
        if not name._supports_attention_backend or config.get_text_config(decoder=True).is_heterogeneous:
            return f"{name.__name__} does not have ordinary attention in all layers alike"
        return None

    def adapt(self, model: nn.Module) -> None:
        """Replace the parts of a target, or of its `MtpModel`, that do not run over paged rows as they are."""

    def head(self, model: PreTrainedModel) -> nn.Module:
        """What turns h0 [R, hidden_size] to logits [R, V]: a linear layer, or one with a `divisor` of its inputs."""
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def mtp_name(self, name: str, num_hidden_layers: int) -> tuple[int, str] | None:
        """The number of the module that a checkpoint's tensor belongs to, and its name in `MtpModel`; None: of none."""
        if match := _NAMED.fullmatch(name):
            index = match["index"]
            return (0, match["rest"]) if index is None else (int(index), f"layers.{index}.{match['rest']}")
        if (match := _NUMBERED.fullmatch(name)) and int(match["index"]) >= num_hidden_layers:
            index = int(match["index"]) - num_hidden_layers
            return index, f"layers.{index}.{match['rest']}"
        return None


_NUMBERED = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.)?layers\.(?P<index>\d+)\.(?P<rest>.+)"
)
_NAMED = re.compile(r"(?:model\.)?mtp\.(?:layers\.(?P<index>\d+)\.)?(?P<rest>.+)")
