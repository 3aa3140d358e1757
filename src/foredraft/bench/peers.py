"""Our engine and others in one run, each in turn: one request at a time, and many of mixed lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from rich import box
from rich.markup import escape
from rich.table import Table

from foredraft.bench.variants import Generation
from foredraft.errors import described
from foredraft.statistics import SpeculationStats


@dataclass(frozen=True)
class Job:
    """A prompt, and exactly how many tokens follow it, greedily and whatever EOS says."""

    prompt: tuple[int, ...]
    num_tokens: int


class Peer(Protocol):
    """A way to generate. Whatever it raises is reported as its failure."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def generate(self, jobs: Sequence[Job]) -> Generation:
        """Run all jobs, in any order and company; the outputs in the order of the jobs, each with all its tokens."""


@dataclass
class PeerResult:
    """Figures of one peer in one workload: an entry for each round. failure: why it takes part no more.

    num_equal: how many outputs were those of the first turn of all, of num_compared that were compared.
    """

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_equal: int = 0
    num_compared: int = 0
    failure: str | None = None

    @property
    def median_tokens_per_second(self) -> float | None:
        return median(self.tokens_per_second) if self.tokens_per_second else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.speculation.mean_acceptance_length if self.speculation.num_drafts else None


@dataclass(frozen=True)
class PeersResult:
    """Results of the peers of one workload, ours first, in their order."""

    workload: str
    peers: tuple[PeerResult, ...]

    def ratio(self, peer: PeerResult, base: PeerResult) -> float | None:
        """How many times as fast as `base`; None where one of them has no figure."""
        own, other = peer.median_tokens_per_second, base.median_tokens_per_second
        return own / other if own is not None and other is not None else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. ratios: to every peer by name."""
        return {"workload": self.workload, "peers": [self._peer_dict(peer) for peer in self.peers]}

    def _peer_dict(self, peer: PeerResult) -> dict[str, Any]:
        return {
            "name": peer.name,
            "failure": peer.failure,
            "median_tokens_per_second": peer.median_tokens_per_second,
            "ratios": {other.name: self.ratio(peer, other) for other in self.peers},
            "mean_acceptance_length": peer.mean_acceptance_length,
            "num_equal": peer.num_equal,
            "num_compared": peer.num_compared,
            "tokens_per_second": peer.tokens_per_second,
        }

    def table(self) -> Table:
        """A table that is Markdown as well; ratios are those to the first peer."""
        table = Table(self.workload, box=box.MARKDOWN)
        first = self.peers[0]
        for heading in ("tokens/s", f"x {escape(first.name)}", "mean acceptance length", "identical"):
            table.add_column(heading, justify="right")
        for peer in self.peers:
            speed, ratio, length = peer.median_tokens_per_second, self.ratio(peer, first), peer.mean_acceptance_length
            table.add_row(
                escape(peer.name),
                "" if speed is None else f"{speed:,.1f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if length is None else f"{length:.2f}",
                f"{peer.num_equal} of {peer.num_compared}" if peer.num_compared else "",
            )
        return table

    def failures(self) -> list[str]:
        """A line for each peer that failed."""
        return [f"{peer.name}: {peer.failure}" for peer in self.peers if peer.failure is not None]


def mixed_jobs(
    tokens: Sequence[int], count: int, prompt_lengths: tuple[int, int], new_tokens: tuple[int, int], seed: int = 0
) -> list[Job]:
    """Jobs of lengths drawn evenly from both ranges, ends included; the same for the same seed.

    tokens: a text that prompts are pieces of, from anywhere in it and on from its start where it ends.
    """
    draw = random.Random(seed)
    jobs = []
    for _ in range(count):
        first, length = draw.randrange(len(tokens)), draw.randint(*prompt_lengths)
        prompt = tuple(tokens[(first + index) % len(tokens)] for index in range(length))
        jobs.append(Job(prompt, draw.randint(*new_tokens)))
    return jobs


def measure_peers(
    workload: str,
    peers: Sequence[Peer],
    jobs: Sequence[Job],
    rounds: Iterable[int],
    *,
    is_compared: bool = True,
    on_turn: Callable[[PeersResult], None] = lambda result: None,
) -> PeersResult:
    """Give every peer its turn at all jobs, once for each round, in an order that rotates.

    Each warms up on all jobs before the first round. One that fails, in warming up or later, has a `failure` and takes
    no further turn; the others go on. is_compared: outputs are compared with those of the first turn that succeeds.
    on_turn is told what there is after each turn.
    """
    result = PeersResult(workload, tuple(PeerResult(peer.name) for peer in peers))
    reference: list[tuple[int, ...]] = []
    turns = list(zip(peers, result.peers))
    for number in rounds:
        if number == 0:
            for peer, own in turns:
                _generate(peer, own, jobs)
                on_turn(result)
        first = number % len(turns)
        for peer, own in (*turns[first:], *turns[:first]):
            generation = _generate(peer, own, jobs) if own.failure is None else None
            if generation is not None:
                reference = reference or generation.token_ids
                _count(own, generation, reference if is_compared else None)
            on_turn(result)
    return result


def _generate(peer: Peer, result: PeerResult, jobs: Sequence[Job]) -> Generation | None:
    """A turn; None, and a failure noted, if there is something wrong with it."""
    try:
        generation = peer.generate(jobs)
    except Exception as error:  # somebody else's: the others are still to be measured
        result.failure = described(error)
        return None
    made, wanted = [len(token_ids) for token_ids in generation.token_ids], [job.num_tokens for job in jobs]
    if made != wanted:
        result.failure = f"it made {sum(made)} tokens in {len(made)} outputs, not {sum(wanted)} in {len(wanted)}"
        return None
    return generation


def _count(result: PeerResult, generation: Generation, reference: Sequence[tuple[int, ...]] | None) -> None:
    num_tokens = sum(len(token_ids) for token_ids in generation.token_ids)
    result.tokens_per_second.append(num_tokens / generation.seconds)
    if generation.speculation is not None:
        result.speculation.add(generation.speculation)
    if reference is not None:
        result.num_equal += sum(own == first for own, first in zip(generation.token_ids, reference))
        result.num_compared += len(reference)
