"""CUDA graphs of steps, by shape: captured once, launched with one call."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

_logger = logging.getLogger(__name__)

MAX_GRAPHS = 512
"""Each holds some memory of the host and of the device for every kernel in it."""


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
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if self.is_enabled else None
        self._stream = torch.cuda.Stream(device) if self.is_enabled else None  # type: ignore[no-untyped-call]

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` does."""
        if not self.is_enabled:
            function()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        function()
        if self.failure is None:
            self._capture(key, function)

    def wait(self) -> None:
        """Return when all that was launched has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _capture(self, key: Hashable, function: Callable[[], None]) -> None:
        self.wait()
        if len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        started, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        except torch.OutOfMemoryError:
            self._give_up("there is no memory for more of them")
            return
        except RuntimeError as error:  # a layer that talks to the host, which a graph cannot hold
            self._give_up(str(error).splitlines()[0])
            return
        self._graphs[key] = graph
        self.wait()
        self.stats.num_graphs += 1
        self.stats.seconds += time.perf_counter() - started
        self.stats.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

    def _give_up(self, reason: str) -> None:
        """Those that there are stay; no more are tried."""
        self.failure = reason
        _logger.warning("steps of new shapes run without CUDA graphs: %s", reason)
