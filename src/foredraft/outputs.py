"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.logprobs import TokenLogprob
from foredraft.statistics import SpeculationStats
from foredraft.stopping import FinishReason


@dataclass(frozen=True)
class Choice:
    """One continuation of a prompt.

    token_ids end with the stop token where there was one; text leaves it out. token_depths[i] is the depth at which
    token i was drafted and accepted, or 0 for the target's own. logprobs: one for each token, if asked for. `error`
    says why, where finish_reason is "error".
    """

    index: int
    token_ids: tuple[int, ...]
    token_depths: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: its `n` choices. What belongs to a choice can be read here too, for the first one.

    num_cached_tokens: prompt tokens that the target did not have to run on, because their rows were cached.
    prompt_logprobs: one for each prompt token, if asked for; None for the first, which nothing comes before, and for
    what is shown.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def token_depths(self) -> tuple[int, ...]:
        return self.choices[0].token_depths

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.choices[0].error

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def stats(self) -> SpeculationStats:
        return self.choices[0].stats


@dataclass(frozen=True)
class TextPiece:
    """Text that became certain with one token, accepted at `depth` or (0) the target's own."""

    text: str
    depth: int


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to one choice. The pieces of a choice's chunks make up its text.

    logprobs: one for each of token_ids, if asked for. prompt_logprobs come once, with the first chunk of the first
    choice. `choice` is there with the last chunk of each choice, `output` with the last one of all.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[TextPiece, ...]
    output: RequestOutput | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: Choice | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice has ended, in its last chunk."""
        return self.choice.finish_reason if self.choice is not None else None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)
