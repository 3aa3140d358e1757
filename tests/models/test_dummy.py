"""Random weights: of the shape that config.json describes, the same every time, and able to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import edit_config, tiny_alternating, tiny_glm4_moe, tiny_llama, tiny_mellum

from foredraft import LLM, SamplingParams
from foredraft.config import EngineConfig
from foredraft.engine.build import resolve_depth
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.models.fingerprint import fingerprint
from foredraft.models.loader import LoadedModel, inspect_checkpoint, load_checkpoint

CPU = torch.device("cpu")


def strip(path: Path) -> Path:
    """Leave nothing but the configuration."""
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    return path


def load(path: Path, dtype: torch.dtype = torch.float32, num_modules: int | None = None) -> LoadedModel:
    return load_checkpoint(path, num_modules=num_modules, dtype=dtype, device=CPU, load_format="dummy")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = strip(tiny_llama(tmp_path, num_modules=3))
    edit_config(path, num_mtp_layers=3)
    return path


@pytest.mark.parametrize("make", [tiny_llama, tiny_alternating, tiny_glm4_moe, tiny_mellum])
def test_the_shape_is_that_of_the_checkpoint(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    real = inspect_checkpoint(path)
    real_target = load_checkpoint(path, dtype=torch.bfloat16, device=CPU).target
    strip(path)
    edit_config(path, num_mtp_layers=real.num_mtp_modules)
    info = inspect_checkpoint(path, load_format="dummy")
    assert replace(info, mtp_layout=None, mtp_path=None) == replace(real, mtp_layout=None, mtp_path=None)
    loaded = load(path, torch.bfloat16)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in real_target.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in loaded.target.state_dict().items()} == shapes
    assert loaded.mtp is not None
    for tensor in (*loaded.mtp.state_dict().values(), *loaded.mtp.buffers(), *loaded.target.buffers()):
        assert not tensor.is_meta
        assert tensor.isfinite().all()
    assert not loaded.mtp.training
    assert loaded.tokenizer is None


def test_weights_are_random_alike_in_every_run_and_leave_the_generator_alone(llama: Path) -> None:
    torch.manual_seed(5)
    first = load(llama)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    torch.manual_seed(6)
    second = load(llama)
    assert first.mtp is not None
    assert second.mtp is not None
    assert fingerprint(first.target) == fingerprint(second.target)
    assert fingerprint(first.mtp) == fingerprint(second.mtp)
    weights = [first.mtp.get_parameter(f"layers.{index}.eh_proj.weight") for index in range(2)]
    assert not torch.equal(weights[0], weights[1])
    assert 0.01 < float(weights[0].std()) < 0.1


def test_only_the_modules_asked_for_are_made(llama: Path) -> None:
    loaded = load(llama, num_modules=2)
    assert loaded.mtp is not None
    assert len(loaded.mtp.layers) == 2
    assert loaded.num_mtp_modules == 3
    assert load(llama, num_modules=0).mtp is None


def test_modules_that_lie_beside_are_counted(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, num_modules=2)
    (path / "model.safetensors").unlink()
    info = inspect_checkpoint(path, path / "mtp.safetensors", load_format="dummy")
    assert (info.num_mtp_modules, info.mtp_layout) == (2, "beside")
    assert inspect_checkpoint(path, load_format="dummy").num_mtp_modules == 0


def test_an_engine_of_random_weights_generates_the_same_at_any_depth(llama: Path) -> None:
    with LLM(llama, load_format="dummy", dtype="float32", device="cpu", num_blocks=32) as llm:
        assert llm.engine.limits.max_depth == 3
        plain, drafted = (
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, num_speculative_tokens=depth))[0]
            for depth in (0, 3)
        )
    assert plain.token_ids == drafted.token_ids
    assert len(plain.token_ids) == 20
    assert drafted.stats.num_drafts > 0


def test_drafts_without_modules_are_refused(tmp_path: Path) -> None:
    path = strip(tiny_llama(tmp_path, num_modules=2))
    assert load(path).mtp is None
    config = EngineConfig(model=path, load_format="dummy", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=2, but config\.json declares no MTP modules"):
        resolve_depth(config, 0)


@pytest.mark.parametrize("count", [-1, 65, 1.5, "many", True])
def test_a_wrong_number_of_modules_is_refused(llama: Path, count: object) -> None:
    edit_config(llama, num_mtp_layers=count)
    with pytest.raises(ModelLoadError, match="num_mtp_layers must be an integer from 0 to 64"):
        inspect_checkpoint(llama, load_format="dummy")


def test_numbers_that_disagree_are_refused(llama: Path) -> None:
    edit_config(llama, num_nextn_predict_layers=2)
    with pytest.raises(ModelLoadError, match="these must agree: num_mtp_layers=3, num_nextn_predict_layers=2"):
        inspect_checkpoint(llama, load_format="dummy")


def test_a_directory_with_a_configuration_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format=dummy needs model"):
        EngineConfig(load_format="dummy")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        inspect_checkpoint(tmp_path, load_format="dummy")
    with pytest.raises(ModelLoadError, match="no such directory"):
        inspect_checkpoint("some/model", load_format="dummy")
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy"):
        EngineConfig(load_format="random")  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 0}, {"vocab_size": 0}, {"hidden_act": "zzz"}])
def test_a_configuration_that_describes_no_model_is_named(llama: Path, changes: dict[str, object]) -> None:
    edit_config(llama, **changes)
    with pytest.raises((ModelLoadError, ConfigError)):
        LLM(llama, load_format="dummy", num_blocks=8, device="cpu")
