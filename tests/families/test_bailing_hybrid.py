"""Ling 3: layers of Kimi delta attention, gated latent attention stored as latents, a module of the latter."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyModel, load
from families.checkpoints_hybrid import tiny_bailing
from families.checkpoints_own_names import OwnNames
from families.contract import LENGTHS, FamilyCase, FamilyContract, check_logits, check_own_drafts
from families.padding import check_padding

from foredraft import LLM, SamplingParams
from foredraft.errors import ModelLoadError
from foredraft.models.loader import inspect_checkpoint


def case(name: str, **changes: Any) -> FamilyCase:
    return FamilyCase(
        name,
        partial(tiny_bailing, **changes),
        num_modules=1,
        depths=(1, 3),
        reference=OwnNames,
        module_prefix=lambda module: "model.layers.4.",
        aliases={"final_layernorm": "post_norm", "dense": "o_proj", "expert_bias": "e_score_correction_bias"},
        target_aliases={
            "dense": "o_proj",
            "expert_bias": "e_score_correction_bias",
            **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"),
            "A_log": "log",
        },
        settings={"state_interval": 4},
        bound=5e-5,  # the rule forgets and adds up in another order in chunks
        is_resident=False,
    )


class TestBailing(FamilyContract):
    case = case("bailing_hybrid")

    @pytest.mark.parametrize("chunk", [40, 1024])
    def test_runs_of_many_rows(self, model: FamilyModel, chunk: int) -> None:
        """From one state to the next, so that the rule is applied in chunks."""
        check_logits(model, model.engine(0, state_interval=96, max_num_batched_tokens=chunk), (1, 30, 60, 70))

    def test_what_layers_keep(self, model: FamilyModel) -> None:
        """16 numbers of latent and a rotated key of 8 in layers of attention, and no more in the module."""
        engine = model.engine(1)
        stored = engine.runner.target.stored
        assert [shape.width for shape in stored.kv] == [0, 24, 0, 24]
        assert [(state.layer, state.sizes) for state in stored.states] == [(0, (4, 8, 8)), (2, (4, 8, 8))]
        assert [shape.width for shape in engine.cache.layout.modules] == [24]

    @pytest.mark.parametrize("num_rows", [5, 40, 400])
    def test_rows_that_are_none_change_nothing(self, model: FamilyModel, num_rows: int) -> None:
        """Row by row, in chunks, and in chunks of some requests at a time."""
        decoder: Any = model.engine(0).runner.target.model.get_decoder()  # type: ignore[no-untyped-call]
        seen = torch.randn(4, 3 + num_rows, 4 * 32 + 4, generator=torch.Generator().manual_seed(0))
        decay, beta = seen[..., 96:].tensor_split([32], dim=2)
        decay.abs_().neg_()
        beta.sigmoid_()
        check_padding(decoder.layers[0].self_attn, seen, (4, 8, 8))


class TestOtherParts:
    """Queries through a latent, and rates of forgetting without a bound."""

    case = case("bailing_hybrid_other", q_lora_rank=12, kda_safe_gate=False)

    def test_logits(self, model: FamilyModel) -> None:
        check_logits(model, model.engine(0, max_num_seqs=6, max_num_batched_tokens=16), LENGTHS)

    def test_drafts(self, model: FamilyModel, depth: int) -> None:
        check_own_drafts(model, model.engine(depth), SamplingParams(max_tokens=depth + 8, ignore_eos=True))


def test_modules_behind_a_recurrent_layer_are_refused(tmp_path: Path) -> None:
    path = tiny_bailing(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    for kinds in ("layer_types", "mlp_layer_types"):
        config[kinds] = config[kinds][:3]
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    for attempt in (load, LLM):
        with pytest.raises(ModelLoadError, match="only if the target's last layer is full attention"):
            attempt(path)
    assert load(path, num_modules=0).mtp is None


@pytest.mark.filterwarnings("ignore:load_format=dummy")
def test_random_weights(tmp_path: Path) -> None:
    path = tiny_bailing(tmp_path / "model")
    stored, drawn = inspect_checkpoint(path), inspect_checkpoint(path, load_format="dummy")
    assert drawn.num_mtp_modules == stored.num_mtp_modules == 1
    assert drawn.num_mtp_parameters == stored.num_mtp_parameters
    assert drawn.num_parameters == stored.num_parameters
    with LLM(path, load_format="dummy", dtype="bfloat16", device="cpu", num_blocks=16) as llm:
        request = llm.engine.add_request("0", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert request.num_tokens == 8
        assert llm.engine.stats.speculation.num_drafted_tokens > 0
