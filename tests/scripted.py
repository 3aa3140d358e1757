"""Scripted drafts: the target's own next tokens, wrong from a chosen depth on, so that any number can be accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.draft_head import DraftHead
from foredraft.models.loader import LoadedModel
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.sampling.sampler import SamplingTensors
from foredraft.sampling.sampling_state import SamplingState
from foredraft.sampling_params import SamplingParams
from foredraft.speculation.drafter import Drafter, Drafts, Window


class ScriptedDrafter(Drafter):
    """Runs the real passes, but drafts `continuations[request]` as far as `num_right[request]` says, then wrong tokens.

    continuations: whole sequences, prompt included, by request id. `seen` keeps every window with its drafts.
    """

    def __init__(self, target: TargetModel, modules: MtpModules, storage: CacheStorage, head: DraftHead) -> None:
        super().__init__(target, modules, storage, head)
        self.vocab_size = target.vocab_size
        self.continuations: dict[str, Sequence[int]] = {}
        self.num_right: dict[str, int] = {}
        self.seen: list[tuple[Window, tuple[int, ...]]] = []

    def run(
        self, windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
    ) -> Drafts:
        drafts = super().run(windows, sampling, rules)
        for window, row in zip(windows, drafts.token_ids.tolist(), strict=True):
            self.seen.append((window, tuple(token_id for token_id in row if token_id >= 0)))
        return drafts

    def propose(self, drafting: Sequence[int], rules: Sequence[SamplingState | None], chain: object) -> dict[int, int]:
        return {}  # the script alone decides

    def choose(
        self, index: int, windows: Sequence[Window], logits: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor | None]:
        return torch.tensor([self._draft(window, index) for window in windows]), None

    def _draft(self, window: Window, index: int) -> int:
        position = window.num_tokens + index
        right = self.continuations[window.request_id][position]
        return right if index < self.num_right.get(window.request_id, 0) else (right + 1) % self.vocab_size


def scripted_engine(loaded: LoadedModel, config: EngineConfig) -> tuple[Engine, ScriptedDrafter]:
    """An engine over `loaded` whose drafts follow a script."""
    made: list[ScriptedDrafter] = []

    def make(target: TargetModel, modules: MtpModules, storage: CacheStorage, head: DraftHead) -> Drafter:
        made.append(ScriptedDrafter(target, modules, storage, head))
        return made[0]

    return build_engine(loaded, config, make), made[0]


def held_rows(engine: Engine, request_id: str, group: int, end: int) -> tuple[int, Tensor]:
    """The first row before `end` that a request holds in a cache group, and the slots of the rows from there on."""
    blocks = engine.cache.block_tables(request_id)[group]
    num_given_back = next((index for index, block in enumerate(blocks) if block), len(blocks))
    first = min(end, num_given_back * engine.cache.block_size)
    return first, engine.runner.storage.slots(blocks, end)[first:]


def finish(engine: Engine, after_step: Callable[[], None] = lambda: None) -> None:
    """Step until nothing is left, proving the books after every step."""
    while engine.has_unfinished:
        engine.step()
        engine.cache.check_integrity()
        after_step()


def greedy_sequence(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt and the target's own continuation, by plain decoding."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, num_speculative_tokens=0)
    request = engine.add_request("greedy", prompt, params)
    finish(engine)
    return request.token_ids
