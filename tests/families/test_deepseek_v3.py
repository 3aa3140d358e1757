"""DeepSeek-V3, and Sarvam, which is like it: latents in the cache, and a module of experts that drafts several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from families.case import load
from families.checkpoints_latent import tiny_deepseek_v3, tiny_sarvam
from families.contract import FamilyCase, FamilyContract
from reference import Reference, assert_close

from foredraft import LLM, SamplingParams
from foredraft.cache.groups import KVShape
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.errors import ConfigError
from foredraft.models.loader import load_checkpoint
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel


class TestDeepseekV3(FamilyContract):
    case = FamilyCase(
        "deepseek_v3",
        tiny_deepseek_v3,
        num_modules=1,
        depths=(1, 3),
        module_prefix=lambda module: f"model.layers.{2 + module}.",
    )


class TestTwoModules(FamilyContract):
    case = FamilyCase(
        "deepseek_v3_of_two_modules",
        partial(tiny_deepseek_v3, num_modules=2),
        num_modules=2,
        depths=(2,),
        module_prefix=lambda module: f"model.layers.{2 + module}.",
    )


class TestSarvam(FamilyContract):
    case = FamilyCase(
        "sarvam_mla",
        tiny_sarvam,
        num_modules=1,
        depths=(2,),
        module_prefix=lambda module: f"model.layers.{2 + module}.",
    )


def test_a_row_is_one_latent_and_one_rotated_key(tmp_path: Path) -> None:
    """In modules too; no weight is copied for it."""
    loaded = load(tiny_deepseek_v3(tmp_path / "model"))
    assert loaded.mtp is not None
    before = [{name: tensor.data_ptr() for name, tensor in m.state_dict().items()} for m in (loaded.target, loaded.mtp)]
    target, modules = TargetModel(loaded.target), MtpModules(loaded.mtp)
    latent = KVShape(num_kv_heads=1, key_dim=16 + 8, value_dim=16, window=None, fold=4, is_latent=True)
    assert target.stored.kv == (latent, latent)
    assert modules.stored.kv == (latent,)
    after = [{name: tensor.data_ptr() for name, tensor in m.state_dict().items()} for m in (loaded.target, loaded.mtp)]
    assert before == after


def test_bfloat16_gives_nearly_the_same(tmp_path: Path) -> None:
    """Without experts: rounding would choose others."""
    path = tiny_deepseek_v3(tmp_path / "model", first_k_dense_replace=2, num_modules=0)
    loaded = load_checkpoint(path, dtype=torch.bfloat16, device=torch.device("cpu"))
    engine = build_engine(loaded, EngineConfig(num_speculative_tokens=0, num_blocks=8, max_num_seqs=1))
    engine.add_request("a", list(range(0, 60, 3)), SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    rows = engine.runner.storage.hidden[engine.runner.storage.slots(engine.cache.block_tables("a")[0], 20)]
    ours = engine.runner.target.logits(rows).float()
    assert_close(ours, Reference(path).logits(range(0, 60, 3)), 0.05)


def test_latent_attention_is_not_quantized(tmp_path: Path) -> None:
    path = tiny_deepseek_v3(tmp_path / "model", first_k_dense_replace=2, num_modules=0)
    with pytest.raises(ConfigError, match="quantization=int8 does not run with latent attention"):
        LLM(path, dtype="float32", device="cpu", quantization="int8")


def test_the_host_runs_steps_unless_told_otherwise(tmp_path: Path) -> None:
    """A pass waits for a GPU, so that no graph can hold it."""
    loaded = load(tiny_deepseek_v3(tmp_path / "model"))
    config = EngineConfig(num_speculative_tokens=1, num_blocks=8, max_num_seqs=1)
    assert build_engine(loaded, config).runner.resident is None
    resident = build_engine(loaded, replace(config, execution="overlapped")).runner.resident
    assert resident is not None
    assert not resident.graphs.is_enabled
