"""The fixed tokens of a chat template: what stands before, between and after the turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_USER, _ANSWER, _NEXT = "USERTURN7", "ASSISTANTTURN7", "NEXTTURN7"


@dataclass(frozen=True)
class ChatFrame:
    """Token ids: `opening` up to the first user turn, `to_assistant` from its end to the answer, `to_user` from there
    to the next user turn. The first token of each of the latter ends the turn before it."""

    opening: tuple[int, ...]
    to_assistant: tuple[int, ...]
    to_user: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """The tokens that end a user's turn and an assistant's."""
        return self.to_assistant[0], self.to_user[0]


def chat_frame(tokenizer: PreTrainedTokenizerBase | None) -> ChatFrame | None:
    """The frame of a tokenizer's chat template; None if it has none, or one without fixed text around turns."""
    if tokenizer is None or not tokenizer.chat_template:
        return None
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    try:
        first = _text(tokenizer, [user], is_prompt=True)
        whole = _text(tokenizer, [user, answer, {"role": "user", "content": _NEXT}], is_prompt=False)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None
    if _USER not in first or _ANSWER not in whole or _NEXT not in whole:
        return None
    opening, to_assistant = first.split(_USER, 1)
    to_user = whole.split(_ANSWER, 1)[1].split(_NEXT, 1)[0]
    pieces = tuple(_ids(tokenizer, text) for text in (opening, to_assistant, to_user))
    return ChatFrame(*pieces) if all(pieces) else None


def _text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, is_prompt: bool) -> str:
    text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=is_prompt, tokenize=False)
    return str(text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in tokenizer(text, add_special_tokens=False)["input_ids"])
