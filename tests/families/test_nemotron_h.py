"""Nemotron-H: layers of Mamba-2, layers that keep nothing, attention without positions, a module of several blocks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyModel, TransformersReference, load
from families.checkpoints_hybrid import NemotronModule, tiny_nemotron
from families.checkpoints_own_names import REFERENCE_FILE, edit_tensors
from families.contract import FamilyCase, FamilyContract, check_logits, check_own_drafts
from families.padding import check_padding
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.cache.groups import NO_KV
from foredraft.errors import ModelLoadError
from foredraft.models.families.nemotron import Nemotron
from foredraft.models.loader import inspect_checkpoint


class OwnModule(TransformersReference):
    """A module that transformers does not have: its parts, one after the other."""

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        return StraightModule(self.target, torch.load(directory / REFERENCE_FILE))


class StraightModule:
    """Transformers' `MtpModel`, as far as the reference asks it."""

    def __init__(self, target: Any, tensors: dict[str, Tensor]) -> None:
        self.config, self._target = target.config, target
        module = NemotronModule(target.config)
        module.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()})
        self.layers = [module.train(False)]

    def forward_layer(
        self, index: int, hidden: Tensor, position_ids: Tensor, cache: Any, *, input_ids: Tensor
    ) -> Tensor:
        """hidden [1, T, hidden_size] -> [1, T, hidden_size]."""
        output: Tensor = self.layers[index](self._target.model.embeddings(input_ids), hidden)
        return output

    def _project_to_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._target.lm_head(hidden)
        return logits


def case(name: str, **changes: Any) -> FamilyCase:
    return FamilyCase(
        name,
        partial(tiny_nemotron, **changes),
        num_modules=1,
        depths=(1, 3),
        reference=OwnModule,
        module_prefix=lambda module: "mtp.",
        aliases={"final_layernorm": "post_norm"},
        settings={"state_interval": 4},
        is_resident=False,
    )


class TestNemotronH(FamilyContract):
    case = case("nemotron_h")

    @pytest.mark.parametrize("chunk", [40, 1024])
    def test_runs_of_many_rows(self, model: FamilyModel, chunk: int) -> None:
        """From one state to the next, so that the chunks of the rule are whole."""
        check_logits(model, model.engine(0, state_interval=96, max_num_batched_tokens=chunk), (1, 30, 70))

    @pytest.mark.parametrize(
        "name",
        ["A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "in_proj.weight", "norm.weight", "out_proj.weight"],
    )
    def test_a_missing_tensor_of_a_recurrent_layer_is_named(
        self, model: FamilyModel, name: str, tmp_path: Path
    ) -> None:
        file = model.path / "model.safetensors"
        path = model.without(tmp_path / "damaged", f"backbone.layers.0.mixer.{name}", file)
        with pytest.raises(ModelLoadError, match=f": missing: model.layers.0.mixer.{name}$"):
            load(path)

    @pytest.mark.parametrize("num_rows", [5, 40])
    def test_rows_that_are_none_change_nothing(self, model: FamilyModel, num_rows: int) -> None:
        decoder: Any = model.engine(0).runner.target.model.get_decoder()  # type: ignore[no-untyped-call]
        seen = torch.randn(3, 3 + num_rows, 48 + 2 * 16 + 4, generator=torch.Generator().manual_seed(0))
        check_padding(decoder.layers[0].mixer, seen, (4, 12, 8))

    def test_what_layers_keep(self, model: FamilyModel) -> None:
        stored = model.engine(1).runner.target.stored
        assert [shape == NO_KV for shape in stored.kv] == [True, True, False, True, True]
        assert [(state.layer, state.sizes) for state in stored.states] == [(0, (4, 12, 8)), (3, (4, 12, 8))]

    def test_a_layer_that_keeps_nothing_must_be_known(
        self, model: FamilyModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Nemotron, "layers_that_keep_nothing", lambda self, config: frozenset({4}))
        with pytest.raises(ModelLoadError, match=r"layers \[1\] of NemotronHForCausalLM keep their state"):
            model.engine(0)


class TestOtherBlocks:
    """Attention is not the first of them."""

    case = case("nemotron_h_other", mtp_layers_block_type=["mlp", "full_attention", "moe"])

    def test_drafts(self, model: FamilyModel, depth: int) -> None:
        check_own_drafts(model, model.engine(depth), SamplingParams(max_tokens=depth + 8, ignore_eos=True))


@pytest.mark.parametrize(
    "kinds", [["moe"], ["full_attention", "full_attention"], ["full_attention", "linear_attention"]]
)
def test_modules_that_do_not_run_are_refused(kinds: list[str], tmp_path: Path) -> None:
    path = tiny_nemotron(tmp_path / "model", mtp_layers_block_type=kinds)
    for attempt in (load, LLM):
        with pytest.raises(ModelLoadError, match=f"with one MTP module .*, not with 1 of {', '.join(kinds)}"):
            attempt(path)
    assert load(path, num_modules=0).mtp is None


def test_blocks_that_the_configuration_does_not_name_are_surplus(tmp_path: Path) -> None:
    path = tiny_nemotron(tmp_path / "model")
    edit_tensors(path, lambda tensors: tensors.update({"mtp.layers.2.norm.weight": torch.ones(32)}))
    with pytest.raises(ModelLoadError, match=r"surplus: layers\.0\.mtp_block\.blocks\.2\.norm\.weight$"):
        load(path)


@pytest.mark.filterwarnings("ignore:load_format=dummy")
def test_random_weights(tmp_path: Path) -> None:
    path = tiny_nemotron(tmp_path / "model")
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
