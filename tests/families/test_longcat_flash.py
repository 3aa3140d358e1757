"""LongCat-Flash: layers of two latent attentions, and a module with a block of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyModel, TransformersReference, load
from families.checkpoints_own_names import REFERENCE_FILE, WHOLE, LongcatModule, tiny_longcat
from families.contract import FamilyCase, FamilyContract
from torch import Tensor

from foredraft.errors import ModelLoadError


class OwnBlock(TransformersReference):
    """A single module, whose block transformers does not have: its parts, one after the other."""

    def __init__(self, directory: Path, num_modules: int) -> None:
        super().__init__(directory / WHOLE, num_modules)

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        module = LongcatModule(self.target.config)
        tensors = torch.load(directory.parent / REFERENCE_FILE)
        module.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()})
        return module.train(False)

    @torch.inference_mode()
    def draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        """As described there: each draft after the first reads the module's own last output, a row further."""
        tokens = torch.tensor([[*token_ids, *draft_token_ids]])
        hidden: Tensor = self._decoder(tokens[:, : len(token_ids) - 1]).last_hidden_state
        logits = []
        for _ in draft_token_ids:
            last = self._module(tokens[:, 1 : 1 + hidden.shape[1]], hidden)[:, -1:]
            logits.append(self.target.lm_head(last)[0, 0])
            hidden = torch.cat([hidden, last], dim=1)
        return torch.stack(logits)

    def _module(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The output of the module at rows that read `tokens` [1, n] and `hidden` [1, n, hidden_size]."""
        module: Any = self.mtp
        num_rows = tokens.shape[1]
        embedded = self._decoder.embed_tokens(tokens)
        state = module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(hidden)], dim=-1))
        rotation = self._decoder.rotary_emb(state, torch.arange(1, num_rows + 1)[None])
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        state = state + module.self_attn(module.input_layernorm(state), rotation, mask)[0]
        normed: Tensor = module.norm(state + module.mlp(module.post_attention_layernorm(state)))
        return normed


class TestLongcat(FamilyContract):
    case = FamilyCase(
        "longcat_flash",
        tiny_longcat,
        num_modules=1,
        depths=(1, 3),
        reference=OwnBlock,
        module_prefix=lambda module: "model.mtp.",
        aliases={"m": "layers", "norm": "post_norm"},
    )

    @pytest.mark.parametrize("norm", ["enorm", "hnorm"])
    def test_a_norm_that_is_a_part_of_another_is_named(self, model: FamilyModel, norm: str, tmp_path: Path) -> None:
        path = tmp_path / "damaged"
        model.without(path, f"model.mtp.layers.0.{norm}.m.weight", model.path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=rf": missing: layers\.0\.{norm}\.weight$"):
            load(path)
