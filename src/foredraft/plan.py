"""What the scheduler asks of the runner for one step, and what comes back: immutable records, no behaviour.

Those made anew for every request in every step are named tuples, which cost half as much as frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from foredraft.exactness import ExactRows
from foredraft.logprobs import TokenLogprob
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason, first_stop

if TYPE_CHECKING:  # it brings torch, which `foredraft --help` does not need
    from foredraft.media import Media


class CopyKind(Enum):
    """Where a copied block comes from, and where it goes."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"
    ON_DEVICE = "on device"


@dataclass(frozen=True)
class BlockCopy:
    """All rows of one block of a cache group are copied to another block."""

    group: int
    source: int
    destination: int
    kind: CopyKind


class WindowPlan(NamedTuple):
    """The rows that the MTP modules run over for one request.

    The window starts at row `start` (s) and ends at `end` where no token is sampled. Where one is, verification moves
    both: accepted drafts make more rows exact, so that it may start later, and it ends before the newest token; `depth`
    tokens are drafted there.
    token_ids: the committed tokens t[s+1], t[s+2], ... as far as the passes may read them.
    exact: pass k writes rows from num_exact_rows[k-1] on; earlier ones are computed for their output only.
    depth: how many passes to run.
    """

    start: int
    end: int
    token_ids: tuple[int, ...]
    exact: ExactRows
    depth: int


@dataclass(frozen=True)
class RequestTerms:
    """What does not change while a request runs.

    max_total_tokens: where its sequence ends at the latest. bad_words: all of them as token ids. num_prompt_logprobs:
    as asked, or for an echo with log-probabilities. arrival tells it from another request to which its id was given
    since. media: what the prompt shows, with the ids of its rows (`foredraft.media.row_ids`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_token_ids: frozenset[int]
    arrival: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int | None = None
    media: tuple[Media, ...] = ()
    media_row_ids: tuple[int, ...] | None = None

    @property
    def row_ids(self) -> tuple[int, ...]:
        """What the rows of the prompt go by: its tokens, or ids of media where those are placeholders."""
        return self.prompt_token_ids if self.media_row_ids is None else self.media_row_ids

    def first_stop(self, new_token_ids: Sequence[int], num_tokens: int) -> tuple[int, FinishReason | None]:
        """How many of `new_token_ids` to keep after the first `num_tokens`, and why the request ends there, if it does.

        Stop strings are not looked for here.
        """
        return first_stop(new_token_ids, num_tokens, self.max_total_tokens, self.stop_token_ids)


class RequestPlan(NamedTuple):
    """One request's share of a step.

    The target runs on rows first_row .. first_row + len(token_ids) - 1; the last num_draft_tokens of token_ids are
    pending drafts. `is_sampling` says that the rows reach the newest committed token, so that tokens are emitted.
    Without token_ids, all rows are cached, and the token follows from the newest row's hidden state (h0).
    num_tokens: n before the step. blocks: a block table for each cache group. num_state_rows: how many rows the states
    of recurrent layers have seen.
    """

    terms: RequestTerms
    token_ids: tuple[int, ...]
    first_row: int
    num_draft_tokens: int
    num_tokens: int
    is_sampling: bool
    blocks: tuple[tuple[int, ...], ...]
    window: WindowPlan | None
    num_state_rows: int = 0

    @property
    def next_state_rows(self) -> int:
        """How many they have seen after the step: all of committed tokens that are computed by then."""
        if not self.token_ids:
            return self.num_state_rows
        return min(self.num_tokens, self.first_row + len(self.token_ids))

    @property
    def request_id(self) -> str:
        return self.terms.request_id

    @property
    def params(self) -> SamplingParams:
        return self.terms.params

    @property
    def seed(self) -> int:
        return self.terms.seed


@dataclass(frozen=True)
class StepPlan:
    """One step: every request in it, decodes and prefill chunks alike. `copies` come before all else, in order."""

    requests: tuple[RequestPlan, ...]
    copies: tuple[BlockCopy, ...] = ()


class AheadRequest(NamedTuple):
    """One request's share of a decode step that is planned before the outcome of the one before it is known.

    blocks: room for the most rows that both may compute. num_drafts: the most drafts that are verified; depth: how many
    are made then, where the sequence leaves room for them.
    """

    terms: RequestTerms
    blocks: tuple[tuple[int, ...], ...]
    num_drafts: int
    depth: int


@dataclass(frozen=True)
class AheadPlan:
    """A decode step of requests that are all in the step under way. Once that has been committed, the scheduler says
    what plan this has become."""

    requests: tuple[AheadRequest, ...]


class RequestResult(NamedTuple):
    """What a step did for one request: `token_ids` accepted drafts first, then one token of the target's own.

    Empty where nothing was sampled. `draft_token_ids` are the new pending drafts; as many modules have run.
    logprobs: one for each of token_ids, where they were asked for. prompt_logprobs: those of the whole prompt, with the
    step that completes it. error: why no token could be chosen; the request ends. is_broken: rows of this step are none
    that others may share.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str | None = None
    is_broken: bool = False

    @classmethod
    def broken(cls, request_id: str) -> RequestResult:
        """The step has computed rows that are not finite."""
        return cls(request_id, error="the model's output is not finite (NaN or infinity)", is_broken=True)

    @property
    def num_accepted(self) -> int:
        """An error ends the request after drafts alone."""
        return len(self.token_ids) if self.error is not None else max(0, len(self.token_ids) - 1)


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a step spent in each part of the runner.

    Grammar masks are made within verification and drafting; their time is also given alone, with their number.
    """

    target: float = 0.0
    verification: float = 0.0
    drafting: float = 0.0
    masks: float = 0.0
    num_masks: int = 0

    def plus(self, other: StepTimes) -> StepTimes:
        """The times of two parts of one step."""
        return StepTimes(
            self.target + other.target,
            self.verification + other.verification,
            self.drafting + other.drafting,
            self.masks + other.masks,
            self.num_masks + other.num_masks,
        )


@dataclass(frozen=True)
class StepResult:
    """The outcome of a `StepPlan`, in the same order."""

    requests: tuple[RequestResult, ...]
    times: StepTimes
