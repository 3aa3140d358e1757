"""Who comes first: the order of requests, and those that wait."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from foredraft.config import SchedulingPolicy
from foredraft.request import Request

MAX_OVERTAKEN = 64
"""How many later arrivals may start before a waiting request, whatever their priority."""


class WaitingQueue:
    """Requests that have not started, or were preempted, in the order in which they start.

    Under `priority` a lower number comes first, then the earlier arrival. A request that has been overtaken
    MAX_OVERTAKEN times comes before all that have not, so that it starts in the end under any load.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._uses_priority = policy == "priority"
        self._requests: list[Request] = []

    def order(self, request: Request) -> tuple[bool, int, int]:
        """Sort key of a request, waiting or running: who is last gives way first."""
        is_patient = request.num_overtaken < MAX_OVERTAKEN
        priority = request.params.priority if self._uses_priority and is_patient else 0
        return is_patient, priority, request.arrival

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self, *, can_share: bool) -> Request | None:
        """Who starts next. can_share: choices wait until the first of them has computed the rows of their prompt."""
        return next((r for r in self._requests if not (can_share and r.is_held_back)), None)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self.order)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    @property
    def lets_pass(self) -> bool:
        """Whether a later arrival that needs no start may run before all that wait."""
        return all(request.num_overtaken < MAX_OVERTAKEN for request in self._requests)

    def note_passed(self) -> None:
        """Such a one has come before all that wait."""
        for request in self._requests:
            request.num_overtaken += 1
        self._requests.sort(key=self.order)

    def start(self, started: Request) -> None:
        """Take a request out, and note whom it has overtaken."""
        self._requests.remove(started)
        if self._uses_priority:
            for request in self._requests:
                request.num_overtaken += request.arrival < started.arrival
            self._requests.sort(key=self.order)
