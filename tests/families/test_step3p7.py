"""Step-3.7: layers with different numbers of heads, and modules before the norm with heads of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyModel, TransformersReference
from families.checkpoints_own_names import REFERENCE_FILE, tiny_step
from families.contract import FamilyCase, FamilyContract
from tiny_models import SHARED_PREFIXES, new_mtp_model
from torch import Tensor
from transformers import AutoModelForImageTextToText

from foredraft.sampling_params import SamplingParams


class BeforeTheNorm(TransformersReference):
    """Blocks of transformers, between which states are handed on as they are."""

    def __init__(self, directory: Path, num_modules: int) -> None:
        self.target = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
        self._sequences: dict[tuple[int, ...], list[int]] = {}
        self._decoder: Any = self.target.get_decoder()  # type: ignore[no-untyped-call]
        self.mtp = self.load_modules(directory, num_modules)

    def load_modules(self, directory: Path, num_modules: int) -> Any:
        heads = {module: {"num_attention_heads": 6} for module in range(num_modules)}
        self.target.config.text_config.mtp_per_layer_config = heads
        modules = new_mtp_model(self.target, num_modules)
        tensors = torch.load(directory / REFERENCE_FILE)
        self.heads = [tensors.pop(f"layers.{module}.own_head.weight") for module in range(num_modules)]
        report = modules.load_state_dict(tensors, strict=False)
        assert not report.unexpected_keys
        assert all(name.startswith(SHARED_PREFIXES) for name in report.missing_keys)
        return modules

    @torch.inference_mode()
    def draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        """As described there, but for what modules read and pass on, and what their logits are made with."""
        tokens = torch.tensor([[*token_ids, *draft_token_ids]])
        positions = torch.arange(tokens.shape[1])[None]
        hidden = self._before_norm(tokens[:, : len(token_ids) - 1])
        logits = []
        for index in range(len(draft_token_ids)):
            rows = slice(index + 1, index + 1 + hidden.shape[1])
            layer: Any = self.mtp.layers[index]
            layer.use_post_norm = False
            hidden = self.mtp.forward_layer(index, hidden, positions[:, rows], None, input_ids=tokens[:, rows])
            logits.append(layer.post_norm(hidden[0, -1]) @ self.heads[index].T)
        return torch.stack(logits)

    def _before_norm(self, tokens: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = self._decoder.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        self._decoder(tokens)
        hook.remove()
        return seen[0]


class TestStep(FamilyContract):
    case = FamilyCase(
        "step3p7",
        tiny_step,
        num_modules=3,
        depths=(1, 2, 3),
        reference=BeforeTheNorm,
        module_prefix=lambda module: f"model.layers.{4 + module}.",
        aliases={"norm": "post_norm", "output": "own_head"},
        target_aliases={"router_bias": "e_score_correction_bias"},
    )

    @pytest.mark.parametrize("execution", ["host", "overlapped"])
    def test_parts_of_the_heads(self, model: FamilyModel, execution: str) -> None:
        """Few tokens, in 8 bits, of each module's own head; the output is the target's all the same."""
        engine = model.engine(3, draft_vocab_size=16, draft_head_bits=8, execution=execution)
        request = engine.add_request("0", model.prompt(9), SamplingParams(max_tokens=12, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
            assert all(token_id < 16 for token_id in request.draft_token_ids)
        assert request.token_ids == model.reference.sequence(model.prompt(9), 12)[: request.num_tokens]
        assert engine.stats.speculation.num_drafted_tokens > 0
        head = engine.runner.draft_head
        assert head is not None
        assert len({head.for_module(module).weight.sum().item() for module in range(3)}) == 3
