"""Tensors that look like those of MTP modules, in a layout that nothing knows: named, never passed over in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from families.case import load
from families.checkpoints_own_names import edit_tensors
from tiny_models import tiny_glm4_moe, tiny_llama

from foredraft import LLM
from foredraft.errors import ModelLoadError
from foredraft.models.loader import inspect_checkpoint

LIKE_MODULES = (
    "model.mtp_foo.0.weight",
    "model.mtp0.eh_proj.weight",
    "language_model.MTP.layers.0.enorm.weight",
    "model.nextn_layers.0.enorm.weight",
    "model.layers.1.nextn.eh_proj.weight",
    "transformer.h.2.attn.weight",
    "model.text_model.layers.2.self_attn.q_proj.weight",
)
LIKE_NONE = (
    "vision_tower.encoder.layers.40.mlp.fc1.weight",
    "visual.blocks.30.attn.qkv.weight",
    "model.vision_model.layers.7.norm.weight",
    "audio.layers.3.weight",
    "model.layers.1.self_attn.rotary_emb.inv_freq",
    "prompt.weight",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and no module."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama", num_modules=0)


def with_surplus(path: Path, directory: Path, *names: str) -> Path:
    """A copy of a checkpoint with some tensors more."""
    shutil.copytree(path, directory)
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))
    return directory


@pytest.mark.parametrize("name", LIKE_MODULES)
def test_what_looks_like_a_module_is_refused_by_name(llama: Path, name: str, tmp_path: Path) -> None:
    path = with_surplus(llama, tmp_path / "surplus", name, "vision_tower.layers.9.weight")
    for attempt in (load, inspect_checkpoint, LLM):
        with pytest.raises(ModelLoadError) as error:
            attempt(path)
        assert f"surplus: {name}. With" in str(error.value)


@pytest.mark.parametrize("name", LIKE_MODULES)
def test_the_target_runs_without_it(llama: Path, name: str, tmp_path: Path) -> None:
    path = with_surplus(llama, tmp_path / "surplus", name)
    assert load(path, num_modules=0).mtp is None
    with LLM(path, num_speculative_tokens=0, num_blocks=16, device="cpu") as llm:
        assert llm.info.num_mtp_modules == 0


def test_it_does_not_matter_beside_modules_in_a_file_of_their_own(tmp_path: Path) -> None:
    path = with_surplus(tiny_llama(tmp_path / "llama", num_modules=2), tmp_path / "surplus", "model.mtp_foo.0.weight")
    assert load(path).num_mtp_modules == 2


def test_other_surplus_tensors_are_allowed(llama: Path, tmp_path: Path) -> None:
    assert load(with_surplus(llama, tmp_path / "surplus", *LIKE_NONE)).num_mtp_modules == 0


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path = tiny_glm4_moe(tmp_path / "glm4_moe")
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit_tensors(path, lambda tensors: tensors.pop(lost))
    with pytest.raises(ModelLoadError, match=f": missing: {lost}$"):
        load(path)
