from __future__ import annotations

from collections.abc import Callable

import pytest
from reference import Builders, Checkpoint, checkpoints_of
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

BUILDERS: Builders = {
    "llama": (lambda path: tiny_llama(path, num_modules=3), 3),
    "eight modules": (lambda path: tiny_llama(path, num_modules=8), 8),
    "glm4_moe": (lambda path: tiny_glm4_moe(path, mtp_names="beside"), 1),
    "qwen3": (tiny_qwen3, 2),
    "qwen2 sliding": (lambda path: tiny_qwen2(path, sliding_window=8), 2),
    "mistral sliding": (lambda path: tiny_mistral(path, sliding_window=8), 2),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A tiny random checkpoint by its kind."""
    return checkpoints_of(BUILDERS, tmp_path_factory)
