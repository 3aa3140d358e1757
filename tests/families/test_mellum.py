"""Mellum: two rotary embeddings, and a sliding module whose projection and norms lie one level up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from families.case import TransformersReference
from families.contract import FamilyCase, FamilyContract
from tiny_models import tiny_mellum
from transformers.modeling_layers import MtpModel


class OneLevelUp(TransformersReference):
    """transformers knows by itself how the module is named."""

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        return MtpModel.from_pretrained(self.target).train(False)


class TestMellum(FamilyContract):
    case = FamilyCase(
        "mellum",
        tiny_mellum,
        num_modules=1,
        depths=(1, 3),
        reference=OneLevelUp,
        module_prefix=lambda module: "mtp.",
        aliases={
            "fc": "eh_proj",
            "norm": "post_norm",
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
        },
    )
