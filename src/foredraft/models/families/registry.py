"""Which family a configuration belongs to."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from transformers import PreTrainedConfig

from foredraft.models.families.family import Family

ORDINARY = Family()
FAMILIES: dict[str, tuple[str, ...]] = {
    "inkling.Inkling": ("inkling_mm_model", "inkling_text"),
    "latent.Latent": ("deepseek_v3", "glm4_moe_lite", "sarvam_mla"),
    "sparse.Sparse": ("deepseek_v32",),
    "sparse.SharingSparse": ("glm_moe_dsa",),
    "gated_delta.GatedDelta": ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    "nemotron.Nemotron": ("nemotron_h",),
    "bailing.Bailing": ("bailing_hybrid",),
    "mimo.MiMo": ("mimo_v2_flash",),
    "step.Step": ("step3p7", "step3p5"),
    "ernie.Ernie": ("ernie4_5_moe",),
    "longcat.LongCat": ("longcat_flash",),
}
"""A module of this package and the class in it, and the types of transformers' configurations that it is for."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model's configuration; one that needs nothing special, if none is named for it."""
    types = {config.model_type, config.get_text_config(decoder=True).model_type}
    return next((_family(name) for name, own in FAMILIES.items() if types & set(own)), ORDINARY)


@cache
def _family(name: str) -> Family:
    """Imported when it is asked for: with it comes what transformers has of the architecture."""
    module, class_name = name.split(".")
    family: Family = getattr(import_module(f"foredraft.models.families.{module}"), class_name)()
    return family
