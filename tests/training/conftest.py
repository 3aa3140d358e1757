"""A target that has learnt a toy language, for all tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_target import write_toy_target


@pytest.fixture(scope="session")
def toy_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a trained tiny Llama."""
    return write_toy_target(tmp_path_factory.mktemp("toy") / "target")
