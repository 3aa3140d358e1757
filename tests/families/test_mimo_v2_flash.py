"""MiMo-V2-Flash: attention sinks, and three modules that all read the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from families.checkpoints_own_names import OwnNames, tiny_mimo
from families.contract import FamilyCase, FamilyContract
from torch import Tensor


class NotChained(OwnNames):
    """Modules of the kinds that are published, each of which reads the target's state at its rows."""

    fields: ClassVar[Mapping[str, Any]] = {
        "mtp_layer_types": ["sliding_attention"] * 3,
        "mtp_mlp_layer_types": ["dense"] * 3,
    }

    @torch.inference_mode()
    def draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        """As described there, but module k reads the tokens k further beside the target's own states."""
        tokens = torch.tensor([[*token_ids, *draft_token_ids]])
        positions = torch.arange(tokens.shape[1])[None]
        hidden: Tensor = self._decoder(tokens[:, : len(token_ids) - 1]).last_hidden_state
        logits = []
        for index in range(len(draft_token_ids)):
            rows = slice(index + 1, index + 1 + hidden.shape[1])
            output = self.mtp.forward_layer(index, hidden, positions[:, rows], None, input_ids=tokens[:, rows])
            logits.append(self.target.lm_head(output[0, -1]))
        return torch.stack(logits)


class TestMiMo(FamilyContract):
    case = FamilyCase(
        "mimo_v2_flash",
        tiny_mimo,
        num_modules=3,
        depths=(1, 2, 3),
        reference=NotChained,
        module_prefix="model.mtp.layers.{}.".format,
        aliases={
            "pre_mlp_layernorm": "post_attention_layernorm",
            "final_layernorm": "post_norm",
            "attention_sink_bias": "sinks",
        },
        target_aliases={"attention_sink_bias": "sinks"},
    )
