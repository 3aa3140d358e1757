from __future__ import annotations

from collections.abc import Callable

import pytest
from reference import Builders, Checkpoint, checkpoints_of
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_mistral, tiny_qwen2

BUILDERS: Builders = {
    "llama": (lambda path: tiny_llama(path, num_modules=3), 3),
    "glm4_moe": (lambda path: tiny_glm4_moe(path, mtp_names="beside"), 1),
    "mistral": (lambda path: tiny_mistral(path, num_modules=3, sliding_window=8), 3),
    "mistral, window 6": (lambda path: tiny_mistral(path, num_modules=4, sliding_window=6), 4),
    "mistral, window 16": (lambda path: tiny_mistral(path, num_modules=2, sliding_window=16), 2),
    "qwen2": (lambda path: tiny_qwen2(path, num_modules=3, sliding_window=8), 3),
    "ten modules": (lambda path: tiny_llama(path, num_modules=10), 10),
}

KINDS = ("llama", "glm4_moe", "mistral")
"""Modules one after the other, one module for all drafts, sliding windows in all layers; each drafts up to three."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A tiny random checkpoint by its kind."""
    return checkpoints_of(BUILDERS, tmp_path_factory)


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints(request.param)


@pytest.fixture(params=[0, 1, 3], ids=lambda depth: f"K={depth}")
def depth(request: pytest.FixtureRequest) -> int:
    """Drafts a step (K)."""
    return int(request.param)


@pytest.fixture
def llama(checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints("llama")
