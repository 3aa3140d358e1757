"""GLM-4 MoE: routed experts, and a module inside the checkpoint, as the layer behind the target's."""

from __future__ import annotations

from families.contract import FamilyCase, FamilyContract
from tiny_models import tiny_glm4_moe


class TestGlm4Moe(FamilyContract):
    case = FamilyCase(
        "glm4_moe",
        tiny_glm4_moe,
        num_modules=1,
        depths=(1, 3),
        module_prefix=lambda module: f"model.layers.{2 + module}.",
    )
