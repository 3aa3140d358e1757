"""Bytes that a step reads: from the weights of real models, against what their shapes say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_alternating, tiny_llama

from foredraft import LLM
from foredraft.bench.step_bytes import ModelBytes, StepBytes

HIDDEN, INNER, VOCAB, KV_WIDTH = 32, 64, 64, 2 * 2 * 8
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * (KV_WIDTH // 2) + 3 * HIDDEN * INNER + 2 * HIDDEN
MODULE = LAYER + 2 * HIDDEN * HIDDEN + 3 * HIDDEN
ROTARY = 4  # its frequencies, a buffer; float32, like all else here
INEXACT = 4 * 2 * ROTARY


def model_of(
    path: Path, build: Callable[..., Path] = tiny_llama, settings: dict[str, Any] | None = None, **options: Any
) -> ModelBytes:
    build(path, **options)
    return ModelBytes.of(LLM(path, num_blocks=64, dtype="float32", device="cpu", **(settings or {})))


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_are_those_that_a_step_reads(tmp_path: Path, is_tied: bool) -> None:
    model = model_of(tmp_path, num_modules=2, tie_word_embeddings=is_tied)
    assert model.target == pytest.approx(4 * (2 * LAYER + HIDDEN), abs=INEXACT)
    assert model.head == model.draft_head == 4 * HIDDEN * VOCAB
    assert model.modules == (4 * MODULE, 4 * MODULE)


def test_a_step_reads_what_its_depth_needs(tmp_path: Path) -> None:
    model = model_of(tmp_path, num_modules=3, settings={"draft_vocab_size": 16})
    plain, deep = model.step(5, 10.0, 0), model.step(5, 10.0, 3)
    assert plain == StepBytes(model.target, model.head, 0, 0, 4 * 5 * 10 * 2 * KV_WIDTH, 0)
    assert (deep.target, deep.head, deep.target_kv) == (plain.target, plain.head, plain.target_kv)
    assert deep.modules == 3 * 4 * MODULE
    assert deep.draft_heads == 3 * 4 * HIDDEN * 16
    assert deep.module_kv == 4 * 5 * 10 * 3 * KV_WIDTH
    assert deep.total == plain.total + deep.modules + deep.draft_heads + deep.module_kv


def test_a_single_module_is_read_for_every_draft(tmp_path: Path) -> None:
    model = model_of(tmp_path, num_modules=1, settings={"num_speculative_tokens": 3})
    step = model.step(1, 10.0, 3)
    assert step.modules == 3 * 4 * MODULE
    assert step.module_kv == 3 * 4 * 10 * KV_WIDTH


def test_no_more_is_read_than_windows_hold(tmp_path: Path) -> None:
    model = model_of(tmp_path, tiny_alternating, num_modules=1, sliding_window=16)
    assert model.step(1, 100.0, 1).target_kv == 4 * (2 * 100 + 2 * 16) * KV_WIDTH
    assert model.step(1, 100.0, 1).module_kv == 4 * 16 * KV_WIDTH


@pytest.mark.parametrize(("bits", "num_bytes"), [(16, 64 * 32 * 4), (8, 64 * (32 + 4))])
def test_the_draft_head_is_the_one_that_is_used(tmp_path: Path, bits: int, num_bytes: int) -> None:
    llm = LLM(tiny_llama(tmp_path / "model"), device="cpu", draft_head_bits=bits)
    assert ModelBytes.of(llm).draft_head == num_bytes
    llm = LLM(tmp_path / "model", device="cpu", draft_head_bits=bits, draft_vocab_size=16)
    assert ModelBytes.of(llm).draft_head == num_bytes // 4
