"""ERNIE 4.5 MoE: rotary pairs that lie side by side, and a module under names of its own without a last norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from families.checkpoints_own_names import OwnNames, tiny_ernie
from families.contract import FamilyCase, FamilyContract


class WithoutLastNorm(OwnNames):
    """The block's output goes to the head as it is."""

    fields: ClassVar[Mapping[str, Any]] = {"chain_hidden_post_norm": False}


class TestErnie(FamilyContract):
    case = FamilyCase(
        "ernie4_5_moe",
        tiny_ernie,
        num_modules=1,
        depths=(1, 3),
        reference=WithoutLastNorm,
        module_prefix=lambda module: "model.mtp_",
    )
