from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from reference import Checkpoint
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

BUILDERS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "llama": (lambda path: tiny_llama(path, num_modules=3), 3),
    "eight modules": (lambda path: tiny_llama(path, num_modules=8), 8),
    "glm4_moe": (lambda path: tiny_glm4_moe(path, mtp_names="beside"), 1),
    "qwen3": (tiny_qwen3, 2),
    "qwen2 sliding": (lambda path: tiny_qwen2(path, sliding_window=8), 2),
    "mistral sliding": (lambda path: tiny_mistral(path, sliding_window=8), 2),
}


@pytest.fixture(autouse=True, scope="module")
def num_threads() -> Iterator[None]:
    """Tensors of tiny models gain nothing from threads, and on a busy machine wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Get a tiny random checkpoint by its kind; each is written and loaded once."""
    made: dict[str, Checkpoint] = {}

    def get(kind: str) -> Checkpoint:
        if kind not in made:
            build, num_modules = BUILDERS[kind]
            made[kind] = Checkpoint.load(build(tmp_path_factory.mktemp("model")), num_modules)
        return made[kind]

    return get
