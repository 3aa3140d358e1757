"""One checkpoint for all tests of media."""

from __future__ import annotations

from pathlib import Path

import pytest
from media.checkpoint import tiny_multimodal


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_multimodal(tmp_path_factory.mktemp("media") / "model", num_modules=3)
