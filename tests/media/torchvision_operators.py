"""torchvision from PyPI beside a build of torch for CPUs alone."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch


def lacks_operators() -> bool:
    """Whether torchvision is here, but cannot be imported.

    PyPI's build belongs to the torch with CUDA. Beside another one its C++ operators are not loaded, and importing it
    fails: it describes `nms` and `qnms`, which nobody has named then.
    """
    return find_spec("torchvision") is not None and "+cpu" in torch.__version__ and "+" not in version("torchvision")


def name_operators() -> None:
    """Make it importable. Images need neither of the two, so their names are enough."""
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]


def skip_without_media() -> None:
    """Skip the tests of a module, or a fixture's, where the extra `media` is not installed."""
    for name in ("torchvision", "soundfile", "soxr"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[media]'", allow_module_level=True)


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
"""What is defined in it lives as long as it does."""
