"""Random weights in the shape of a checkpoint: as many numbers as the checkpoint has, of the target and the modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families.checkpoints_own_names import tiny_ernie, tiny_longcat, tiny_mimo, tiny_step
from tiny_models import edit_config, tiny_mellum

from foredraft import LLM, SamplingParams
from foredraft.models.loader import inspect_checkpoint

BUILDERS = (tiny_ernie, tiny_longcat, tiny_mellum, tiny_mimo, tiny_step)
SAY_NOTHING = (tiny_longcat, tiny_mimo)
"""Those whose configurations do not say how many modules there are."""


@pytest.mark.filterwarnings("ignore:load_format=dummy")
@pytest.mark.parametrize("build", BUILDERS)
def test_random_weights(build: Callable[[Path], Path], tmp_path: Path) -> None:
    path = build(tmp_path / "model")
    stored = inspect_checkpoint(path)
    if build in SAY_NOTHING:
        edit_config(path, num_mtp_layers=stored.num_mtp_modules)
    drawn = inspect_checkpoint(path, load_format="dummy")
    for name in ("architecture", "num_mtp_modules", "num_parameters", "num_mtp_parameters"):
        assert getattr(drawn, name) == getattr(stored, name)
    with LLM(path, load_format="dummy", dtype="bfloat16", device="cpu", num_blocks=16) as llm:
        request = llm.engine.add_request("0", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert request.num_tokens == 8
        assert llm.engine.stats.speculation.num_drafted_tokens > 0
