"""The target writes the text that modules are trained on: its own conversations, run by the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.request import Request
from foredraft.stopping import FinishReason
from foredraft.training.chat_frame import ChatFrame, chat_frame
from foredraft.training.conversation import Conversation
from foredraft.training.corpus import Corpus, CorpusDirectory
from foredraft.training.recipe import Recipe
from foredraft.training.user_turns import read_user_turns

_BLOCK_SIZE = 16
_WAITING_SHARE = 0.125
"""Turns that have ended wait until so many of the batch have: a step with a prefill costs more than one without."""


@dataclass(frozen=True)
class Worker:
    """One of several processes that write shards: those whose number leaves `index` modulo `count`."""

    index: int = 0
    count: int = 1


class Synthesizer:
    """Writes the shards of a corpus. mtp: modules that draft meanwhile, which changes nothing but the speed."""

    def __init__(
        self,
        target: str | Path,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
        mtp: str | Path | None = None,
    ) -> None:
        loaded = load_checkpoint(target, mtp, num_modules=None if mtp else 0, dtype=dtype, device=device)
        self._recipe = recipe
        self._vocab_size = loaded.info.vocab_size
        self._frame: ChatFrame | None = chat_frame(loaded.tokenizer)
        self._turns: list[tuple[int, ...]] = []
        if recipe.prompts is not None:
            file = Path(recipe.prompts)
            self._turns = read_user_turns(file, loaded.tokenizer, self._vocab_size, recipe.row_length // 2)
        bos = loaded.target.config.get_text_config(decoder=True).bos_token_id
        self._bos: int | None = bos if isinstance(bos, int) else None
        self._engine = build_engine(replace(loaded, tokenizer=None), _engine_config(recipe, loaded))

    def write(
        self,
        directory: CorpusDirectory,
        worker: Worker = Worker(),
        deadline: float | None = None,
        progress: Callable[[int], None] = lambda num_rows: None,
    ) -> bool:
        """Write this worker's shards that are missing; True when none is. deadline: of `time.monotonic`; a shard that
        would not be done by then, if it takes as long as the last, is not begun. progress: called with the rows of each
        shard that is done."""
        seconds = 0.0
        for shard in missing_shards(directory, self._recipe, worker):
            started = time.monotonic()
            if deadline is not None and started + seconds > deadline:
                return False
            rows = self._shard(shard)
            directory.write(shard, rows)
            seconds = time.monotonic() - started
            progress(len(rows))
        return True

    def close(self) -> None:
        """End all requests."""
        self._engine.close()

    def _shard(self, shard: int) -> Corpus:
        first = shard * self._recipe.synthesis_batch
        size = shard_size(self._recipe, shard)
        conversations = [self._conversation(number) for number in range(first, first + size)]
        _converse(self._engine, conversations)
        return Corpus(
            torch.tensor([one.token_ids for one in conversations], dtype=torch.int32),
            torch.tensor([one.is_spoken for one in conversations], dtype=torch.bool),
        )

    def _conversation(self, number: int) -> Conversation:
        chance = random.Random(f"{self._recipe.synthesis_seed}/{number}/first turn")
        turn: tuple[int, ...] = ()
        if self._turns and chance.random() < self._recipe.prompt_share:
            turn = chance.choice(self._turns)
        opening: tuple[int, ...] = ()
        if self._frame is not None:
            opening = self._frame.opening
        elif self._bos is not None:
            opening = (self._bos,)
        elif not turn:
            opening = (chance.randrange(self._vocab_size),)
        return Conversation(number, self._recipe, self._frame, opening, turn)


def num_shards(recipe: Recipe) -> int:
    """Files of the whole corpus."""
    return -(-recipe.num_rows // recipe.synthesis_batch)


def shard_size(recipe: Recipe, shard: int) -> int:
    """Rows of one of them; the last has what is left."""
    return min(recipe.synthesis_batch, recipe.num_rows - shard * recipe.synthesis_batch)


def missing_shards(directory: CorpusDirectory, recipe: Recipe, worker: Worker) -> Iterator[int]:
    """The shards that this worker has yet to write."""
    return (s for s in range(worker.index, num_shards(recipe), worker.count) if not directory.has(s))


def _engine_config(recipe: Recipe, loaded: LoadedModel) -> EngineConfig:
    depth = loaded.num_mtp_modules if loaded.mtp is not None else 0
    size = recipe.synthesis_batch
    blocks_of_row = -(-(recipe.row_length + depth + 1) // _BLOCK_SIZE)
    # Room for every conversation to the end of its row, and for a copy of a block of each: none is ever preempted, and
    # none loses between two turns what is cached of it.
    return EngineConfig(
        model=loaded.info.path,
        num_speculative_tokens=depth,
        max_num_seqs=size,
        max_num_batched_tokens=max(2048, size * (depth + 1)),
        max_model_len=min(recipe.row_length + 1, loaded.info.max_position_embeddings),
        block_size=_BLOCK_SIZE,
        num_blocks=1 + size * (blocks_of_row + 2),
    )


def _converse(engine: Engine, conversations: list[Conversation]) -> None:
    """Let the engine go on with all conversations, turn after turn, until each fills its row."""
    running: dict[str, tuple[Conversation, Request]] = {}
    waiting = [one for one in conversations if not one.is_full]
    num_turns = 0
    while waiting or running:
        if len(waiting) >= max(1, _WAITING_SHARE * len(conversations)) or not running:
            for conversation in waiting:
                request_id = f"turn-{num_turns}"
                request = engine.add_request(request_id, conversation.token_ids, conversation.params())
                running[request_id] = conversation, request
                num_turns += 1
            waiting = []
        for update in engine.step():
            if update.request.finish_reason is None:
                continue
            conversation, request = running.pop(update.request.request_id)
            if request.finish_reason is FinishReason.ERROR:
                raise ForedraftError(f"the target cannot go on with its text: {request.error}")
            answer = request.token_ids[len(request.prompt_token_ids) :]
            conversation.add_turn(answer, is_stopped=request.finish_reason is FinishReason.STOP)
            if not conversation.is_full:
                waiting.append(conversation)
