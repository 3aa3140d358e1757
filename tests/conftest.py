"""Fixtures and rules for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.append(str(Path(sys.prefix) / "apart"))  # a torchvision that others cannot import; see the Makefile
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is first imported, which transformers' models do

from foredraft import LLM

# Before they are imported, so that what fails there is explained as in a test.
pytest.register_assert_rewrite("families.case", "families.contract", "families.histories")

# No deadline: the time of one example says nothing about it where models run on however many cores there are.
settings.register_profile("foredraft", deadline=None, print_blob=True)
settings.load_profile("foredraft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors of tiny models gain nothing from threads, and on a busy machine wait for them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def builtin_llm() -> LLM:
    """The built-in model with its eight modules, in float32 on the CPU. Shared: leave it with no open request."""
    return LLM(dtype="float32", device="cpu", num_speculative_tokens=8)
