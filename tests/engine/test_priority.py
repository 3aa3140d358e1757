"""Who runs first, who gives way, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from reference import Checkpoint
from scripted import finish, scripted_engine

from foredraft.config import EngineConfig
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError, RequestError
from foredraft.request import Request, RequestStatus
from foredraft.sampling_params import SamplingParams
from foredraft.scheduler.queue import MAX_OVERTAKEN


class Office:
    """An engine that notes in which order requests first start, and end."""

    def __init__(self, checkpoint: Checkpoint, policy: str, *, max_num_seqs: int = 1, num_blocks: int = 32) -> None:
        config = EngineConfig(
            num_speculative_tokens=2,
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            scheduling_policy=policy,  # type: ignore[arg-type]
        )
        self.reference = checkpoint.reference
        self.engine: Engine
        self.engine, self.drafter = scripted_engine(checkpoint.loaded, config)
        self.started: list[str] = []
        self.all: list[Request] = []

    def add(self, name: str, priority: int = 0, length: int = 9, max_tokens: int = 6) -> Request:
        generator = torch.Generator().manual_seed(len(self.all))
        prompt = torch.randint(64, (length,), generator=generator).tolist()
        self.drafter.continuations[name] = self.reference.sequence(prompt, max_tokens + 2)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, priority=priority)
        self.all.append(self.engine.add_request(name, prompt, params))
        return self.all[-1]

    def step(self) -> None:
        self.engine.step()
        self.engine.cache.check_integrity()
        self.note()

    def note(self) -> None:
        self.started += [
            r.request_id for r in self.all if r.num_cached_tokens is not None and r.request_id not in self.started
        ]

    def finish(self) -> None:
        finish(self.engine, self.note)
        for request in self.all:
            assert request.token_ids == self.drafter.continuations[request.request_id][: request.max_total_tokens]


@pytest.fixture
def llama(checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints("llama")


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", ["a", "b", "c", "d", "e"]), ("priority", ["a", "c", "e", "b", "d"])]
)
def test_order_of_starting(llama: Checkpoint, policy: str, expected: Sequence[str]) -> None:
    office = Office(llama, policy)
    office.add("a", 5)
    office.step()
    for name, priority in [("b", 1), ("c", -2), ("d", 3), ("e", 0)]:
        office.add(name, priority)
    office.finish()
    assert office.started == expected


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "late"), ("priority", "unimportant")])
def test_who_gives_way_when_blocks_run_out(llama: Checkpoint, policy: str, victim: str) -> None:
    office = Office(llama, policy, max_num_seqs=2, num_blocks=10)
    unimportant = office.add("unimportant", 7, max_tokens=20)
    late = office.add("late", 1, max_tokens=20)
    preempted: set[str] = set()
    while office.engine.has_unfinished:
        office.step()
        preempted |= {r.request_id for r in (unimportant, late) if r.status is RequestStatus.WAITING}
    assert preempted == {victim}
    assert office.engine.stats.num_preemptions > 0
    office.finish()


def test_a_stream_of_important_requests_does_not_starve_one_that_waits(llama: Checkpoint) -> None:
    office = Office(llama, "priority")
    patient = office.add("patient", 100, max_tokens=2)
    for number in range(2 * MAX_OVERTAKEN):
        office.add(f"important {number}", 0, max_tokens=1)
        office.step()
        if patient.status is not RequestStatus.WAITING:
            break
    assert office.started.index("patient") == MAX_OVERTAKEN
    office.finish()


def test_a_preempted_request_is_not_starved_either(llama: Checkpoint) -> None:
    office = Office(llama, "priority", max_num_seqs=2)
    patient = office.add("patient", 100, max_tokens=8)
    office.step()
    office.engine.scheduler.preempt(patient)
    for number in range(3 * MAX_OVERTAKEN):
        office.add(f"important {number}", 0, length=5, max_tokens=1)
        office.add(f"more {number}", 0, length=5, max_tokens=1)
        office.step()
        if patient.status is not RequestStatus.WAITING:
            break
    assert patient.status is not RequestStatus.WAITING
    office.finish()


def test_a_request_that_fits_only_alone_runs_alone(llama: Checkpoint) -> None:
    office = Office(llama, "fcfs", max_num_seqs=4, num_blocks=11)
    small = [office.add(f"small {number}", length=5) for number in range(3)]
    large = office.add("large", length=30, max_tokens=8)
    after = office.add("after", length=9)
    while large.status is RequestStatus.WAITING:
        office.step()
    assert all(request.status is RequestStatus.FINISHED for request in small)
    assert after.status is RequestStatus.WAITING
    office.finish()
    assert office.engine.stats.num_preemptions == 0


@pytest.mark.parametrize("priority", [1.0, True, "1", None, 2**31, -(2**31)])
def test_a_priority_that_is_no_integer_is_refused(priority: object) -> None:
    with pytest.raises(RequestError, match="priority must be"):
        SamplingParams(priority=priority)  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy must be one of fcfs, priority, not 'random'"):
        EngineConfig(scheduling_policy="random")  # type: ignore[arg-type]
