"""Inkling with eight modules: short convolutions, a score bias by distance, two kinds of heads, three layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyModel, TransformersReference, load
from families.checkpoints_inkling import drawn_modules, tiny_inkling
from families.contract import FamilyCase, FamilyContract, Scripted, assert_named
from overlap_bench import Bench
from runner import test_resident
from runner.test_resident import SYNTHETIC, Prepare, pad_and_poison, pad_lanes, poison
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.cache_utils import MtpCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_layers import MtpModel

from foredraft.errors import ModelLoadError
from foredraft.kernels.lanes import Lanes
from foredraft.models.attention import PagedAttention
from foredraft.models.mtp import MtpModules
from foredraft.models.row_layout import earlier_rows


class InklingReference(TransformersReference):
    """With `MtpCache`: by it a module knows at which positions its rows read, which the logarithm scales by.

    Over several rows at once transformers masks sliding modules as if they had no window; row by row the cache itself
    has no more than the window. So they get the mask of a sliding layer here, and a test compares that with row by row.
    """

    def __init__(self, directory: Path, num_modules: int) -> None:
        is_text = AutoConfig.from_pretrained(directory).model_type == "inkling_text"
        auto_class: Any = AutoModelForCausalLM if is_text else AutoModelForMultimodalLM
        self.target = auto_class.from_pretrained(directory, attn_implementation="eager")
        self._sequences = {}
        self._decoder = self.target.get_decoder()  # type: ignore[no-untyped-call]
        self.mtp = drawn_modules(directory, self.target, num_modules)

    @torch.inference_mode()
    def draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        return self._draft_logits(token_ids, draft_token_ids, self._all_rows)

    @torch.inference_mode()
    def draft_logits_row_by_row(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        """The same with nothing of ours: every row by a call of its own, after all rows before it."""
        return self._draft_logits(token_ids, draft_token_ids, self._row_by_row)

    def _draft_logits(
        self, token_ids: Sequence[int], draft_token_ids: Sequence[int], run: Callable[..., Tensor]
    ) -> Tensor:
        tokens = torch.tensor([[*token_ids, *draft_token_ids]])
        hidden: Tensor = self._decoder(tokens[:, : len(token_ids) - 1], use_cache=False).last_hidden_state
        cache = MtpCache(config=self.mtp.config)
        logits = []
        for module in range(len(draft_token_ids)):
            first = module + 1
            hidden = run(module, hidden, cache, tokens[:, first : first + hidden.shape[1]])
            logits.append(self.mtp._project_to_logits(hidden[:, -1:])[0, 0])
        return torch.stack(logits)

    def _all_rows(self, module: int, hidden: Tensor, cache: MtpCache, tokens: Tensor) -> Tensor:
        mtp: Any = self.mtp
        create = mtp.create_masks_for_mtp_layer

        def with_window(layer: int, inputs: Tensor, cache: MtpCache, positions: Tensor) -> Any:
            masks = create(layer, inputs, cache, positions)
            if mtp.config.layer_types[layer] == "hybrid_sliding":
                masks["attention_mask"] = create_sliding_window_causal_mask(
                    mtp.config, inputs, None, cache, position_ids=positions, layer_idx=layer
                )
            return masks

        mtp.create_masks_for_mtp_layer = with_window
        try:
            return self._forward(module, hidden, cache, tokens, first_row=0)
        finally:
            mtp.create_masks_for_mtp_layer = create

    def _row_by_row(self, module: int, hidden: Tensor, cache: MtpCache, tokens: Tensor) -> Tensor:
        rows = [slice(row, row + 1) for row in range(hidden.shape[1])]
        return torch.cat(
            [self._forward(module, hidden[:, row], cache, tokens[:, row], first_row=row.start) for row in rows], dim=1
        )

    def _forward(self, module: int, hidden: Tensor, cache: MtpCache, tokens: Tensor, first_row: int) -> Tensor:
        first = first_row + module + 1
        positions = torch.arange(first, first + hidden.shape[1])[None]
        output: Tensor = self.mtp.forward_layer(module, hidden, positions, cache, input_ids=tokens)
        return output


class InklingContract(FamilyContract):
    """What is Inkling's own."""

    def test_the_reference_is_transformers_row_by_row(self, model: FamilyModel) -> None:
        reference = model.reference
        assert isinstance(reference, InklingReference)
        token_ids, drafts = model.prompt(26), model.prompt(8, seed=1)
        at_once, by_row = (
            run(token_ids, drafts) for run in (reference.draft_logits, reference.draft_logits_row_by_row)
        )
        assert float((at_once - by_row).abs().max()) <= 1e-5 * float(by_row.abs().max())

    @pytest.mark.parametrize("settings", [SYNTHETIC, {}], ids=["synthetic", "real"])
    @pytest.mark.parametrize("prepare", [poison, pad_lanes, pad_and_poison])
    def test_padding_on_the_device_changes_nothing(
        self, model: FamilyModel, prepare: Prepare, settings: dict[str, Any]
    ) -> None:
        """Lanes of nobody, and NaN in free blocks and in the reserved one: convolutions' inputs lie there too."""
        expected = Bench(model.loaded, "reference", num_speculative_tokens=3, max_num_seqs=8, **settings)
        test_resident.requests(expected)
        expected.finish()
        assert test_resident.outcomes(model.loaded, prepare, **settings) == expected.outcomes()

    def test_what_all_modules_share_is_missing(self, model: FamilyModel, tmp_path: Path) -> None:
        names = ("shared_post_norm.weight", "model.mtp.chain_norm.weight")
        shared = {name: file for name, file in model.tensors().items() if name in names}
        assert model.loaded.mtp is not None
        assert bool(shared) == model.loaded.mtp.use_shared_post_norm
        for name, file in shared.items():
            with pytest.raises(ModelLoadError, match=r"missing: .*shared_post_norm\.weight"):
                load(model.without(tmp_path / "without", name, file))


def test_earlier_rows_among_padded_lanes() -> None:
    """Lanes that take no part lie between others, and claim flat rows that belong to those."""
    tables = torch.tensor([[5, 6], [0, 0], [7, 3], [0, 0]], dtype=torch.int32)
    first_rows, num_rows, flat_rows, origins = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in ([3, 0, 1, 0], [2, 0, 3, 0], [0, 1, 2, 0], [0, 0, 1, 0])
    )
    lanes = Lanes(tables, first_rows, num_rows, flat_rows, origins, 3)
    slots, exists = earlier_rows(lanes, 5, 2, block_size=4)
    assert slots[exists].tolist() == [21, 22, 22, 23, 29, 29, 30]
    assert exists.tolist() == [[True, True], [True, True], [False, False], [False, True], [True, True]]


PUBLISHED = {
    "hidden_norm": "hnorm",
    "embed_norm": "enorm",
    "input_proj": "eh_proj",
    "chain_norm": "shared_post_norm",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "wq_du": "q_proj",
    "wk_dv": "k_proj",
    "wv_dv": "v_proj",
    "wr_du": "r_proj",
    "wo_ud": "o_proj",
    "w13_dn": "gate_proj",
    "w2_md": "down_proj",
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
    "shared_w13_weight": "gate_proj",
    "shared_w2_weight": "down_proj",
    "embed": "embed_tokens",
    "unembed": "lm_head",
}
"""Last words of published names, and what transformers calls the same."""


class TestBeside(InklingContract):
    """Heads of 8 and 16, a window and an extent shorter than prompts, more rows in the head than tokens."""

    case = FamilyCase("inkling", tiny_inkling, num_modules=8, depths=(3, 8), reference=InklingReference)

    @pytest.mark.parametrize("shift", [1, -1])
    def test_a_wrong_offset_of_positions_is_noticed(
        self, model: FamilyModel, shift: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forward = MtpModules.forward

        def shifted(
            self: MtpModules, module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention
        ) -> Tensor:
            return forward(self, module, token_ids, positions + shift * (module == 3), hidden, paged)

        scripted = Scripted(model, 8)
        scripted.add(20, 10)
        monkeypatch.setattr(MtpModules, "forward", shifted)
        with pytest.raises(AssertionError):
            scripted.finish()


class TestInside(InklingContract):
    """The text model with its modules inside; no norm after a depth, no logarithm, pairs of rows in a convolution."""

    case = FamilyCase(
        "inkling_inside",
        partial(
            tiny_inkling,
            layout="inside",
            chain_hidden_post_norm=False,
            log_scaling_n_floor=None,
            conv_kernel_size=2,
            mtp_local_layer_ids=[0, 1, 2, 3, 4, 5, 6, 7],
            local_layer_ids=[0, 1, 2],
            sliding_window_size=6,
            unpadded_vocab_size=None,
            vocab_size=64,
        ),
        num_modules=8,
        depths=(8,),
        reference=InklingReference,
        module_prefix="model.mtp.layers.{}.".format,
        aliases=PUBLISHED,
    )


class TestMultimodal(InklingContract):
    """The published layout: towers beside the text model, and the modules' fields in a block of their own."""

    case = FamilyCase(
        "inkling_multimodal",
        partial(tiny_inkling, layout="multimodal", rel_extent=40),
        num_modules=8,
        depths=(8,),
        reference=InklingReference,
        module_prefix="model.mtp.layers.{}.".format,
        aliases=PUBLISHED,
    )

    def test_the_layout_is_the_published_one(self, model: FamilyModel) -> None:
        config = json.loads((model.path / "config.json").read_text())
        assert config["mtp_config"] == {
            "num_nextn_predict_layers": 8,
            "chain_hidden_post_norm": True,
            "local_layer_ids": [1, 2, 4, 7],
        }
        assert not {name for name in config["text_config"] if "mtp_l" in name or "chain" in name}
        names = set(model.tensors())
        beginnings = (
            "model.llm.embed.",
            "model.llm.embed_norm.",
            "model.llm.unembed.",
            "model.visual.",
            "model.audio.",
        )
        assert all(any(name.startswith(beginning) for name in names) for beginning in beginnings)
        parts = {"hidden_norm", "embed_norm", "input_proj", "transformer_block"}
        assert {name.split(".")[4] for name in names if name.startswith("model.mtp.layers.")} == parts
        assert {name for name in names if "language_model" in name or "self_attn" in name} == set()

    @pytest.mark.parametrize("num_modules", [1, 2])
    def test_modules_are_those_that_transformers_loads(self, model: FamilyModel, num_modules: int) -> None:
        """Only so many: further ones it takes for layers of a target of three layers."""
        target = AutoModelForMultimodalLM.from_pretrained(model.path)
        target.config.text_config.num_mtp_layers = num_modules
        theirs = MtpModel.from_pretrained(target).state_dict()
        mtp = load(model.path, num_modules=num_modules).mtp
        assert mtp is not None
        ours = mtp.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_a_missing_tensor_of_the_target_is_named(self, model: FamilyModel, tmp_path: Path) -> None:
        tensors = {name: file for name, file in model.tensors().items() if name.startswith("model.llm.")}
        for index, (name, file) in enumerate(list(tensors.items())[::6]):
            path = model.without(tmp_path / str(index), name, file)
            with pytest.raises(ModelLoadError, match="missing") as error:
                load(path)
            assert_named(name, str(error.value), self.case.aliases)
