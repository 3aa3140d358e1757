"""What published modules repeat of their target: read, and refused where it is something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import ModelLoadError
from foredraft.models import shared_copies
from foredraft.models.loader import LoadedModel, load_checkpoint

EMBEDDING, HEAD = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
NAMES = {EMBEDDING: "embedding", HEAD: "head"}


def load(path: Path, num_modules: int | None = None, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_checkpoint(path, num_modules=num_modules, dtype=dtype, device=torch.device("cpu"))


def checkpoint(path: Path, name: str, edit: Callable[[Tensor], Tensor], num_modules: int = 1) -> Path:
    """With one copy changed."""
    tiny.tiny_glm4_moe(path, num_modules=num_modules)
    tensors = load_file(path / "model.safetensors")
    tensors[name] = edit(tensors[name].clone())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def last_number_changed(copy: Tensor) -> Tensor:
    copy[-1, -1] += 1
    return copy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_copy_with_another_number_is_refused(
    tmp_path: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are compared at once."""
    path = checkpoint(tmp_path / "model", name, last_number_changed)
    monkeypatch.setattr(shared_copies, "_MAX_NUMBERS", 32 * step)
    message = rf"{name.replace('.', '[.]')} is not the target's {NAMES[name]}, .* num_speculative_tokens=0"
    with pytest.raises(ModelLoadError, match=message):
        load(path)
    assert load(path, num_modules=0).mtp is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_rows_behind_those_of_the_target_are_padding(
    tmp_path: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "model", name, lambda copy: torch.cat([copy, torch.ones(16, copy.shape[1])]))
    monkeypatch.setattr(shared_copies, "_MAX_NUMBERS", 32 * step)
    assert load(path).mtp is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(60, 32), (64, 16)])
def test_a_copy_of_another_shape_is_refused(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    path = checkpoint(tmp_path / "model", name, lambda copy: copy[: shape[0], : shape[1]].contiguous())
    with pytest.raises(ModelLoadError, match="is not the target's"):
        load(path)


def test_copies_are_compared_in_the_dtype_of_the_target(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", HEAD, lambda copy: copy.bfloat16().float())
    assert load(path, dtype=torch.bfloat16).mtp is not None
    with pytest.raises(ModelLoadError, match="is not the target's"):
        load(path)


def test_copies_of_later_modules_are_not_read(tmp_path: Path) -> None:
    name = "model.layers.3.shared_head.head.weight"
    path = checkpoint(tmp_path / "model", name, last_number_changed, num_modules=2)
    assert load(path, num_modules=1).mtp is not None
    with pytest.raises(ModelLoadError, match=r"layers[.]3[.]shared_head[.]head[.]weight is not"):
        load(path)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "layers.0.shared_head.head.weight"])
def test_copies_in_a_file_of_modules_alone_are_compared_too(tmp_path: Path, name: str) -> None:
    path = tiny.tiny_llama(tmp_path / "model", num_modules=1)
    target, tensors = load_file(path / "model.safetensors"), load_file(path / "mtp.safetensors")
    own = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
    save_file(tensors | {name: target[own].clone()}, path / "mtp.safetensors")
    assert load(path).mtp is not None
    save_file(tensors | {name: target[own] + 1}, path / "mtp.safetensors")
    with pytest.raises(ModelLoadError, match="is not the target's"):
        load(path)
    assert load(path, num_modules=0).mtp is None


def test_a_bias_that_the_target_has_not_is_refused(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path / "model", num_modules=1)
    tensors = load_file(path / "mtp.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(64)}, path / "mtp.safetensors")
    with pytest.raises(ModelLoadError, match=r"lm_head[.]bias is not the target's head"):
        load(path)
