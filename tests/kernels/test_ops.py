"""The sets of kernels: what they hold, and what is imported for them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from foredraft.kernels.ops import Kernels, KernelsName, kernels_named, kernels_of

NAMES = [name for name, member in vars(Kernels).items() if inspect.isfunction(member) and not name.startswith("_")]


def test_the_device_chooses() -> None:
    assert kernels_of(torch.device("cpu")) is kernels_named("torch")
    assert kernels_of(torch.device("meta")) is kernels_named("torch")
    pytest.importorskip("triton")
    assert kernels_of(torch.device("cuda", 0)) is kernels_named("triton")


@pytest.mark.parametrize("set_name", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_takes_what_the_protocol_says(set_name: KernelsName, name: str) -> None:
    if set_name == "triton":
        pytest.importorskip("triton")
    function = getattr(kernels_named(set_name), name)
    assert function.__module__.startswith(f"foredraft.kernels.{set_name}.")
    _self, *wanted = inspect.signature(getattr(Kernels, name)).parameters.values()
    taken = inspect.signature(function).parameters.values()
    # Beyond the protocol, a kernel may have keywords of its own that tune it.
    positional = [each for each in taken if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(each.name, each.default) for each in positional] == [(each.name, each.default) for each in wanted]


def test_torch_kernels_work_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from foredraft.kernels.ops import kernels_of\n"
        "y = kernels_of(torch.device('cpu')).rms_norm(torch.full((1, 4), 2.0), torch.ones(4), 0.0)\n"
        "assert y.tolist() == [[1.0] * 4], y\n"
        "assert not [name for name in sys.modules if name.startswith('foredraft.kernels.triton')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
