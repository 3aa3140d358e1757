"""Expected cycles over a text against every way to cut it, and what is counted of an engine's answer."""

from __future__ import annotations

import random

import pytest
import torch

from foredraft.training.acceptance import ChainAcceptance, Span, chain_acceptance, counted_acceptance, spoken_spans


def simulated(chances: torch.Tensor, span: Span, chance: random.Random) -> tuple[int, list[int], list[int]]:
    """One random run of the cycles: their number, what they accepted by depth, and the depths of all tokens."""
    depths = len(chances)
    row, cycles, accepted, token_depths = span.start - 1, 0, [0] * depths, [0]
    while row + 2 < span.end:
        taken = 0
        while taken < depths and row + taken + 2 < span.end and chance.random() < float(chances[taken, row]):
            token_depths.append(taken + 1)
            taken += 1
        if row + taken + 2 < span.end:
            token_depths.append(0)
        if span.limit - (row + 2) >= depths + 1:
            cycles += 1
            for module in range(taken):
                accepted[module] += 1
        row += taken + 1
    return cycles, accepted, token_depths


def test_expected_numbers_are_the_means_of_many_runs() -> None:
    chances = torch.rand(3, 30, generator=torch.Generator().manual_seed(2))
    span, chance, num_runs = Span(5, 28, 30), random.Random(0), 4000
    runs = [simulated(chances, span, chance) for _ in range(num_runs)]
    expected = chain_acceptance(chances, span)
    assert expected.num_cycles == pytest.approx(sum(cycles for cycles, *_ in runs) / num_runs, rel=0.02)
    for module in range(3):
        assert expected.accepted[module] == pytest.approx(sum(run[1][module] for run in runs) / num_runs, rel=0.05)


@pytest.mark.parametrize("limit", [28, 29, 33, 60])
def test_a_sure_chain_is_counted_as_the_engine_counts(limit: int) -> None:
    chances = torch.randint(0, 2, (3, 40), generator=torch.Generator().manual_seed(limit)).float()
    span = Span(5, 28, limit)
    cycles, accepted, token_depths = simulated(chances, span, random.Random(0))
    found = chain_acceptance(chances, span)
    assert (found.num_cycles, found.accepted) == (cycles, tuple(accepted))
    assert counted_acceptance(token_depths, 3, limit - 5) == found


def test_lengths_and_rates() -> None:
    total = ChainAcceptance(4.0, (3.0, 1.0)) + ChainAcceptance(6.0, (3.0, 1.0))
    assert total.rates == (0.6, 0.2)
    assert total.mean_length == pytest.approx(1.8)
    assert ChainAcceptance.none(2).mean_length == 1.0


def test_spans_are_what_an_assistant_said() -> None:
    flags = [False, True, True, False, False, True, False, True, True, True]
    assert [(span.start, span.end) for span in spoken_spans(flags)] == [(1, 3), (7, 10)]
    assert spoken_spans([True, True, True]) == []  # nothing stands before it
