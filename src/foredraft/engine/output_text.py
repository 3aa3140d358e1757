"""The text of one request: pieces as they become certain, up to the first stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.engine.detokenizer import Detokenizer
from foredraft.outputs import TextPiece


class OutputText:
    """What a request says, as it is shown: it ends at the first of the `stop` strings (none of them empty).

    Read character by character, the stop string that is complete first ends the text, and of several at once the
    longest, so nothing depends on how characters are grouped into tokens. The token that completes its last character
    completes it; if that is one of the first `min_tokens` tokens, it is ignored. The text ends before the stop
    string, or right after it with `include_stop_str_in_output`. The prompt is never searched.

    Text that may still turn out to begin a stop string is held back. Without a tokenizer there is no text, and there
    can be no stop strings.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        assert tokenizer is not None or not stop
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, context=prompt_token_ids)
        self._stops = [_StopString(string) for string in stop]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._is_stopped = False
        self._decided: list[TextPiece] = []
        self._num_taken = 0
        self._held: deque[TextPiece] = deque()
        self._num_held = 0  # characters

    @property
    def text(self) -> str:
        """All that is decided so far, whether it was taken or not."""
        return "".join(piece.text for piece in self._decided)

    def add(self, token_ids: Sequence[int], depths: Sequence[int]) -> int | None:
        """Take new tokens, each accepted at its depth, until a stop string is complete.

        Returns how many of them stay, the one that completes it included, or None if they all do and no stop string is
        complete. After a stop none stays.
        """
        if self._is_stopped:
            return 0
        for index, (token_id, depth) in enumerate(zip(token_ids, depths)):
            self._num_tokens += 1
            for piece in self._detokenizer.add([token_id], [depth]):
                self._read(piece)
            if self._is_stopped:
                return index + 1
        return None

    def take_pieces(self) -> tuple[TextPiece, ...]:
        """What was decided since the last call."""
        pieces = tuple(self._decided[self._num_taken :])
        self._num_taken = len(self._decided)
        return pieces

    def flush(self) -> None:
        """The request ends here: what was held back, and a character that is not whole, belong to the text."""
        if not self._is_stopped:
            for piece in self._detokenizer.flush():
                self._hold(piece)
            self._decide(keep=0)

    def _read(self, piece: TextPiece) -> None:
        """Add a piece to the text, or what it adds up to the end of a stop string."""
        for position, character in enumerate(piece.text if self._stops else ""):
            complete = [len(stop.string) for stop in self._stops if stop.read(character)]
            if complete and self._num_tokens > self._min_tokens:
                self._hold(TextPiece(piece.text[: position + 1], piece.depth))
                self._decide(keep=0 if self._include_stop else max(complete))
                self._is_stopped = True
                return
        self._hold(piece)
        self._decide(keep=max((stop.num_read for stop in self._stops), default=0))

    def _hold(self, piece: TextPiece) -> None:
        self._held.append(piece)
        self._num_held += len(piece.text)

    def _decide(self, keep: int) -> None:
        """Hold back the last `keep` characters only."""
        while self._num_held > keep:
            piece = self._held.popleft()
            count = min(self._num_held - keep, len(piece.text))
            self._decided.append(TextPiece(piece.text[:count], piece.depth))
            self._num_held -= count
            if count < len(piece.text):
                self._held.appendleft(TextPiece(piece.text[count:], piece.depth))


class _StopString:
    """How much of a stop string the text ends with: the longest beginning of it that is not all of it."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_read = 0
        # Of the first n characters, how many they both begin and end with, but for all n: what is left of a beginning
        # that does not go on (Knuth, Morris and Pratt).
        self._borders = [0]
        for character in string:
            self._borders.append(self._longer(self._borders[-1], character) if len(self._borders) > 1 else 0)

    def read(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        self.num_read = self._longer(self.num_read, character)
        if self.num_read < len(self.string):
            return False
        self.num_read = self._borders[-1]
        return True

    def _longer(self, count: int, character: str) -> int:
        """How many characters of the stop string the text ends with, if it was `count` before this one."""
        while count and self.string[count] != character:
            count = self._borders[count]
        return count + (self.string[count] == character)
