"""One conversation that the target writes by itself, turn by turn, until it fills a row."""

from __future__ import annotations

import random
from collections.abc import Sequence

from foredraft.sampling_params import SamplingParams
from foredraft.training.chat_frame import ChatFrame
from foredraft.training.recipe import Recipe

_SPREAD = 0.1
"""By how much the temperature of user turns differs from its mean, either way."""


class Conversation:
    """The tokens so far, and what is to be asked of the engine next.

    Without a frame there are no turns: the target goes on with a text, all of which counts as spoken. number: which
    conversation of the corpus it is; with the seed it decides every draw. first_turn: a user's, or none.
    """

    def __init__(
        self, number: int, recipe: Recipe, frame: ChatFrame | None, opening: Sequence[int], first_turn: Sequence[int]
    ) -> None:
        chance = random.Random(f"{recipe.synthesis_seed}/{number}")
        self._chance = chance
        is_greedy = chance.random() < recipe.greedy_share
        drawn = chance.uniform(recipe.min_temperature, recipe.max_temperature)
        self._answer_temperature = 0.0 if is_greedy else drawn
        self._user_temperature = recipe.user_temperature * chance.uniform(1 - _SPREAD, 1 + _SPREAD)
        self._frame, self._length = frame, recipe.row_length
        self.token_ids: list[int] = list(opening)
        self.is_spoken: list[bool] = [False] * len(self.token_ids)
        self._is_answer = frame is None
        if first_turn:
            self._append(first_turn, is_spoken=False)
            if frame is not None:
                self._append(frame.to_assistant, is_spoken=False)
                self._is_answer = True

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) >= self._length

    def params(self) -> SamplingParams:
        """How its next turn is to be drawn: to its end, or to the end of the row."""
        stops = () if self._frame is None else (self._frame.ends[self._is_answer],)
        return SamplingParams(
            max_tokens=self._length - len(self.token_ids),
            temperature=self._answer_temperature if self._is_answer else self._user_temperature,
            stop_token_ids=stops,
            ignore_eos=self._frame is None,
            seed=self._chance.randrange(2**31),
        )

    def add_turn(self, token_ids: Sequence[int], *, is_stopped: bool) -> None:
        """Take what was drawn; is_stopped: its last token ends the turn, so that the next one begins."""
        frame = self._frame
        if frame is None or not is_stopped:
            self._append(token_ids, is_spoken=self._is_answer)
            return
        self._append(token_ids[:-1], is_spoken=self._is_answer)
        following = frame.to_user if self._is_answer else frame.to_assistant
        self._append(following[:1], is_spoken=self._is_answer)  # whichever token the target ended with
        self._append(following[1:], is_spoken=False)
        self._is_answer = not self._is_answer

    def _append(self, token_ids: Sequence[int], *, is_spoken: bool) -> None:
        room = self._length - len(self.token_ids)
        kept = list(token_ids[:room])
        self.token_ids += kept
        self.is_spoken += [is_spoken] * len(kept)
