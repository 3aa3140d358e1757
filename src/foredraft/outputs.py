"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.statistics import SpeculationStats
from foredraft.stopping import FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    token_ids end with the stop token where there was one; text leaves it out. token_depths[i] is the depth at which
    token i was drafted and accepted, or 0 for the target's own. num_cached_tokens: prompt tokens that the target
    did not have to run on, because their rows were cached. `error` says why, where finish_reason is "error".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    token_depths: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    num_cached_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True)
class TextPiece:
    """Text that became certain with one token, accepted at `depth` or (0) the target's own."""

    text: str
    depth: int


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to a request. The pieces of all chunks make up the text; `output` is set in the last."""

    token_ids: tuple[int, ...]
    pieces: tuple[TextPiece, ...]
    output: RequestOutput | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)
