"""GLM-4.7-Flash: DeepSeek-V3's attention, and a module that is declared in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from families.case import TransformersReference
from families.checkpoints_latent import tiny_glm4_moe_lite
from families.contract import FamilyCase, FamilyContract


class Glm4MoeLiteReference(TransformersReference):
    def load_modules(self, directory: Path, num_modules: int) -> Any:
        """With the module's kind of MLP, which transformers wants to be told."""
        self.target.config.mtp_mlp_layer_types = ["sparse"] * num_modules
        return super().load_modules(directory, num_modules)


class TestGlm4MoeLite(FamilyContract):
    case = FamilyCase(
        "glm4_moe_lite",
        tiny_glm4_moe_lite,
        num_modules=1,
        depths=(1, 3),
        reference=Glm4MoeLiteReference,
        module_prefix=lambda module: f"model.layers.{2 + module}.",
    )
