"""From token ids to text, piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.outputs import TextPiece

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer shows bytes that are no whole character (yet)."""

MOST_UNFINISHED = 3
"""Bytes that may still become a character. Of more replacement characters in a row, the first ones stay as they are."""

PROMPT_CONTEXT = 8
"""Tokens of the prompt that the first new ones are decoded after."""

CONTEXT = 4
"""Tokens that new ones are decoded after, at least."""

MOST_PENDING = 24
KEPT_PENDING = 12
"""Tokens that never make a whole character are cut down to so few. Three replacement characters may be nine bytes in
nine tokens."""


class Detokenizer:
    """Text of one request. Bytes that are no whole character yet are held back until they are, or until `flush`.

    A token's text may depend on those before it (a space, say), so the last tokens whose text is out are decoded again
    with the new ones, and what comes on top is new; for the first tokens these are the end of the prompt, `context`. A
    character that the prompt left unfinished is text of the token that completes it. A call of the tokenizer gets a
    bounded number of tokens, whatever they are. Without a tokenizer all text is empty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        skip_special_tokens: bool,
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # tokens whose text is out, and whole characters
        self._context_text = ""
        self._old = 0  # so many of them go when enough others have come
        self._pending: list[int] = []  # tokens after the context
        self._pending_text = ""
        self._whole_text = ""  # of both
        self._out = ""  # what is out of the text of the pending tokens
        self._depth = 0
        self._parts: list[str] = []
        if tokenizer is not None:
            self._begin_after(context[-PROMPT_CONTEXT:])

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._parts)

    def add(self, token_ids: Sequence[int], depths: Sequence[int]) -> list[TextPiece]:
        """Take new tokens and return the text that they complete, a piece for each token that completes some."""
        if self._tokenizer is None:
            return []
        pieces = []
        for token_id, self._depth in zip(token_ids, depths):
            pieces += self._show(self._take(token_id))
        return pieces

    def flush(self) -> list[TextPiece]:
        """The rest, an unfinished character replaced. It is the last token's."""
        rest = self._release(len(self._pending_text))
        self._settle()
        return self._show(rest)

    def _begin_after(self, prompt: Sequence[int]) -> None:
        """The end of the prompt, from the beginning of a character on, is context; an unfinished character pends."""
        for start, unfinished in itertools.product(range(MOST_UNFINISHED + 1), repeat=2):
            end = max(len(prompt) - unfinished, start)
            if not self._decode(prompt[start:end]).endswith(UNFINISHED):
                break
        else:
            start, end = 0, len(prompt)  # no text at all, or the replacement character itself
        self._pending = list(prompt[start:end])
        self._new_text()
        self._settle()
        self._pending = list(prompt[end:])
        self._out = self._pending_text = self._new_text()

    def _take(self, token_id: int) -> str:
        """The text that becomes certain with a token."""
        self._pending.append(token_id)
        text = self._new_text()
        if text == self._pending_text and not self._decode([token_id, token_id]):
            self._pending.pop()  # never any text: a skipped special token, say (a lone space may be none, but two are)
            return ""
        self._pending_text = text
        held = min(len(text) - len(text.rstrip(UNFINISHED)), MOST_UNFINISHED)
        new = self._release(len(text) - held)
        if text and not held:
            self._settle()
        elif len(self._pending) > MOST_PENDING:
            self._shorten(held)
        return new

    def _new_text(self) -> str:
        """What the pending tokens add to the context."""
        self._whole_text = self._decode([*self._context, *self._pending])
        if self._whole_text.startswith(self._context_text):
            return self._whole_text[len(self._context_text) :]
        # With byte fallback, a run of bytes with an unfinished or wrong one at its end is nothing but replacements.
        return self._decode(self._pending)

    def _release(self, end: int) -> str:
        """The text of the pending tokens up to `end`, as far as it is not out."""
        if not self._pending_text.startswith(self._out):
            self._out = ""  # the bytes that the prompt left are a whole character now
        new = self._pending_text[len(self._out) : end]
        self._out += new
        return new

    def _settle(self) -> None:
        """All text is out: the pending tokens become context, and older context goes."""
        self._context += self._pending
        self._pending, self._pending_text, self._out = [], "", ""
        if len(self._context) - self._old >= CONTEXT:
            del self._context[: self._old]
            self._old = len(self._context)
            self._whole_text = self._decode(self._context)
        self._context_text = self._whole_text

    def _shorten(self, held: int) -> None:
        """Forget the first of many tokens that make no whole character; the last `held` replacements stay open."""
        self._context, self._context_text, self._old = [], "", 0
        del self._pending[:-KEPT_PENDING]
        self._pending_text = text = self._new_text()
        if text.endswith(UNFINISHED) or not text:
            self._out = text[: max(len(text) - held, 0)]
        else:
            self._settle()  # byte fallback: without the wrong byte before them the others are characters again

    def _show(self, text: str) -> list[TextPiece]:
        if not text:
            return []
        self._parts.append(text)
        return [TextPiece(text, self._depth)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        skip = self._skip_special_tokens
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        )
