"""Muon on stacks of matrices against torch's, and the rate over the steps."""

from __future__ import annotations

import pytest
import torch

from foredraft.training.optimizer import StackedMuon, orthogonalized, rate_factor
from foredraft.training.recipe import Recipe

SHAPES = [(24, 24), (24, 24), (8, 24), (8, 24), (40, 24), (24, 48)]


def test_stacked_steps_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = StackedMuon(first, **settings), torch.optim.Muon(second, **settings)  # type: ignore[arg-type]
    for _ in range(4):
        before = [parameter.detach().clone() for parameter in first]
        for own, other in zip(first, second):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        ours.step()
        theirs.step()  # type: ignore[no-untyped-call]
        for own, other, old in zip(first, second, before):
            step = (own - old).norm()
            assert (own - other).norm() < 0.02 * step  # roundings of bfloat16
            own.data.copy_(other)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_updates_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    update = orthogonalized(stack, (3.4445, -4.7750, 2.0315), 5)
    values = torch.linalg.svdvals(update.float())
    assert ((values > 0.4) & (values < 1.4)).all()


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(warmup_steps=10, flat_share=0.4, final_rate=0.1)
    rates = [rate_factor(step, 100, recipe) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:40] == [1.0] * 31
    assert rates[70] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.1)
    assert rates[40:] == sorted(rates[40:], reverse=True)
    assert rate_factor(5000, None, recipe) == 1.0  # as long as the number of steps is not known
