"""One request: its committed tokens, its pending drafts, and how far the target and the modules have come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from foredraft.exactness import ExactRows
from foredraft.plan import RequestTerms
from foredraft.sampling_params import SamplingParams
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

    token_ids are the committed tokens, prompt first (n of them); num_computed_tokens (c) are the rows that the target
    has run on; draft_token_ids are pending and survive a preemption, so that a request with a seed returns the same
    tokens whether it was preempted or not. token_depths holds, for each generated token, the depth at which it was
    drafted and accepted, or 0 for the target's own. max_depth is the largest that `depth` has been.
    num_cached_tokens: rows that the cache had when the request first started; num_overtaken: later arrivals that have
    started before it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival: int
    max_total_tokens: int
    stop_token_ids: frozenset[int]
    depth: int
    exact: ExactRows
    token_ids: list[int] = field(default_factory=list)
    token_depths: list[int] = field(default_factory=list)
    draft_token_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_overtaken: int = 0
    max_depth: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.max_depth = self.depth
        self.terms = RequestTerms(
            self.request_id, self.params, self.seed, self.max_total_tokens, self.stop_token_ids, self.arrival
        )

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
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]
