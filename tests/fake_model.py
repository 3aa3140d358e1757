"""A fake target with fixed logits, and drafts by script, under the real scheduler, cache, sampler and verifier.

The model is a real tiny one that runs over its paged rows; but h0 carries the token and the position of its row, and
the logits are looked up in a table by them. So what is right is known without running a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_llama
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft import LLM
from foredraft.cache.storage import CacheStorage
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.engine.open_requests import OpenRequests
from foredraft.models.attention import PagedAttention
from foredraft.models.draft_head import DraftHead
from foredraft.models.loader import load_checkpoint
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.sampler import SamplingTensors, sample
from foredraft.sampling.sampling_state import SamplingState
from foredraft.speculation.drafter import Drafter, Window

Table = Callable[[int, int], Tensor]
"""From a token and its position to the logits [V] of the token after it."""

Script = Callable[[str, int, int, int], int | Tensor]
"""From request id, position, depth (0 for the first draft) and the token before it to a draft: a token, or the
probabilities [V] that it is drawn from."""


def one_after_another(token_ids: Sequence[int], vocab_size: int, start: int = 0, gap: float = 5.0) -> Table:
    """The token at position p is token_ids[p - start], whatever comes before it; the last one for ever after.

    Others are `gap` and more below it, each by another amount.
    """

    def table(token_id: int, position: int) -> Tensor:
        logits = -gap - torch.arange(vocab_size, dtype=torch.float32) / vocab_size
        logits[token_ids[min(max(position + 1 - start, 0), len(token_ids) - 1)]] = 0.0
        return logits

    return table


def right(table: Table, num_right: int = 8) -> Script:
    """The first `num_right` drafts of each cycle are the table's likeliest tokens, the others are wrong."""

    def script(request_id: str, position: int, depth: int, previous: int) -> int:
        logits = table(previous, position - 1)
        likeliest = int(logits.argmax())
        return likeliest if depth < num_right else (likeliest + 1) % len(logits)

    return script


def at_positions(drafts: Mapping[int, int], otherwise: int = 0) -> Script:
    """Drafts by position."""
    return lambda request_id, position, depth, previous: drafts.get(position, otherwise)


class TableTarget(TargetModel):
    """A real target whose logits come from `table`, once that is set."""

    table: Table | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        hidden = super().forward(token_ids, positions, paged)
        if self.table is None:
            return hidden
        return torch.cat([token_ids[:, None].to(hidden), positions[:, None].to(hidden), hidden[:, 2:]], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.table is None:
            return super().logits(hidden)
        rows = [self.table(int(token_id), int(position)) for token_id, position in hidden[:, :2].tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)


class ScriptedDrafts(Drafter):
    """Runs the real passes, but drafts what `script` says; where there is none, what its modules and rules say.

    `drafted` keeps every draft: request id, position, token.
    """

    def __init__(self, target: TargetModel, modules: MtpModules, storage: CacheStorage, head: DraftHead) -> None:
        super().__init__(target, modules, storage, head)
        self.script: Script | None = None
        self.drafted: list[tuple[str, int, int]] = []
        self._previous: dict[str, int] = {}

    def propose(self, drafting: Sequence[int], rules: Sequence[SamplingState | None], chain: Any) -> dict[int, int]:
        return super().propose(drafting, rules, chain) if self.script is None else {}

    def choose(
        self, index: int, windows: Sequence[Window], logits: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor | None]:
        if self.script is None:
            return super().choose(index, windows, logits, sampling)
        vocab_size = self._target.vocab_size
        chosen, probs = [], []
        for row, window in enumerate(windows):
            previous = self._previous[window.request_id] if index else window.token_ids[-1]
            said = self.script(window.request_id, window.num_tokens + index, index, previous)
            if isinstance(said, int):
                token_id, mass = said, torch.nn.functional.one_hot(torch.tensor(said), vocab_size).float()
            else:
                keys = cycle_keys(torch.tensor([window.num_tokens]), index)
                drawn = uniform(sampling.seeds[row : row + 1], keys, Stream.DRAFT)
                token_id, mass = int(sample(said[None], drawn)), said
            chosen.append(token_id)
            probs.append(mass)
            self._previous[window.request_id] = token_id
            self.drafted.append((window.request_id, window.num_tokens + index, token_id))
        return torch.tensor(chosen), torch.stack(probs)


class FakeModel:
    """An LLM over a table. Its checkpoint has `num_modules` modules and `vocab_size` tokens."""

    def __init__(
        self,
        path: Path,
        table: Table,
        script: Script | None = None,
        *,
        vocab_size: int = 16,
        num_modules: int = 8,
        eos_token_ids: Sequence[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> None:
        if not (path / "config.json").exists():
            tiny_llama(path, num_modules=num_modules, vocab_size=vocab_size, hidden_size=32)
        settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "dtype": "float32", **settings}
        self.llm = LLM(path, **settings)
        self.engine, self.target, self.drafter = self._build(path, self.llm.config, eos_token_ids, tokenizer)
        self.llm.requests, self.llm.tokenizer = OpenRequests(self.engine), tokenizer
        self.target.table = table
        self.drafter.script = script

    @staticmethod
    def _build(
        path: Path, config: EngineConfig, eos_token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
    ) -> tuple[Engine, TableTarget, ScriptedDrafts]:
        loaded = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
        loaded = replace(loaded, tokenizer=tokenizer, eos_token_ids=frozenset(eos_token_ids))
        targets: list[TableTarget] = []
        drafters: list[ScriptedDrafts] = []

        def make_target(model: Any) -> TargetModel:
            targets.append(TableTarget(model))
            return targets[-1]

        def make_drafter(*args: Any) -> Drafter:
            drafters.append(ScriptedDrafts(*args))
            return drafters[-1]

        engine = build_engine(loaded, config, make_drafter, make_target)
        return engine, targets[-1], drafters[-1]


def words_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerBase:
    """Token i is the text words[i]; texts are put together as they are, without spaces between them."""
    model = WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
