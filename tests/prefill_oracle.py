"""What the rows of a running request are compared with: one prefill of its tokens, and an account of what was computed.

Shared by the oracles of steps that the host runs and of steps whose state stays on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from scripted import held_rows
from tiny_models import tiny_alternating, tiny_glm4_moe, tiny_llama, tiny_mistral
from torch import Tensor

from foredraft.cache.prefix_match import PrefixMatch
from foredraft.cache.storage import LayerKV
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.request import Request
from foredraft.sampling_params import SamplingParams


@cache
def model(kind: str) -> LoadedModel:
    """A tiny random checkpoint, loaded once."""
    builders: dict[str, Callable[..., Path]] = {
        "llama": tiny_llama,
        "mistral": tiny_mistral,
        "alternating": partial(tiny_alternating, sliding_window=8),
        "glm4_moe": tiny_glm4_moe,
    }
    modules = {} if kind == "glm4_moe" else {"num_modules": 4}
    with tempfile.TemporaryDirectory() as directory:
        path = builders[kind](Path(directory) / kind, **modules)
        return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


@cache
def plain_engine(kind: str) -> Engine:
    """An engine with a wide budget that runs every step by the host, for whole prefills and plain decoding."""
    depth = 3 if kind == "glm4_moe" else None
    config = EngineConfig(
        num_speculative_tokens=depth,
        num_blocks=64,
        block_size=8,
        max_num_seqs=1,
        enable_prefix_caching=False,
        execution="reference",
    )
    return build_engine(model(kind), config)


class Account:
    """Which tokens each module row was computed from, by watching the passes: the rule without its algebra."""

    def __init__(self, num_modules: int) -> None:
        self.rows: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_modules)]
        self.origin = 0

    def begin(self, origin: int = 0) -> None:
        """Nothing is there, and the first row to come is `origin`."""
        self.origin = origin
        self.drop(0)

    def drop(self, first_row: int) -> None:
        """Rows from `first_row` on are given up."""
        for depth, rows in enumerate(self.rows):
            self.rows[depth] = {row: tokens for row, tokens in rows.items() if row < first_row}

    def share(self, token_ids: Sequence[int], match: PrefixMatch) -> None:
        """The rows that a prefix hit brings; whether they are right, the comparison with a prefill tells."""
        self.begin(match.module_origin)
        for depth in range(1, match.module_depth + 1):
            for row in range(match.num_module_rows):
                self.rows[depth - 1][row] = tuple(token_ids[: row + depth + 1])

    def num_exact_rows(self, token_ids: Sequence[int], num_computed: int) -> tuple[int, ...]:
        counts = []
        for depth, rows in enumerate(self.rows, start=1):
            row = self.origin
            while row < num_computed and rows.get(row) == tuple(token_ids[: row + depth + 1]):
                row += 1
            counts.append(row)
        return tuple(counts)

    def check_counts(self, request: Request, token_ids: Sequence[int]) -> None:
        """token_ids: those of the request, as the account was told of them."""
        possible = self.num_exact_rows(token_ids, request.num_computed_tokens)
        # A module that begins at a row has none before it: that row and 0 mean the same.
        counts = tuple(max(self.origin, count) for count in request.exact.num_exact_rows)
        assert counts == possible, "the counts are not as large as the history allows"


def compare_with_prefill(engine: Engine, kind: str, request: Request) -> None:
    """The rows that a running request counts as computed or exact equal those of one prefill of all its tokens."""
    fresh = plain_engine(kind)
    prefilled = fresh.add_request("fresh", request.token_ids, SamplingParams(max_tokens=8, ignore_eos=True))
    fresh.step()
    try:
        _compare(engine, request, fresh, prefilled)
    finally:
        fresh.abort("fresh")


def _compare(engine: Engine, request: Request, fresh: Engine, prefilled: Request) -> None:
    ours, theirs = engine.runner.storage, fresh.runner.storage
    computed = request.num_computed_tokens

    def common_rows(group: int, end: int) -> tuple[Tensor, Tensor]:
        """The slots in either engine of the rows before `end` that both hold."""
        our_first, our_slots = held_rows(engine, request.request_id, group, end)
        their_first, their_slots = held_rows(fresh, "fresh", group, end)
        first = max(our_first, their_first)
        return our_slots[first - our_first :], their_slots[first - their_first :]

    our_slots, their_slots = common_rows(ours.layout.hidden_group, computed)
    _assert_equal(ours.hidden[our_slots], theirs.hidden[their_slots])
    for layer, group in enumerate(ours.layout.group_of_layer):
        our_slots, their_slots = common_rows(group, computed)
        _assert_rows_equal(ours.target[layer], our_slots, theirs.target[layer], their_slots)
    for module, count in enumerate(request.exact.num_exact_rows):
        assert count <= prefilled.exact.num_exact_rows[module]
        our_slots, their_slots = common_rows(ours.layout.group_of_module[module], count)
        num_inexact = _num_inexact_rows(engine, request, module, count - len(our_slots))
        our_slots, their_slots = our_slots[num_inexact:], their_slots[num_inexact:]
        _assert_rows_equal(ours.modules[module], our_slots, theirs.modules[module], their_slots)


def _num_inexact_rows(engine: Engine, request: Request, module: int, first: int) -> int:
    """How many rows from `first` on are not exact because windows before them reach beyond where they began."""
    origin, rebuild_rows = request.exact.origin, engine.cache.layout.rebuild_rows[module]
    return max(0, origin + (rebuild_rows or 0) - module - first) if origin else 0


def _assert_rows_equal(ours: LayerKV, our_slots: Tensor, theirs: LayerKV, their_slots: Tensor) -> None:
    _assert_equal(ours.key[our_slots], theirs.key[their_slots])
    _assert_equal(ours.value[our_slots], theirs.value[their_slots])


def _assert_equal(our_rows: Tensor, their_rows: Tensor) -> None:
    if our_rows.numel():
        bound = 1e-5 * their_rows.abs().max()
        assert (our_rows - their_rows).abs().max() <= bound, "a row that is counted as exact is not"
