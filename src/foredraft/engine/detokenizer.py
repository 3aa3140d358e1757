"""From token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.outputs import TextPiece

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer shows bytes that are no whole character (yet)."""


class Detokenizer:
    """Text of one request. Bytes that are no whole character yet are held back until they are, or until `flush`.

    A token's text may depend on the one before it (a space, say), so the last tokens that made text are decoded again
    with the new ones, and what comes on top is new. Without a tokenizer all text is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._context = 0  # tokens from here to _shown have made text, and are decoded again
        self._shown = 0
        self.text = ""

    def add(self, token_ids: Sequence[int], depths: Sequence[int]) -> list[TextPiece]:
        """Take new tokens and return the text that they complete, a piece for each token that completes some."""
        if self._tokenizer is None:
            return []
        pieces = []
        for token_id, depth in zip(token_ids, depths):
            self._token_ids.append(token_id)
            text = self._new_text()
            if text and not text.endswith(UNFINISHED):
                pieces.append(self._show(text, depth))
        return pieces

    def flush(self) -> list[TextPiece]:
        """The rest, an unfinished character replaced."""
        text = self._new_text() if self._tokenizer is not None else ""
        return [self._show(text, 0)] if text else []

    def _new_text(self) -> str:
        """What the tokens since the last piece add to it."""
        known = self._decode(self._token_ids[self._context : self._shown])
        return self._decode(self._token_ids[self._context :])[len(known) :]

    def _show(self, text: str, depth: int) -> TextPiece:
        self._context, self._shown = self._shown, len(self._token_ids)
        self.text += text
        return TextPiece(text, depth)

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        skip = self._skip_special_tokens
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
