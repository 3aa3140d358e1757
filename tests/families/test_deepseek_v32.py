"""DeepSeek-V3.2: every row attends to the few rows of its sequence that an indexer chooses, in modules too."""

from __future__ import annotations

from pathlib import Path

import torch
from families.case import load
from families.checkpoints_latent import tiny_deepseek_v32
from families.contract import FamilyCase, FamilyContract
from families.straight_modules import StraightReference

from foredraft.cache.groups import InputShape
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel


class TestDeepseekV32(FamilyContract):
    case = FamilyCase(
        "deepseek_v32",
        tiny_deepseek_v32,
        num_modules=1,
        depths=(1, 3),
        reference=StraightReference,
        module_prefix=lambda module: f"model.layers.{2 + module}.",
    )


def test_the_choice_matters(tmp_path: Path) -> None:
    """To the target and to its module: as soon as there is one, nothing is as without it."""
    narrow, wide = (
        StraightReference(tiny_deepseek_v32(tmp_path / str(count), index_topk=count), 1) for count in (4, 256)
    )
    token_ids = torch.randint(64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    difference = (narrow.logits(token_ids) - wide.logits(token_ids)).abs().amax(dim=1)
    assert bool((difference[:4] == 0).all())
    assert bool((difference[12:] > 0.1).all())
    hidden = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    tokens, positions = torch.tensor([token_ids]), torch.arange(1, 41)[None]
    with torch.inference_mode():
        outputs = [model.mtp.forward_layer(0, hidden, positions, None, input_ids=tokens)[0] for model in (narrow, wide)]
    difference = (outputs[0] - outputs[1]).abs().amax(dim=1)
    assert bool((difference[:4] < 1e-5).all())
    assert bool((difference[12:] > 0.01).all())


def test_keys_of_indexers_lie_beside_the_latents(tmp_path: Path) -> None:
    loaded = load(tiny_deepseek_v32(tmp_path / "model"))
    assert loaded.mtp is not None
    target, modules = TargetModel(loaded.target).stored, MtpModules(loaded.mtp).stored
    assert target.inputs == tuple(InputShape(layer, "indexer", 16, None) for layer in range(2))
    assert modules.inputs == (InputShape(0, "indexer", 16, None),)
    assert all(shape.is_latent and shape.width == 24 for shape in (*target.kv, *modules.kv))
