"""What a tiny model does alone, in an engine that shares nothing: tokens and rows to compare a busy engine with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from scripted import greedy_sequence
from tiny_models import edit_config, tiny_glm4_moe, tiny_llama, tiny_mistral, tiny_qwen2
from torch import Tensor

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.sampling_params import SamplingParams

MAX_LEN = 40
"""The longest prompt, with its answer, that is asked for."""
MAX_NEW_TOKENS = 12


def tiny_mixed(path: Path) -> Path:
    """Two modules with a window, and one behind them that attends to all rows."""
    tiny_qwen2(path, num_modules=3, sliding_window=8)
    edit_config(path, mtp_layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    return path


BUILDERS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "llama": (lambda path: tiny_llama(path, num_modules=3), 3),
    "mistral": (lambda path: tiny_mistral(path, num_modules=2, sliding_window=8), 2),
    "qwen2": (lambda path: tiny_qwen2(path, num_modules=2, sliding_window=8), 2),
    "mixed": (tiny_mixed, 3),
    "glm4_moe": (tiny_glm4_moe, 3),
}
"""Tiny checkpoints and how many drafts they make a step: modules with full attention, sliding windows everywhere,
layers of both kinds, modules of both kinds, and one module for all drafts."""


@cache
def loaded_model(kind: str) -> LoadedModel:
    """A tiny random checkpoint, loaded once."""
    with tempfile.TemporaryDirectory() as directory:
        path = BUILDERS[kind][0](Path(directory) / "model")
        return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


class Cold:
    """What a model does alone, in an engine that shares nothing: its tokens, and the rows of whole prefills."""

    def __init__(self, kind: str) -> None:
        config = EngineConfig(
            num_speculative_tokens=BUILDERS[kind][1],
            num_blocks=32,
            block_size=8,
            max_num_seqs=1,
            max_model_len=2 * MAX_LEN + 2 * MAX_NEW_TOKENS,
            enable_prefix_caching=False,
        )
        self.engine = build_engine(loaded_model(kind), config)
        self._sequences: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._rows: dict[tuple[int, ...], list[list[Tensor]]] = {}

    def sequence(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The prompt and its greedy continuation, long enough for any request."""
        length = len(prompt) + MAX_NEW_TOKENS + 4
        if len(self._sequences.get(prompt, ())) < length:
            whole = tuple(greedy_sequence(self.engine, prompt, length - len(prompt)))
            for end in range(len(prompt), len(whole) + 1):  # what follows a part of it is known as well
                self._sequences[whole[:end]] = max(whole, self._sequences.get(whole[:end], ()), key=len)
        return self._sequences[prompt][:length]

    def rows(self, token_ids: tuple[int, ...], candidates: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
        """By group, the rows of a prefill of some sequence that begins with `token_ids`: one of the candidates."""
        if token_ids not in self._rows:
            whole = next(one for one in candidates if one[: len(token_ids)] == token_ids)
            rows = self._prefill(whole)
            self._rows.update({whole[:end]: rows for end in range(len(whole) + 1)})
        return self._rows[token_ids]

    def _prefill(self, token_ids: tuple[int, ...]) -> list[list[Tensor]]:
        request = self.engine.add_request("prefill", token_ids, SamplingParams(max_tokens=24, ignore_eos=True))
        plan = self.engine.scheduler.plan()
        self.engine.scheduler.commit(plan, self.engine.runner.execute(plan))
        assert request.num_computed_tokens == len(token_ids)
        self.engine.abort("prefill")
        storage = self.engine.runner.storage  # with sliding windows, blocks that were given back are still as they were
        tables = enumerate(plan.requests[0].blocks)
        return [[torch.cat(rows) for rows in zip(*(storage.block(g, b) for b in blocks))] for g, blocks in tables]


@cache
def cold(kind: str) -> Cold:
    """The one of a kind."""
    return Cold(kind)
