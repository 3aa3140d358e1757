"""What decode steps compute between forward passes: one set of functions for each kind of device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from foredraft.kernels.decode_state import DecodeState, DraftWindow, PassRows, TargetRows
from foredraft.kernels.ops import KernelsName


class DecodeKernels(Protocol):
    """Described in `kernels/torch/decode.py`. None of them waits for the device."""

    def target_rows(self, state: DecodeState, lanes: Tensor, num_rows: int) -> TargetRows: ...

    def commit_tokens(self, state: DecodeState, lanes: Tensor, emitted: Tensor, row_sums: Tensor) -> None: ...

    def commit_greedy(
        self, state: DecodeState, lanes: Tensor, drafts: Tensor, own: Tensor, emitted: Tensor, row_sums: Tensor
    ) -> None: ...

    def draft_window(
        self, state: DecodeState, lanes: Tensor, depths: Tensor, size: int, max_depth: int, hidden_group: int
    ) -> DraftWindow: ...

    def pass_rows(self, state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, group: int) -> PassRows: ...

    def record_draft(
        self, state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, chosen: Tensor, drafts: Tensor
    ) -> None: ...

    def finish_window(self, state: DecodeState, lanes: Tensor, window: DraftWindow) -> None: ...


def decode_kernels_of(device: torch.device) -> DecodeKernels:
    """Triton's on CUDA, torch's on any other device."""
    return decode_kernels_named("triton" if device.type == "cuda" else "torch")


def decode_kernels_named(name: KernelsName) -> DecodeKernels:
    """A set of functions, whatever the device: as `kernels_named` in `kernels/ops.py`."""
    if name == "triton":
        from foredraft.kernels.triton import decode as triton_decode

        return triton_decode
    from foredraft.kernels.torch import decode as torch_decode

    return torch_decode
