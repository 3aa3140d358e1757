"""GLM-5: as DeepSeek-V3.2, with layers that share the choice of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
from families.case import load
from families.checkpoints_latent import tiny_glm_moe_dsa
from families.contract import FamilyCase, FamilyContract
from families.straight_modules import StraightReference
from tiny_models import edit_config

from foredraft.errors import ModelLoadError
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel


class TestGlmMoeDsa(FamilyContract):
    case = FamilyCase(
        "glm_moe_dsa",
        tiny_glm_moe_dsa,
        num_modules=1,
        depths=(1, 3),
        reference=StraightReference,
        module_prefix=lambda module: f"model.layers.{3 + module}.",
    )


def test_a_layer_that_shares_keeps_no_keys_for_it(tmp_path: Path) -> None:
    loaded = load(tiny_glm_moe_dsa(tmp_path / "model"))
    assert loaded.mtp is not None
    assert [shape.layer for shape in TargetModel(loaded.target).stored.inputs] == [0, 2]
    assert [shape.layer for shape in MtpModules(loaded.mtp).stored.inputs] == [0]


def test_a_first_layer_that_shares_is_refused(tmp_path: Path) -> None:
    path = tiny_glm_moe_dsa(tmp_path / "model")
    edit_config(path, indexer_types=["shared", "full", "full"])
    with pytest.raises(ModelLoadError, match="indexer_types: the first layer must be `full`"):
        load(path)


def test_a_module_that_shares_is_refused(tmp_path: Path) -> None:
    path = tiny_glm_moe_dsa(tmp_path / "model", num_modules=2)
    with pytest.raises(ModelLoadError, match=r"indexer_types\[1\] is `shared`, so that MTP module 1"):
        load(path)
    assert load(path, num_modules=1).mtp is not None
