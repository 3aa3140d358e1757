"""From token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from foredraft.outputs import TextPiece


class Detokenizer:
    """Text of one request. Bytes that are no whole character yet are held back until they are, or until `flush`.

    Without a tokenizer all text is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self.text = ""

    def add(self, token_ids: Sequence[int], depths: Sequence[int]) -> list[TextPiece]:
        """Take new tokens and return the text that they complete, a piece for each token that completes some."""
        if self._tokenizer is None:
            return []
        pieces = []
        for token_id, depth in zip(token_ids, depths):
            self._token_ids.append(token_id)
            text = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
            if text:
                self.text += text
                pieces.append(TextPiece(text, depth))
        return pieces

    def flush(self) -> list[TextPiece]:
        """The rest: what the whole text has beyond what was returned so far (an unfinished character, replaced)."""
        if self._tokenizer is None or not self._token_ids:
            return []
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        rest = str(whole)[len(self.text) :]
        self.text += rest
        return [TextPiece(rest, 0)] if rest else []
