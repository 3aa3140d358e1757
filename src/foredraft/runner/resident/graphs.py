"""CUDA graphs of steps, by shape: captured once, launched with one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

_logger = logging.getLogger(__name__)


@dataclass
class CaptureStats:
    """How many graphs there are, and what capturing them took: seconds, and bytes of device memory."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def line(self) -> str:
        """The same for people to read."""
        return f"{self.num_graphs} CUDA graphs, captured in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"


class GraphCache:
    """Runs functions that work on fixed tensors, as graphs from their second call on.

    A function is called with the same effect each time: all that varies lies in tensors. The first call for a key runs
    it as it is, which compiles and loads kernels, and then captures it. Off a GPU, or without `is_enabled`, it always
    runs as it is. All graphs share one pool of memory, so that they must not run side by side, nor keep results in new
    tensors.
    """

    def __init__(self, device: torch.device, *, is_enabled: bool) -> None:
        self.stats = CaptureStats()
        self._device = device
        self.is_enabled = is_enabled and device.type == "cuda"
        self.failure: str | None = None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.is_enabled else None

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` does."""
        if not self.is_enabled:
            function()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        function()
        self._capture(key, function)

    def _capture(self, key: Hashable, function: Callable[[], None]) -> None:
        torch.cuda.synchronize(self._device)
        started, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError as error:  # a layer that talks to the host, which a graph cannot hold
            self.is_enabled, self.failure = False, str(error).splitlines()[0]
            _logger.warning("decode steps run without CUDA graphs: %s", self.failure)
            return
        self._graphs[key] = graph
        torch.cuda.synchronize(self._device)
        self.stats.num_graphs += 1
        self.stats.seconds += time.perf_counter() - started
        self.stats.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
