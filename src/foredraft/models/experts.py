"""Mixtures of experts whose passes CUDA graphs can hold, in float32 too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

EVERY_EXPERT = "foredraft_every_expert"


def run_every_expert(*models: PreTrainedModel | None) -> None:
    """Let every expert run on every row, where a model has experts that transformers calls through its interface.

    transformers takes torch's grouped product, which in float32 waits for the number of rows of each expert. That a
    graph cannot hold. In 16 bits it does not wait, and computes no more than what was chosen: leave it.
    """
    for model in models:
        if model is not None and model._can_set_experts_implementation():
            model.set_experts_implementation(EVERY_EXPERT)


def _every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H], the chosen experts [T, k] and their weights [T, k] -> [T, H]."""
    shares = top_k_weights.new_zeros(len(hidden_states), experts.num_experts).scatter_add_(
        1, top_k_index, top_k_weights
    )
    output = torch.zeros_like(hidden_states)
    for expert in range(experts.num_experts):
        rows = _project(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, hidden_states)
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = _project(experts, "down_proj", expert, rows)
        if experts.has_post_expert_norm:
            rows = experts.post_expert_norm(rows)
        output += rows * shares[:, expert : expert + 1]
    return output


def _project(experts: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight: Tensor = getattr(experts, name)[expert]
    bias: Tensor | None = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(rows, weight.t() if experts.is_transposed else weight, bias)


ExpertsInterface.register(EVERY_EXPERT, _every_expert)
