"""torchvision from PyPI beside a build of torch for CPUs alone.

PyPI's build belongs to the torch with CUDA. Beside another its C++ operators are not loaded, and importing it fails:
it describes `nms` and `qnms`, which nobody has named then. Images need neither of the two, so their names are enough.
The Makefile puts such a torchvision apart, where tests/conftest.py finds it, and runs this file over it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NAMES = """\
import torch as _torch

_names = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def skip_without_media() -> None:
    """Skip the tests of a module, or a fixture's, where the extra `media` is not installed."""
    for name in ("torchvision", "soundfile", "soxr"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[media]'", allow_module_level=True)


def name_operators(package: Path) -> None:
    """Let the torchvision in this directory name them before it is imported further."""
    begins = package / "__init__.py"
    begins.write_text(NAMES + begins.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    name_operators(Path(sys.argv[1]))
