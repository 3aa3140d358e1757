"""Checkpoints whose weights or layers are not what they look like: found before they are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama, write_checkpoint
from transformers import AutoConfig

from foredraft import LLM
from foredraft.errors import ModelLoadError
from foredraft.models.loader import load_checkpoint
from foredraft.models.target import TargetModel


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_packed_weights_without_a_word_of_it_are_refused(tmp_path: Path, stored: torch.dtype) -> None:
    """A cast alone would turn them into wrong ones; nothing in the configuration says how they are to be read."""
    path = tiny_llama(tmp_path / "model", num_modules=0)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(stored)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{name} is stored as .*quantized checkpoints do not run yet"):
        load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


def test_layers_that_attend_twice_are_refused(tmp_path: Path) -> None:
    """The rows of the second call would take the place of those of the first."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model("diffllama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    path = write_checkpoint(tmp_path / "model", config, 0)
    with pytest.raises(ModelLoadError, match="layer 0 attends more than once in a pass"):
        LLM(path, num_blocks=8)


def test_weights_that_are_not_finite_are_said_to_be(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "model", num_modules=0)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="logits that are not finite"):
        LLM(path, num_blocks=8)


def test_sinks_are_known_to_wait_for_a_gpu(tmp_path: Path) -> None:
    """Their kernel reads lengths on the host, whichever family has them."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    config = AutoConfig.for_model(
        "gpt_oss",
        **sizes,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    path = write_checkpoint(tmp_path / "model", config, 0)
    with_sinks = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
    plain = load_checkpoint(tiny_llama(tmp_path / "llama"), dtype=torch.float32, device=torch.device("cpu"))
    assert not TargetModel(with_sinks.target).is_capturable
    assert TargetModel(plain.target).is_capturable
