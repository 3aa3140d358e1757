"""What is left for the cache: the arithmetic, and that the profiling run runs what it says. No GPU is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_mistral, tiny_qwen2
from torch import Tensor

from foredraft.cache.groups import CacheLayout, StoredRows
from foredraft.cache.storage import CacheStorage
from foredraft.config import EngineConfig
from foredraft.engine import build
from foredraft.errors import ConfigError
from foredraft.models.attention import PagedAttention
from foredraft.models.draft_head import DraftHead
from foredraft.models.loader import load_checkpoint
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.runner.memory import CacheDemand, CacheSize, size_cache
from foredraft.runner.model_runner import ModelRunner
from foredraft.runner.profiling import MemoryProfile, profile_memory, run_largest_steps
from foredraft.speculation.drafter import Drafter, Drafts, Window

CPU = torch.device("cpu")
GIB = 1 << 30
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_llama(path, num_modules=3),
    "no modules": lambda path: tiny_llama(path, num_modules=0),
    "chained": tiny_glm4_moe,
    "windows": tiny_mistral,
    "mixed": lambda path: tiny_qwen2(path, sliding_window=8),
}
DEPTHS = {"llama": 3, "no modules": 0, "chained": 3, "windows": 2, "mixed": 2}


def test_the_cache_gets_what_is_left() -> None:
    profile = MemoryProfile(total_bytes=80 * GIB, used_by_others_bytes=2 * GIB, peak_bytes=20 * GIB)
    assert profile.cache_bytes(0.5) == 18 * GIB
    assert profile.cache_bytes(1) == 58 * GIB


def test_nothing_left_is_refused_with_the_numbers() -> None:
    profile = MemoryProfile(total_bytes=80 * GIB, used_by_others_bytes=2 * GIB, peak_bytes=20 * GIB)
    message = (
        "gpu_memory_utilization=0.25 leaves no memory for the cache: 20.00 GiB of 80.00 GiB may be used, the model and "
        "its largest step take 20.00 GiB, others on the device 2.00 GiB: raise gpu_memory_utilization, or lower"
    )
    with pytest.raises(ConfigError, match=message):
        profile.cache_bytes(0.25)


# -- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A tiny model, and what its parts were asked to do."""

    kind: str
    path: Path
    settings: dict[str, Any]
    target_rows: list[Tensor] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    windows: list[list[Window]] = field(default_factory=list)
    storages: list[weakref.ref[CacheStorage]] = field(default_factory=list)

    def __post_init__(self) -> None:
        loaded = load_checkpoint(BUILDERS[self.kind](self.path), dtype=torch.float32, device=CPU)
        self.target = TargetModel(loaded.target)
        self.modules = MtpModules(loaded.mtp) if loaded.mtp is not None else None
        rows = self.modules.stored if self.modules is not None else StoredRows()
        layout = CacheLayout.build(self.target.stored, rows, self.target.hidden_size, torch.float32)
        limits: dict[str, Any] = {"block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40}
        self.demand = CacheDemand(EngineConfig(**(limits | self.settings)), layout, DEPTHS[self.kind], 256)
        self._watch()

    def _watch(self) -> None:
        forward = self.target.forward

        def watched(token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
            self.target_rows.append(positions)
            return forward(token_ids, positions, paged)

        self.target.forward = watched  # type: ignore[method-assign]
        self.target.logits = self._counted(self.target.logits)  # type: ignore[assignment, method-assign]

    def _counted(self, logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def watched(hidden: Tensor) -> Tensor:
            self.logit_rows.append(len(hidden))
            return logits(hidden)

        return watched

    def make_runner(self, storage: CacheStorage) -> ModelRunner:
        self.storages.append(weakref.ref(storage))
        if self.modules is None:
            return ModelRunner(self.target, None, storage)
        size = self.demand.config.draft_vocab_size
        head = DraftHead.build(self.target.head_weights[0][:size])
        head.logits = self._counted(head.logits)  # type: ignore[assignment, method-assign]
        drafter = Drafter(self.target, self.modules, storage, head)
        run = drafter.run

        def watched(windows: list[Window], *args: Any) -> Drafts:
            self.windows.append(windows)
            drafts = run(windows, *args)
            assert all(row is not None and bool(row.isfinite().all()) for probs in drafts.probs for row in probs)
            return drafts

        drafter.run = watched  # type: ignore[assignment, method-assign]
        return ModelRunner(self.target, drafter, storage)

    @property
    def size(self) -> CacheSize:
        return size_cache(self.demand, 1 << 20)

    def run(self) -> int:
        return run_largest_steps(self.make_runner, self.demand, self.size, CPU)


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_largest_steps_are_run(tmp_path: Path, kind: str) -> None:
    watched, depth = Watched(kind, tmp_path, {}), DEPTHS[kind]
    num_bytes = watched.run()
    assert num_bytes == 2 * 4 * watched.demand.layout.bytes_per_token()
    # A prefill of as many rows as a step may have; a decode of all requests, and one with all their drafts.
    assert [len(positions) for positions in watched.target_rows] == [40, 5, 5 * (depth + 1)]
    assert all(positions.max() >= 256 - 2 * (depth + 1) - 1 for positions in watched.target_rows)
    assert all(int(positions.max()) < 256 for positions in watched.target_rows)
    # The head runs over what is sampled, and once for each draft.
    assert watched.logit_rows == [1, *[1] * depth, 5, *[5] * depth, 5 * (depth + 1), *[5] * depth]
    if depth:
        prefill, first, second = watched.windows
        assert [(window.end - window.start, window.num_drafts) for window in prefill] == [(40 + depth, depth)]
        for windows in (first, second):
            assert [window.num_drafts for window in windows] == [depth] * 5
            assert all(window.end - window.start > depth for window in windows)


def test_a_budget_beyond_the_longest_sequence_takes_several(tmp_path: Path) -> None:
    watched = Watched("llama", tmp_path, {"max_model_len": 20, "max_num_batched_tokens": 50})
    watched.run()
    assert len(watched.target_rows[0]) == 50
    assert [window.end - window.start for window in watched.windows[0]] == [12, 12, 12, 12, 2 + 3]


def test_decodes_attend_to_no_more_than_the_cache_can_hold(tmp_path: Path) -> None:
    watched = Watched("llama", tmp_path, {})
    small = size_cache(watched.demand, 4 * 76 * watched.demand.layout.bytes_per_token())
    assert small.num_tokens == 4 * 75
    run_largest_steps(watched.make_runner, watched.demand, small, CPU)
    assert [int(positions.max()) + 1 for positions in watched.target_rows] == [256 - 8, 60, 61 + 3]


@pytest.mark.parametrize("settings", [{"max_model_len": 2}, {"max_num_seqs": 1}, {"draft_vocab_size": 16}])
def test_any_limits_will_do(tmp_path: Path, settings: dict[str, Any]) -> None:
    watched = Watched("llama", tmp_path, settings)
    watched.run()
    assert len(watched.target_rows) == 3


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    watched = Watched("llama", tmp_path, {})
    before = {name: tensor.clone() for name, tensor in watched.target.model.state_dict().items()}
    generator = torch.get_rng_state()
    watched.run()
    watched.windows.clear()
    (storage,) = watched.storages
    gc.collect()
    assert storage() is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], tensor) for name, tensor in watched.target.model.state_dict().items())


# -- the measuring, with a device made up ------------------------------------------------------------------------------


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch report a GPU whose memory is as stated."""

    def pretend(total: int, free: int, reserved: int, peak: int) -> None:
        figures: dict[str, Any] = {
            "empty_cache": None,
            "reset_peak_memory_stats": None,
            "mem_get_info": (free, total),
            "memory_reserved": reserved,
            "max_memory_reserved": peak,
        }
        for name, figure in figures.items():
            monkeypatch.setattr(torch.cuda, name, lambda *device, figure=figure: figure)

    return pretend


def test_a_profile_has_the_peak_without_the_small_cache(tmp_path: Path, device_of: Callable[..., None]) -> None:
    device_of(total=80 * GIB, free=70 * GIB, reserved=6 * GIB, peak=9 * GIB)
    watched = Watched("llama", tmp_path, {})
    profile = profile_memory(watched.make_runner, watched.demand, watched.size, CPU)
    small = 2 * 4 * watched.demand.layout.bytes_per_token()
    num_tensors = 1 + 2 * (2 + 3)
    assert profile == MemoryProfile(80 * GIB, 4 * GIB, 9 * GIB - small + num_tensors * (2 << 20))
    assert len(watched.target_rows) == 3


def test_a_step_that_does_not_fit_is_refused(tmp_path: Path, device_of: Callable[..., None]) -> None:
    device_of(total=80 * GIB, free=70 * GIB, reserved=6 * GIB, peak=9 * GIB)
    watched = Watched("llama", tmp_path, {})

    def fail(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError

    watched.target.forward = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=40 rows, .* max_num_seqs=5 .* 3 drafts.*len=256"):
        profile_memory(watched.make_runner, watched.demand, watched.size, CPU)


def test_a_gpu_is_measured_unless_a_setting_says_how_much(
    tmp_path: Path, device_of: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def profiled(make_runner: Any, demand: CacheDemand, size: CacheSize, device: torch.device) -> MemoryProfile:
        seen.append(size.num_bytes)
        return MemoryProfile(1000 << 20, 100 << 20, 500 << 20)

    monkeypatch.setattr(build, "profile_memory", profiled)
    device_of(total=1000 << 20, free=700 << 20, reserved=200 << 20, peak=0)
    sizes = {}
    for share in (None, 0.9, 0.7):
        watched = Watched("llama", tmp_path / str(share), {"gpu_memory_utilization": share})
        size = build._cache_size(watched.demand, watched.make_runner, torch.device("cuda"))
        allowed = int((share or 0.9) * (1000 << 20))
        for num_bytes, most in ((seen[-1], allowed - (300 << 20)), (size.num_bytes, allowed - (600 << 20))):
            assert most - 4 * watched.demand.layout.bytes_per_token() < num_bytes <= most
        sizes[share] = size.num_blocks
    assert sizes[None] == sizes[0.9]
    assert len(seen) == 3
    for settings in ({"num_blocks": 64}, {"kv_cache_memory_bytes": 64 * 4 * 768}):
        watched = Watched("llama", tmp_path / str(settings), settings)
        assert build._cache_size(watched.demand, watched.make_runner, torch.device("cuda")).num_blocks == (64, 64)
    assert len(seen) == 3
