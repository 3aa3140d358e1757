"""Experts that all run on all rows: the same results as those that were chosen give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.checkpoints_inkling import tiny_inkling
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_mellum
from torch import Tensor

from foredraft.models import experts
from foredraft.models.experts import run_every_expert
from foredraft.models.loader import load_checkpoint


@pytest.mark.parametrize("build", [tiny_glm4_moe, tiny_mellum, tiny_inkling])
def test_all_experts_give_what_the_chosen_ones_do(
    tmp_path: Path, build: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_checkpoint(build(tmp_path / "model"), dtype=torch.float32, device=torch.device("cpu"))
    loaded.target.set_attn_implementation("eager")
    token_ids = torch.arange(40)[None] % 60
    called: set[str] = set()
    project = experts._project

    def watched(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
        called.add(name)
        return project(module, name, expert, rows)

    monkeypatch.setattr(experts, "_project", watched)
    with torch.inference_mode():
        chosen = loaded.target(token_ids, use_cache=False).logits
        assert not called
        run_every_expert(loaded.target, loaded.mtp)
        every = loaded.target(token_ids, use_cache=False).logits
    assert called == {"gate_up_proj", "down_proj"}
    assert loaded.mtp is not None
    assert (chosen - every).abs().max() < 1e-5 * chosen.abs().max()


def test_models_without_experts_are_left_alone(tmp_path: Path) -> None:
    loaded = load_checkpoint(tiny_llama(tmp_path / "model"), dtype=torch.float32, device=torch.device("cpu"))
    run_every_expert(loaded.target, loaded.mtp, None)
    assert loaded.target.config._experts_implementation != experts.EVERY_EXPERT
