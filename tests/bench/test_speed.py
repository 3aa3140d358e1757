"""The speed benchmark: turns, medians, ratios, and what counts as identical."""

from __future__ import annotations

import pytest

from foredraft.bench.speed import measure_speed
from foredraft.bench.variants import Generation
from foredraft.errors import ForedraftError
from foredraft.statistics import SpeculationStats

BATCHES = [[[1, 2]], [[3]], [[4, 5, 6]]]
NUM_TOKENS = 64


class FakeVariant:
    """Takes as long as it is told to, and writes down its turns."""

    def __init__(
        self, name: str, seconds: list[float], log: list[str], *, depth: int | None = 0, token: int = 7
    ) -> None:
        self.name = name
        self._seconds = iter([1.0, *seconds])  # the first is the warm-up
        self._log = log
        self._depth = depth
        self._token = token

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generation:
        self._log.append(f"{self.name} {num_tokens}")
        speculation = None
        if self._depth is not None:
            speculation = SpeculationStats()
            speculation.observe(self._depth, self._depth)
        return Generation([(self._token,) * num_tokens for _ in prompts], next(self._seconds), speculation)


def test_variants_take_turns_in_rotation_after_a_warm_up() -> None:
    log: list[str] = []
    measure_speed([FakeVariant(name, [1.0] * 3, log) for name in "abc"], BATCHES, NUM_TOKENS)
    turns = [line.split()[0] for line in log]
    assert turns == [*"abc", *"abc", *"bca", *"cab"]
    assert log[:3] == [f"{name} {NUM_TOKENS}" for name in "abc"]


def test_figures_are_medians_and_ratios_of_medians() -> None:
    log: list[str] = []
    result = measure_speed(
        [
            FakeVariant("plain", [2.0, 4.0, 1.0], log),
            FakeVariant("K=3", [1.0, 1.0, 8.0], log, depth=3),
            FakeVariant("peer", [4.0, 4.0, 4.0], log, depth=None),
            FakeVariant("slow peer", [8.0, 8.0, 8.0], log, depth=None),
        ],
        BATCHES,
        NUM_TOKENS,
    )
    plain, drafting, peer, slow = result.variants
    assert plain.median_tokens_per_second == 32.0
    assert result.ratios(drafting) == (2.0, 4.0)
    assert result.ratios(slow) == (0.25, 0.5)
    assert result.fastest_peer is peer
    assert (plain.mean_acceptance_length, drafting.mean_acceptance_length) == (None, 4.0)
    assert peer.mean_acceptance_length is None
    assert result.is_identical
    record = result.to_dict()
    assert [variant["ratio_to_fastest_peer"] for variant in record["variants"]] == [2.0, 4.0, 1.0, 0.5]


def test_other_tokens_are_noticed() -> None:
    log: list[str] = []
    variants = [FakeVariant("plain", [1.0] * 3, log), FakeVariant("wrong", [1.0] * 3, log, token=8)]
    result = measure_speed(variants, BATCHES, NUM_TOKENS)
    assert not result.is_identical
    assert [result.num_identical(variant) for variant in result.variants] == [3, 0]


def test_too_few_tokens_are_an_error() -> None:
    class Short(FakeVariant):
        def generate(self, prompts: list[list[int]], num_tokens: int) -> Generation:
            return super().generate(prompts, num_tokens - 1)

    with pytest.raises(ForedraftError, match="plain made 63 tokens for a prompt instead of 64"):
        measure_speed([Short("plain", [1.0] * 3, [])], BATCHES, NUM_TOKENS)
