"""Which family a configuration belongs to."""

from __future__ import annotations

from transformers import PreTrainedConfig

from foredraft.models.families.bailing import Bailing
from foredraft.models.families.ernie import Ernie
from foredraft.models.families.family import Family
from foredraft.models.families.gated_delta import GatedDelta
from foredraft.models.families.inkling import Inkling
from foredraft.models.families.latent import Latent
from foredraft.models.families.longcat import LongCat
from foredraft.models.families.mimo import MiMo
from foredraft.models.families.nemotron import Nemotron
from foredraft.models.families.sparse import SharingSparse, Sparse
from foredraft.models.families.step import Step

ORDINARY = Family()
FAMILIES: tuple[Family, ...] = (
    Inkling(),
    GatedDelta(),
    MiMo(),
    Ernie(),
    LongCat(),
    Step(),
    Latent(),
    Sparse(),
    SharingSparse(),
    Nemotron(),
    Bailing(),
)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model's configuration; one that needs nothing special, if none is named for it."""
    names = {config.model_type, config.get_text_config(decoder=True).model_type}
    return next((family for family in FAMILIES if family.model_types & names), ORDINARY)
