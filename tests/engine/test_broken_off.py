"""Changes that are broken off at any line, and requests that end behind their owner's back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny_models import tiny_llama

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.stopping import FinishReason

SOURCE = str(Path(foredraft.__file__).parent)
BOOKS = (f"{SOURCE}/scheduler", f"{SOURCE}/cache", f"{SOURCE}/engine")
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = list(range(1, 14))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(path, device="cpu", **({"block_size": 4, "num_blocks": 32, "max_num_seqs": 4} | settings))


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[int, ...]:
    return open_llm(path).generate([PROMPT], PARAMS)[0].token_ids


@contextmanager
def interrupted(*lines: int) -> Iterator[None]:
    """Ctrl-C at the n-th executed line of the engine, scheduler or cache, for each n (counted on from the last)."""
    left = list(lines)
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal count
        if not frame.f_code.co_filename.startswith(BOOKS):
            return None
        if event == "line":
            count += 1
            if left and count == left[0]:
                left.pop(0)
                count = 0
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def check_served(llm: LLM, expected: tuple[int, ...]) -> None:
    assert llm.generate([PROMPT], PARAMS)[0].token_ids == expected
    llm.engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.cache.pools)


@pytest.mark.parametrize("line", range(1, 70, 3))
def test_an_abort_that_is_broken_off(path: Path, expected: tuple[int, ...], line: int) -> None:
    llm = open_llm(path)
    other, stream = llm.stream(PROMPT[::-1], PARAMS), llm.stream(PROMPT, PARAMS)
    next(other), next(stream)
    with suppress(KeyboardInterrupt), interrupted(line):
        stream.close()
    last = list(other)[-1].output
    assert last is not None
    assert last.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
    check_served(llm, expected)


@pytest.mark.parametrize("second", [1, 2, 4, 6, 8, 10, 13, 17, 22, 30])
@pytest.mark.parametrize("first", [5, 60, 150])
def test_ctrl_c_twice_within_a_step(path: Path, expected: tuple[int, ...], first: int, second: int) -> None:
    llm = open_llm(path)
    with suppress(KeyboardInterrupt), interrupted(first, second):
        llm.generate([PROMPT, PROMPT[::-1]], PARAMS)
    check_served(llm, expected)


@pytest.mark.parametrize("line", range(1, 60, 3))
def test_a_reset_that_is_broken_off(path: Path, expected: tuple[int, ...], line: int) -> None:
    llm = open_llm(path)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with suppress(KeyboardInterrupt), interrupted(line):
        llm.reset_prefix_cache()
    stream.close()
    check_served(llm, expected)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_stream_whose_request_was_ended_by_others_ends(path: Path, expected: tuple[int, ...], end: str) -> None:
    llm = open_llm(path)
    stream = llm.stream(PROMPT, PARAMS)
    token_ids = next(stream).token_ids
    if end == "close":
        llm.close()
    else:
        llm.engine.abort(llm.engine.scheduler.unfinished_ids[0])
    (last,) = list(stream)
    assert last.output is not None
    assert last.output.finish_reason is FinishReason.ABORT
    assert last.output.token_ids == token_ids == expected[: len(token_ids)]
    check_served(llm, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory_bytes": 10**30, "num_blocks": None}, "kv_cache_memory_bytes must be at most"),
        ({"num_blocks": 10**18}, "num_blocks must be at most"),
        ({"block_size": 10**30}, "block_size must be at most"),
        ({"block_size": 2**47, "num_blocks": 2**47}, "there is no memory for a cache"),
        ({"cpu_cache_gib": 1e30}, "cpu_cache_gib must be a number from 0"),
        ({"cpu_cache_gib": 10**400}, "cpu_cache_gib must be a number from 0"),
        ({"cpu_cache_gib": 1.0, "cache_dir": ""}, "cache_dir must be a path"),
        ({"cpu_cache_gib": 1.0, "cache_dir": "a\0b"}, "cache_dir=.* cannot be written"),
        ({"cpu_cache_gib": 1.0, "cache_dir": "/proc/self"}, "cache_dir=.* cannot be written"),
    ],
)
def test_settings_beyond_all_bounds_are_refused(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(path, **settings)


def test_a_relative_directory_stays_where_it_was(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with open_llm(path, cpu_cache_gib=0.01, cache_dir="kept") as llm:
        llm.generate([PROMPT], PARAMS)
        monkeypatch.chdir(tmp_path / "b")
    assert list((tmp_path / "a" / "kept").glob("*.safetensors"))
    assert not list((tmp_path / "b").iterdir())
