"""Muon for matrices, AdamW for the rest, and the rate over the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foredraft.training.recipe import Recipe

_EPS = 1e-7
_BETAS = (0.9, 0.95)


class StackedMuon(torch.optim.Muon):
    """torch's Muon, which takes matrices one by one, with those of one shape in one product.

    For the many small matrices of modules that is several times as fast; numbers differ in roundings of bfloat16.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """As torch's; a closure is not taken."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step(group, shape, parameters)

    def _step(self, group: dict[str, Any], shape: torch.Size, parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momenta.append(state["momentum_buffer"])
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        update = orthogonalized(torch.stack(list(directions)), group["ns_coefficients"], group["ns_steps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * max(shape) ** 0.5  # as long as a step of AdamW (Liu et al., 2025, "Muon is scalable")
        torch._foreach_add_(parameters, list(update.to(parameters[0].dtype).unbind()), alpha=-group["lr"] * scale)


def orthogonalized(stack: Tensor, coefficients: tuple[float, float, float], num_steps: int) -> Tensor:
    """Newton-Schulz iteration (Jordan et al., 2024, "Muon") on each of a stack of matrices [S, M, N], in bfloat16."""
    a, b, c = coefficients
    is_tall = stack.shape[1] > stack.shape[2]
    update = stack.bfloat16()
    if is_tall:
        update = update.mT
    update = update / update.float().norm(dim=(1, 2), keepdim=True).clamp(min=_EPS).bfloat16()
    for _ in range(num_steps):
        gram = update @ update.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        update = torch.baddbmm(update, gram, update, beta=a)
    return update.mT if is_tall else update


class Optimizers:
    """Both optimizers as one."""

    def __init__(self, parameters: Iterable[Tensor], recipe: Recipe) -> None:
        several = list(parameters)
        is_muon = recipe.optimizer == "muon"
        matrices = [each for each in several if each.dim() == 2]
        others = [each for each in several if each.dim() != 2]
        self._recipe = recipe
        rate, decay = recipe.learning_rate, recipe.weight_decay
        self._all: list[torch.optim.Optimizer] = [
            StackedMuon(matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
            if is_muon
            else torch.optim.AdamW(matrices, lr=rate, betas=_BETAS, weight_decay=decay)
        ]
        if others:
            self._all.append(torch.optim.AdamW(others, lr=rate, betas=_BETAS, weight_decay=0.0))

    def step(self, step: int, num_steps: int | None) -> float:
        """Take step `step` (from 0) of so many (None: not known yet); returns its rate. Gradients are cleared."""
        rate = self._recipe.learning_rate * rate_factor(step, num_steps, self._recipe)
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return rate

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint."""
        for optimizer, state in zip(self._all, states):
            optimizer.load_state_dict(state)


def rate_factor(step: int, num_steps: int | None, recipe: Recipe) -> float:
    """Share of the learning rate at a step: rising, flat, then falling linearly to what is left at the end."""
    rise = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    if num_steps is None:
        return rise
    done = step / num_steps
    if done < recipe.flat_share:
        return rise
    return rise * max(recipe.final_rate, (1 - done) / max(1e-9, 1 - recipe.flat_share))
