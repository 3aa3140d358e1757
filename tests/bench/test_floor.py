"""The floor: turns of the depths, medians, ratios, and a report that grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_llama

from foredraft import LLM
from foredraft.bench import floor, steady
from foredraft.bench.floor import FloorCell, FloorResult, copy_bandwidth, measure_floor
from foredraft.bench.steady import Span
from foredraft.bench.step_bytes import ModelBytes
from foredraft.cache.groups import KVShape

NO_KV = KVShape(0, 0, 0, None)
MODEL = ModelBytes(800, 100, (50, 50), 20, (), (NO_KV, NO_KV), 2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3)
    return LLM(path, num_blocks=64, dtype="float32", device="cpu", synthetic_acceptance=[1.0])


def span(seconds: float, num_tokens: int) -> Span:
    return Span(4, 10, seconds, 40, num_tokens, 100.0)


def test_figures_are_medians_against_the_floor_and_depth_0() -> None:
    plain = FloorCell(4, 0, [span(9.0, 40), span(18.0, 40), span(90.0, 40)])
    deep = FloorCell(4, 2, [span(20.0, 120), span(20.0, 120), span(10.0, 60)])
    result = FloorResult(MODEL, (plain, deep, FloorCell(8, 0)), [900.0, 1000.0, 2000.0], ("random weights",))
    assert result.floor_seconds(plain) == 0.9
    assert result.floor_seconds(deep) == pytest.approx((900 + 100 + 40) / 1000)
    assert plain.seconds_per_cycle == 1.8
    assert result.ratio(plain) == 2.0
    assert deep.tokens_per_second == 6.0
    assert deep.tokens_per_cycle == 2.5
    assert result.ratio_to_plain(plain) == 1.0
    assert result.ratio_to_plain(deep) == pytest.approx(6.0 / (40 / 18))
    record = result.to_dict()
    assert record["marks"] == ["random weights"]
    assert [(cell["batch_size"], cell["depth"]) for cell in record["cells"]] == [(4, 0), (4, 2)]
    assert record["cells"][1]["bytes"]["modules"] == 100
    assert record["cells"][1]["bytes"]["total"] == 1040
    columns = [list(column.cells) for column in result.table().columns]
    assert columns[0] == ["4", "4"]
    assert columns[7] == ["2.00", "1.92"]


def test_without_depth_0_nothing_is_compared_with_it() -> None:
    result = FloorResult(MODEL, (FloorCell(4, 2, [span(1.0, 120)]),), [1000.0])
    assert result.ratio_to_plain(result.cells[0]) is None
    assert result.to_dict()["cells"][0]["ratio_to_depth_0"] is None
    assert result.table().row_count == 1


def test_depths_take_turns_and_the_report_grows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[int, int, str]] = []

    def watched(llm: LLM, prompts: list[list[int]], depth: int, salt: str) -> Any:
        turns.append((len(prompts), depth, salt))
        return steady.steady_batch(llm, prompts, depth, salt)

    monkeypatch.setattr(floor, "steady_batch", watched)
    sizes: list[int] = []

    def on_span(result: FloorResult) -> None:
        sizes.append(sum(len(cell.spans) for cell in result.cells))

    result = measure_floor(llm, [0, 1, 3], [1, 2], 20, 3, range(2), copy_bytes=1 << 16, on_span=on_span)
    depths = [depth for _, depth, _ in turns]
    assert depths == [0, 1, 3, 0, 1, 3, 1, 3, 0, 1, 3, 0]
    assert [size for size, _, _ in turns] == [1, 1, 1, 2, 2, 2] * 2
    assert len({salt for _, _, salt in turns}) == 12
    assert sizes == list(range(1, 13))
    assert len(result.copies) == 2
    assert [cell.tokens_per_cycle for cell in result.cells] == [1, 2, 4, 1, 2, 4]
    assert all(result.ratio(cell) > 0 for cell in result.cells)
    assert result.marks == ("acceptance by chance: synthetic 1",)


def test_a_copy_has_a_bandwidth() -> None:
    assert copy_bandwidth(torch.device("cpu"), 1 << 16) > 0
