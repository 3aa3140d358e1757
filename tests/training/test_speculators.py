"""Heads in the layout of the speculators package: modules of its kind `mtp`, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_qwen3

from foredraft import LLM, SamplingParams
from foredraft.errors import ModelLoadError
from foredraft.training.speculators import import_head

NAMES = {
    "eh_proj": "input_proj",
    "hnorm": "hidden_layernorm",
    "enorm": "token_layernorm",
    "post_norm": "final_layernorm",
}


def write_head(target: Path, path: Path, **config: Any) -> dict[str, torch.Tensor]:
    """The target's own module, as speculators 0.9 names its parts (`MTPLayerMixin`); returns it in our names."""
    own = load_file(target / "mtp.safetensors")
    tensors = {}
    for name, tensor in own.items():
        part, _, rest = name.removeprefix("layers.0.").partition(".")
        tensors[f"mtp_layers.0.{NAMES[part]}.{rest}" if part in NAMES else f"mtp_layers.0.{rest}"] = tensor
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, **config})
    )
    return own


def test_a_head_of_kind_mtp_becomes_a_module(tmp_path: Path) -> None:
    target = tiny_qwen3(tmp_path / "target", num_modules=1)
    own = write_head(target, tmp_path / "head")
    file = import_head(tmp_path / "head", target, tmp_path / "out")
    converted = load_file(file)
    assert converted.keys() == own.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in converted.items())
    outputs = [
        LLM(target, mtp=mtp, dtype="float32", device="cpu", num_speculative_tokens=3, num_blocks=32).generate(
            [[1, 2, 3]], SamplingParams(max_tokens=12)
        )[0]
        for mtp in (None, tmp_path / "out")
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].token_depths == outputs[1].token_depths


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "kind eagle3 is no MTP module: it reads hidden states of three layers"),
        ({"speculators_model_type": "dflash"}, "kind dflash is no MTP module"),
        ({"speculators_model_type": "new"}, "nothing is known of this kind"),
        ({"speculators_model_type": None}, "not a checkpoint of speculators"),
        ({"num_nextn_predict_layers": 2}, "heads of one module only"),
    ],
)
def test_other_heads_are_refused_with_the_reason(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = tiny_qwen3(tmp_path / "target", num_modules=1)
    write_head(target, tmp_path / "head", **config)
    with pytest.raises(ModelLoadError, match=message):
        import_head(tmp_path / "head", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_target_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_head(tiny_qwen3(tmp_path / "target", num_modules=1), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp_layers.0.self_attn.q_norm.weight"] = torch.ones(5)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match="MTP weights do not fit"):
        import_head(tmp_path / "head", tmp_path / "target", tmp_path / "out")
    assert not (tmp_path / "out" / "mtp.safetensors").exists()


def test_a_head_with_parts_missing_or_unknown_is_refused(tmp_path: Path) -> None:
    target = tiny_qwen3(tmp_path / "target", num_modules=1)
    write_head(target, tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "input_proj" not in k}, file)
    with pytest.raises(ModelLoadError, match=r"layers\.0\.eh_proj\.weight would be missing"):
        import_head(tmp_path / "head", target, tmp_path / "out")
    save_file({**tensors, "fc.weight": torch.ones(2)}, file)
    with pytest.raises(ModelLoadError, match=r"fc\.weight is no tensor of an MTP module"):
        import_head(tmp_path / "head", target, tmp_path / "out")
