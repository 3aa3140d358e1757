"""Chats of several turns, with the prefix cache and without: what it finds, and whether drafts fare the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.errors import ForedraftError
from foredraft.outputs import RequestOutput
from foredraft.statistics import SpeculationStats


@dataclass(frozen=True)
class Turn:
    """One turn of all chats, in one way: prompt tokens, how many of them were cached, and how drafts fared."""

    number: int
    is_shared: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    speculation: SpeculationStats


@dataclass(frozen=True)
class ChatsResult:
    """All turns, and whether both ways wrote the same answers."""

    turns: tuple[Turn, ...]
    is_identical: bool

    def table(self) -> Table:
        """A line for each turn and way."""
        table = Table("turn", "prefix cache", "prompt tokens", "cached", "mean acceptance length", "drafts")
        table.box = box.MARKDOWN
        for turn in self.turns:
            length, drafts = turn.speculation.mean_acceptance_length, turn.speculation.num_drafts
            cached = f"{turn.num_cached_tokens / turn.num_prompt_tokens:.0%}"
            way = "on" if turn.is_shared else "off"
            table.add_row(str(turn.number), way, str(turn.num_prompt_tokens), cached, f"{length:.3f}", str(drafts))
        return table

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        turns = [
            {
                "turn": turn.number,
                "prefix_cache": turn.is_shared,
                "num_prompt_tokens": turn.num_prompt_tokens,
                "num_cached_tokens": turn.num_cached_tokens,
                "speculation": turn.speculation.to_dict(),
            }
            for turn in self.turns
        ]
        return {"turns": turns, "is_identical": self.is_identical}


def measure_chats(llm: LLM, questions: Sequence[str], num_turns: int, params: SamplingParams) -> ChatsResult:
    """Ask every question as the first of a chat, and the ones after it in the list as the turns that follow.

    All chats run as one batch. Without the prefix cache every request has a salt of its own.
    """
    turns: list[Turn] = []
    answers: dict[bool, list[list[str]]] = {}
    for is_shared in (True, False):
        chats: list[list[dict[str, str]]] = [[] for _ in questions]
        for turn in range(num_turns):
            for index, chat in enumerate(chats):
                chat.append({"role": "user", "content": questions[(index + turn) % len(questions)]})
            salts = ["chats" if is_shared else f"turn {turn} of chat {index}" for index in range(len(chats))]
            outputs = llm.chat(chats, [replace(params, cache_salt=salt) for salt in salts])
            turns.append(_turn(turn + 1, is_shared, outputs))
            for chat, output in zip(chats, outputs):
                chat.append({"role": "assistant", "content": output.text})
        answers[is_shared] = [[message["content"] for message in chat] for chat in chats]
    return ChatsResult(tuple(sorted(turns, key=lambda turn: turn.number)), answers[True] == answers[False])


def _turn(number: int, is_shared: bool, outputs: Sequence[RequestOutput]) -> Turn:
    speculation = SpeculationStats()
    for output in outputs:
        if output.error is not None:
            raise ForedraftError(f"turn {number}: {output.error}")
        speculation.add(output.stats)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Turn(number, is_shared, num_prompt_tokens, sum(o.num_cached_tokens for o in outputs), speculation)
