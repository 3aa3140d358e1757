"""Runs the same requests in each way to execute steps, and says what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripted import finish

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.loader import LoadedModel
from foredraft.plan import AheadPlan, BlockCopy, CopyKind, RequestPlan
from foredraft.request import Request
from foredraft.runner.resident.decoder import Flight
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason

RESIDENT = ("synchronous", "overlapped")
EXECUTIONS = ("reference", *RESIDENT)


@dataclass(frozen=True)
class Outcome:
    """What must not depend on how steps are executed. Log-probabilities are rounded, others are whole."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    depths: tuple[int, ...]
    num_cycles: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, request: Request) -> Outcome:
        stats = request.stats
        return cls(
            tuple(request.output_token_ids),
            request.finish_reason,
            tuple(request.token_depths),
            stats.num_cycles,
            tuple(stats.drafted_by_depth),
            tuple(stats.accepted_by_depth),
            tuple(round(one.logprob, 3) for one in request.logprobs),
        )


class Bench:
    """An engine with a given execution. num_resident, num_ahead: steps launched on the device from a plan, and ahead;
    copies: the kinds of copies between blocks."""

    def __init__(self, loaded: LoadedModel, execution: str, **settings: Any) -> None:
        defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        config = EngineConfig(execution=execution, **(defaults | settings))  # type: ignore[arg-type]
        self.engine: Engine = build_engine(loaded, config)
        self.requests: dict[str, Request] = {}
        self.num_resident = self.num_ahead = 0
        self.copies: set[CopyKind] = set()
        self._watch()

    def _watch(self) -> None:
        runner = self.engine.runner
        launch, ahead, copy_blocks = runner._launch, runner.launch_ahead, runner.copy_blocks

        def watched(plans: Sequence[RequestPlan]) -> Flight:
            self.num_resident += 1
            return launch(plans)

        def watched_ahead(plan: AheadPlan) -> Flight:
            self.num_ahead += 1
            return ahead(plan)

        def watched_copies(copies: Sequence[BlockCopy], *, is_final: bool = False) -> None:
            self.copies.update(copy.kind for copy in copies)
            copy_blocks(copies, is_final=is_final)

        runner._launch, runner.launch_ahead = watched, watched_ahead  # type: ignore[method-assign]
        runner.copy_blocks = watched_copies  # type: ignore[method-assign]

    @property
    def is_under_way(self) -> bool:
        return self.engine._under_way is not None

    def add(self, name: str, prompt: Sequence[int], *, choices: int = 1, **params: Any) -> Request:
        """Add a request, whose seed is 1 if nothing else is said; returns its first choice."""
        made = SamplingParams(**({"max_tokens": 16, "seed": 1, "n": choices} | params))
        leader: Request | None = None
        for choice in range(choices):
            key = name if choice == 0 else f"{name}.{choice}"
            self.requests[key] = self.engine.add_request(key, prompt, made, choice=choice, leader=leader)
            leader = leader or self.requests[key]
        return self.requests[name]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.engine.has_unfinished:
                self.engine.step()
                self.engine.cache.check_integrity()

    def step_until_under_way(self, num_tokens: int = 1) -> None:
        """Step until all requests have so many new tokens and, where steps overlap, the next one is under way."""
        overlaps = self.engine._overlaps
        for _ in range(40):
            running = [self.engine.scheduler._requests.get(name) for name in self.requests]
            is_decoding = all(one is not None and len(one.output_token_ids) >= num_tokens for one in running)
            if is_decoding and self.is_under_way == overlaps:
                return
            self.step()
        raise AssertionError("no step was launched ahead")

    def settle(self) -> None:
        """Read what is under way, and launch nothing ahead meanwhile."""
        scheduler, plan_ahead = self.engine.scheduler, self.engine.scheduler.plan_ahead
        scheduler.plan_ahead = lambda under_way: None  # type: ignore[method-assign]
        while self.is_under_way:
            self.step()
        scheduler.plan_ahead = plan_ahead  # type: ignore[method-assign]

    def finish(self) -> None:
        finish(self.engine)
        self.assert_empty()

    def assert_empty(self) -> None:
        """No request holds anything any more."""
        assert not self.engine.has_unfinished
        self.engine.cache.check_integrity()
        assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in self.engine.cache.pools)
        resident = self.engine.runner.resident
        assert resident is None or not resident._slots

    def outcomes(self) -> dict[str, Outcome]:
        return {name: Outcome.of(request) for name, request in self.requests.items()}


def same_in_all(loaded: LoadedModel, scenario: Callable[[Bench], None], **settings: Any) -> dict[str, Bench]:
    """Run a scenario to its end in each execution; all outcomes must be equal, and those on the device run there."""
    benches: dict[str, Bench] = {}
    for execution in EXECUTIONS:
        bench = benches[execution] = Bench(loaded, execution, **settings)
        scenario(bench)
        bench.finish()
        assert bench.outcomes() == benches["reference"].outcomes(), execution
    assert benches["reference"].num_resident == 0
    assert benches["synchronous"].num_resident > 0
    assert benches["synchronous"].num_ahead == 0
    assert benches["overlapped"].num_ahead > 0
    return benches
