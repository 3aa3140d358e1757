"""The processes that train together: one, or as many as torchrun has started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Processes:
    """Which process this is, and of how many."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether it writes files and speaks to the user."""
        return self.rank == 0

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Put into each tensor its mean over all processes, in one exchange."""
        if self.count == 1:
            return
        several = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in several])
        distributed.all_reduce(flat)
        flat /= self.count
        parts = torch.split(flat, [tensor.numel() for tensor in several])
        for tensor, part in zip(several, parts):
            tensor.copy_(part.view_as(tensor))

    def agree(self, value: float, device: torch.device) -> float:
        """The first process's value, in all of them."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=device)
        distributed.broadcast(shared, 0)
        return float(shared)

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def started_processes() -> Iterator[Processes]:
    """Join the processes of torchrun, if it has started this one; meanwhile a GPU of its own is the current device."""
    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        yield Processes()
        return
    local_rank = distributed.get_node_local_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), local_rank)
    finally:
        distributed.destroy_process_group()
