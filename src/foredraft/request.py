"""One request: its committed tokens, its pending drafts, and how far the target and the modules have come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from foredraft.exactness import ExactRows
from foredraft.logprobs import TokenLogprob
from foredraft.plan import RequestTerms
from foredraft.statistics import SpeculationStats
from foredraft.stopping import FinishReason


class RequestStatus(Enum):
    """Where a request is: in the queue, holding blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """State of a request. Only the scheduler changes it.

    token_ids are the committed tokens, prompt first (n of them), with ids of media in the place of placeholders;
    num_computed_tokens (c) are the rows that the target has run on; draft_token_ids are pending and survive a
    preemption, so that a request with a seed returns the same tokens whether it was preempted or not. token_depths
    holds, for each generated token, the depth at which it was drafted and accepted, or 0 for the target's own.
    max_depth is the largest that `depth` has been.
    num_cached_tokens: rows that the cache had when the request first started; num_overtaken: later arrivals that have
    started before it. logprobs: one for each generated token, if asked for; prompt_logprobs: None until they are known.
    leader: the first choice of the same prompt; this one starts when that has computed the prompt's rows.
    first_rows: by part of the cache, of a request that another engine has begun, the first row that came from there.
    """

    terms: RequestTerms
    depth: int
    exact: ExactRows
    leader: Request | None = None
    token_ids: list[int] = field(default_factory=list)
    token_depths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    draft_token_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0
    num_state_rows: int = 0
    num_cached_tokens: int | None = None
    num_overtaken: int = 0
    max_depth: int = 0
    first_rows: Mapping[str, int] = field(default_factory=dict)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        # Looked at in every step, and so kept at hand.
        self.request_id = self.terms.request_id
        self.params = self.terms.params
        self.max_total_tokens = self.terms.max_total_tokens
        self.token_ids = list(self.terms.row_ids)
        self.max_depth = self.depth

    @property
    def arrival(self) -> int:
        return self.terms.arrival

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.terms.prompt_token_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self.terms.stop_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_rows(self) -> int:
        """Rows that the target has yet to run on, pending drafts included."""
        return len(self.token_ids) + len(self.draft_token_ids) - self.num_computed_tokens

    @property
    def useful_depth(self) -> int:
        """How many drafts the next token leaves room for: the last token of a sequence is always the target's own."""
        room = self.max_total_tokens - len(self.token_ids) - 2
        return self.depth if self.depth <= room else max(0, room)

    @property
    def is_decoding(self) -> bool:
        """At most the newest token has not been through the target."""
        return self.num_computed_tokens >= len(self.token_ids) - 1

    @property
    def is_held_back(self) -> bool:
        """Whether another choice is about to compute the rows of the prompt that this one can share."""
        leader = self.leader
        if leader is None or leader.status is RequestStatus.FINISHED:
            return False
        return leader.num_tokens == len(leader.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]
