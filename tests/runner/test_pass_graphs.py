"""Passes over tensors of fixed size give what passes over their own rows give, whatever the padding holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_alternating, tiny_glm4_moe, tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.models.row_layout import GroupRows, RowSpan, _lanes
from foredraft.runner import inputs, pass_graphs
from foredraft.runner.pass_graphs import LANE_SIZES, ROW_SIZES, PassGraphs
from foredraft.runner.resident.graphs import GraphCache
from foredraft.speculation import drafter

CPU = torch.device("cpu")
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": partial(tiny_llama, num_modules=3),
    "alternating": partial(tiny_alternating, sliding_window=8),
    "glm4_moe": tiny_glm4_moe,
}
PROMPTS = [[1 + (i * 7 + j) % 60 for j in range(length)] for i, length in enumerate((1, 5, 17, 40, 2, 9))]


class PoisonedGraphs(GraphCache):
    """Runs each pass as it is, after it has made sure that what is not filled for it is NaN; knows the shapes."""

    def __init__(self) -> None:
        super().__init__(CPU, is_enabled=False)
        self.shapes: list[Any] = []
        self.passes: PassGraphs | None = None

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        passes, shape = self.passes, key
        assert passes is not None
        assert isinstance(shape, pass_graphs._PassShape)
        passes._output.fill_(torch.nan)
        used = int(passes._numbers[0, 1, : shape.num_lanes].sum())
        passes._hidden[used:] = torch.nan
        self.shapes.append(shape)
        function()


@pytest.fixture(params=BUILDERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return BUILDERS[request.param](tmp_path / "model")


@pytest.fixture
def lanes_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host lays passes out as it does for a GPU."""

    def lane_rows(
        storage: Any, group: int, slots: torch.Tensor, spans: list[RowSpan], device: torch.device
    ) -> GroupRows:
        return GroupRows(
            slots.to(device), _lanes(spans, storage.block_size, device), storage.layout.groups[group].window
        )

    for module in (inputs, drafter):
        monkeypatch.setattr(module, "group_rows", lane_rows)


def use_passes(llm: LLM) -> PoisonedGraphs:
    graphs, runner = PoisonedGraphs(), llm.engine.runner
    graphs.passes = PassGraphs(graphs, runner.storage, max_blocks=64)
    runner._use_pass_graphs(graphs.passes)
    return graphs


def build(path: Path) -> LLM:
    return LLM(path, execution="host", dtype="float32", num_speculative_tokens=3, max_num_seqs=6, num_blocks=200,
               max_num_batched_tokens=32)  # fmt: skip


def outputs(llm: LLM, **options: Any) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, num_speculative_tokens=depth, **options)
        for depth, _ in zip(itertools.cycle((0, 1, 3, 2)), PROMPTS)
    ]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}])
def test_padded_passes_give_the_same_tokens(model: Path, options: dict[str, Any], lanes_on_cpu: None) -> None:
    llm = build(model)
    is_fused = llm.engine.runner._drafter.modules.is_fused  # type: ignore[union-attr]
    expected = outputs(llm, **options)
    llm = build(model)
    graphs = use_passes(llm)
    assert outputs(llm, **options) == expected
    names = {shape.name for shape in graphs.shapes}
    assert names == ({"target", 0, 1, 2} if is_fused and llm.info.num_mtp_modules == 3 else names & {"target", 0})
    assert "target" in names
    assert any(shape.num_lanes > 1 for shape in graphs.shapes)
    assert {shape.num_rows for shape in graphs.shapes} <= set(ROW_SIZES)


def test_a_pass_too_large_for_any_graph_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes_on_cpu: None
) -> None:
    monkeypatch.setattr(pass_graphs, "ROW_SIZES", (8,))
    monkeypatch.setattr(pass_graphs, "LANE_SIZES", (1, 2))
    path = tiny_llama(tmp_path / "model", num_modules=3)
    expected = outputs(build(path))
    llm = build(path)
    graphs = use_passes(llm)
    assert outputs(llm) == expected
    assert {(shape.num_rows, shape.num_lanes) for shape in graphs.shapes} <= {(8, 1), (8, 2)}
    assert graphs.shapes


def test_sizes_ascend() -> None:
    assert sorted(set(ROW_SIZES)) == list(ROW_SIZES)
    assert sorted(set(LANE_SIZES)) == list(LANE_SIZES)
