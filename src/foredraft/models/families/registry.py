"""Which family a configuration belongs to."""

from __future__ import annotations

from transformers import PreTrainedConfig

from foredraft.models.families.family import Family
from foredraft.models.families.inkling import Inkling

ORDINARY = Family()
FAMILIES: tuple[Family, ...] = (Inkling(),)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model's configuration; one that needs nothing special, if none is named for it."""
    names = {config.model_type, config.get_text_config(decoder=True).model_type}
    return next((family for family in FAMILIES if family.model_types & names), ORDINARY)
