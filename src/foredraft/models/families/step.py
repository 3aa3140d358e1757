"""Step-3.5 and Step-3.7 Flash: modules that read states before the norm, each with a head of its own.

Beyond the rule:

- Sliding layers have another number of query heads than full ones, those of modules too. What a head has attended to
  passes a gate.
- The state that a module reads, and the one that it passes on, are those before the last norm, as in vLLM and SGLang
  (transformers hands on what comes after it; which one the modules were trained on shows in acceptance only). So h0 has
  no norm here, and the head brings its own.
- Each module has a head that was trained with it (`transformer.shared_head`): a norm and a matrix. With the target's
  head few drafts are right.
- The limits of its configuration for gates end with the target's layers; module k has that of layer k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from foredraft.models.families.family import Family, NormedHead

SLIDING = "sliding_attention"


class Step(Family):
    """stepfun-ai/Step-3.7-Flash."""

    mtp_renames: ClassVar[Mapping[str, str]] = {
        "transformer.shared_head.norm": "post_norm",
        "transformer.shared_head.output": "own_head",
    }

    def model_class(self, config: PreTrainedConfig) -> Any:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return None

    def prepare(self, text_config: Any, num_modules: int) -> None:
        for field, kind in (("mtp_layer_types", SLIDING), ("mtp_mlp_layer_types", "dense")):
            named = list(getattr(text_config, field) or [])
            setattr(text_config, field, [*named, *[kind] * num_modules][:num_modules])
        sliding = {"num_attention_heads": text_config.num_sliding_attention_heads}
        kinds = enumerate(text_config.mtp_layer_types)
        text_config.mtp_per_layer_config = {module: sliding for module, kind in kinds if kind == SLIDING}

    def complete(self, modules: MtpModel) -> None:
        for layer in _layers(modules):
            layer.use_post_norm = False
            layer.mtp_block.own_head = nn.Linear(modules.config.hidden_size, modules.config.vocab_size, bias=False)

    def adapt(self, model: nn.Module) -> None:
        if isinstance(model, PreTrainedModel) and not isinstance(model, MtpModel):
            decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
            if not isinstance(decoder.norm, nn.Identity):
                model.lm_head = NormedHead(decoder.norm, model.lm_head)
                decoder.norm = nn.Identity()

    def draft_heads(self, modules: MtpModel) -> Sequence[NormedHead]:
        return [NormedHead(layer.post_norm, layer.mtp_block.own_head) for layer in _layers(modules)]


def _layers(modules: MtpModel) -> list[Any]:
    return list(modules.layers)
