"""The trace: what counts as busy, which part a name belongs to, and a real one of a CPU."""

from __future__ import annotations

import gzip
import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM
from foredraft.bench.steady import Span
from foredraft.bench.trace import (
    Activity,
    TraceResult,
    busy_seconds,
    check_chrome_file,
    measure_trace,
    part_of,
    read_events,
)
from foredraft.errors import ConfigError


class Device(Enum):
    CPU = 0
    CUDA = 1


def event(name: str, start: float, end: float, device: Device = Device.CPU, parent: Any = None, **more: Any) -> Any:
    """Like those of torch's profiler; times in microseconds."""
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device, cpu_parent=parent, **more)


def test_time_is_counted_once_where_activities_overlap() -> None:
    spans = [Activity("a", 0, 4), Activity("b", 2, 3), Activity("c", 3, 6), Activity("d", 8, 9)]
    assert busy_seconds(spans[::-1]) == 7
    assert busy_seconds([]) == 0


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_tst_64x8_64x16_1x4_h_bz_TNT", "matmuls"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "matmuls"),
        ("_gated_kernel", "matmuls"),
        ("aten::mm", "matmuls"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("_attend_kernel", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("_rms_norm_kernel", "norms"),
        ("_best_of_tile_kernel", "head"),
        ("_silu_and_mul_kernel", "rotary and activation"),
        ("_rotate_and_store_kernel", "rotary and activation"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
    ],
)
def test_parts_go_by_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_kernels_and_waits_of_the_marked_steps_are_counted() -> None:
    steps = event("foredraft: steps", 10, 50)
    events = [
        event("old_kernel", 1, 5, Device.CUDA),
        event("cudaDeviceSynchronize", 2, 9),
        steps,
        event("foredraft: steps", 12, 60, Device.CUDA, is_user_annotation=True),
        event("aten::mm", 11, 20, parent=steps),
        event("cudaLaunchKernel", 12, 13, parent=steps),
        event("cudaStreamSynchronize", 20, 30, parent=steps),
        event("cudaMemcpyAsync", 30, 31, parent=steps),
        event("kernel", 15, 25, Device.CUDA, is_user_annotation=False),
        event("late_kernel", 52, 60, Device.CUDA),
        event("cudaDeviceSynchronize", 51, 60),
    ]
    ran, waits = read_events(events, is_cuda=True)
    assert [each.name for each in ran] == ["kernel", "late_kernel"]
    assert [each.name for each in waits] == ["cudaStreamSynchronize"]
    ran, _ = read_events(events, is_cuda=False)
    assert [each.name for each in ran] == ["aten::mm", "cudaLaunchKernel", "cudaMemcpyAsync"]
    assert read_events([], is_cuda=True) == ([], [])


def test_figures_are_a_step_and_shares_of_the_whole() -> None:
    kernels = (Activity("nvjet", 0.0, 0.3), Activity("_rms_norm", 0.3, 0.4), Activity("nvjet", 0.6, 1.0))
    waits = (Activity("cudaStreamSynchronize", 0.1, 0.2),) * 4
    span = Span(2, 2, 0.5, 4, 4, 10.0)
    result = TraceResult("kernels", 2, 1, 2, 0.01, span, kernels, waits, ("random weights",))
    record = result.to_dict()
    assert record["busy_share"] == pytest.approx(0.8)
    assert record["idle_share"] == pytest.approx(0.2)
    assert record["activities_per_step"] == 1.5
    assert record["waits_per_step"] == 2
    assert record["waiting_seconds_per_step"] == pytest.approx(0.2)
    assert record["seconds_per_step_without_profiler"] == 0.25
    assert [(each["name"], each["number"]) for each in record["parts"]] == [("matmuls", 2), ("norms", 1)]
    assert record["parts"][0]["seconds"] == pytest.approx(0.7)
    tables = result.tables(num_names=1)
    assert [table.row_count for table in tables.values()] == [1, 1, 2, 1]
    assert list(tables["Kernels, part by part"].columns[3].cells) == ["87.5 %", "12.5 %"]
    assert list(tables["Where the host waits for the device"].columns[3].cells) == ["100.0 %"]


def test_a_real_trace_is_read_and_written(tmp_path: Path) -> None:
    llm = LLM(tiny_llama(tmp_path / "model", num_modules=2), num_blocks=64, dtype="float32", device="cpu")
    file = tmp_path / "traces" / "steps.json.gz"
    result = measure_trace(llm, 2, 2, 20, 3, file)
    assert result.unit == "operations"
    assert not result.waits
    assert 0 < result.busy_share <= 1
    assert result.span_seconds > 0
    linear = {share.name: share.number for share in result.names}["aten::linear"]
    assert linear % 3 == 0  # every step has as many
    assert {"matmuls", "attention"} <= {share.name for share in result.parts}
    assert "traceEvents" in json.loads(gzip.decompress(file.read_bytes()))
    assert not llm.engine.has_unfinished


def test_traces_that_nobody_would_open_are_refused() -> None:
    check_chrome_file(None)
    check_chrome_file(Path("a.json"))
    with pytest.raises(ConfigError, match=r"ends in \.json or \.json\.gz, not trace\.txt"):
        check_chrome_file(Path("trace.txt"))
