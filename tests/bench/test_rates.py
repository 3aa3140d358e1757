"""Rates of acceptance: conditional ones from cumulative ones, and those that the shipped shape is run with."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from foredraft.bench.rates import conditional_rates
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.models.loader import inspect_checkpoint

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
CUMULATIVE = (0.757, 0.603, 0.499, 0.415, 0.360, 0.306, 0.269, 0.233)


def test_conditional_rates_multiply_to_the_cumulative_ones() -> None:
    rates = conditional_rates(CUMULATIVE)
    assert tuple(itertools.accumulate(rates, lambda so_far, rate: so_far * rate)) == pytest.approx(CUMULATIVE)
    assert rates[1] == pytest.approx(0.603 / 0.757)
    assert conditional_rates([0.5, 0.0, 0.0]) == (0.5, 0.0, 0.0)
    assert conditional_rates([]) == ()


@pytest.mark.parametrize("rates", [[0.5, 0.6], [1.1], [0.5, -0.1], [float("nan")]])
def test_what_does_not_fall_from_1_to_0_is_refused(rates: list[float]) -> None:
    with pytest.raises(ConfigError, match="cumulative rates must fall from depth to depth"):
        conditional_rates(rates)


def test_the_rates_of_the_shape_are_those_of_its_table() -> None:
    text = (SHAPES / "README.md").read_text(encoding="utf-8")
    rows = {
        name: tuple(map(float, re.findall(r"[\d.]+", cells)))
        for name, cells in re.findall(r"^\| (cumulative|conditional) \|(.*)$", text, re.MULTILINE)
    }
    assert rows["cumulative"] == CUMULATIVE
    assert rows["conditional"] == tuple(round(rate, 3) for rate in conditional_rates(CUMULATIVE))
    command = re.search(r"--synthetic-acceptance (\S+)", text)
    assert command is not None
    assert EngineConfig(synthetic_acceptance=command.group(1)).synthetic_rates == rows["conditional"]


def test_the_shape_is_that_of_llama_8b_with_eight_modules() -> None:
    info = inspect_checkpoint(SHAPES / "llama-8b-mtp8", load_format="dummy")
    assert info.num_parameters == 8_030_261_248
    assert info.num_mtp_modules == 8
    assert info.dtype == "bfloat16"
    assert not info.tie_word_embeddings
    hidden, layer = 4096, 218_112_000
    assert info.num_mtp_parameters == 8 * (layer + 2 * hidden * hidden + 3 * hidden)
