"""Any history of sharing, losing, keeping and regaining cached blocks leaves them right (see `cache_machine`).

Deliberate faults show that the machine notices what it is there for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from cache_machine import BLOCK, CacheMachine
from cold import BUILDERS, MAX_LEN, MAX_NEW_TOKENS
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from foredraft.cache.block_tables import BlockTables
from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_index import PartKey
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.exactness import ExactRows
from foredraft.plan import BlockCopy, CopyKind
from foredraft.request import Request
from foredraft.runner.model_runner import ModelRunner

MACHINE = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
NUM_WALKS = 8
EVENTS = {
    "hit",
    "module hit",
    "partial module hit",
    "wholly cached",
    "preempted and hit",
    "shared live block",
    "dedup",
    "eviction",
    "spill",
    "restore",
    "hit after a restart",
    "module hit after a restart",
}
EVENTS_OF_KIND = {
    "llama": {"renewed", "deeper module hit"},
    "mistral": {"restarted at an origin"},
    "qwen2": {"restarted at an origin"},
    "mixed": {"restarted at an origin", "deeper module hit"},
    "glm4_moe": set[str](),
}


def machine_of(kind: str) -> type[CacheMachine]:
    return type("Machine", (CacheMachine,), {"kind": kind, "happened": Counter[str]()})


@pytest.mark.parametrize("kind", BUILDERS)
def test_cached_blocks_are_right_after_any_history(kind: str) -> None:
    run_state_machine_as_test(machine_of(kind), settings=MACHINE)


@pytest.mark.parametrize("kind", BUILDERS)
def test_cached_blocks_are_right_on_long_walks(kind: str) -> None:
    """Hypothesis prefers short histories; these are long, and together they meet all that a history can hold."""
    machine = machine_of(kind)
    walks(machine)
    missing = (EVENTS | EVENTS_OF_KIND[kind]) - set(+machine.happened)
    assert not missing, dict(machine.happened)


def walks(machine: type[CacheMachine]) -> None:
    for seed in range(NUM_WALKS):
        walk(machine(), seed)


def walk(machine: CacheMachine, seed: int) -> None:
    """A long history, in which what is asked for is likely to be cached."""
    chance = random.Random(seed)
    machine.start(
        num_blocks=chance.randint(8, 20),
        max_num_seqs=chance.randint(2, 3),
        budget=chance.randint(10, 20),
        num_host_blocks=chance.choice((0, 12, 40)),
        policy=chance.choice(("fcfs", "priority")),
    )
    events: list[tuple[float, Callable[[CacheMachine], object], Callable[[CacheMachine, random.Random], None]]] = [
        (6, CacheMachine.has_room, add),
        (4, lambda m: m.has_room() and m.earlier, lambda m, c: m.next_turn(c.randint(0, 4), tail(c), depth(c))),
        (2, lambda m: m.has_room() and m.running(), lambda m, c: m.fork(c.randint(0, 3), depth(c))),
        (12, CacheMachine.requests, lambda m, c: m.steps([c.randint(0, 3) for _ in range(c.randint(1, 3))])),
        (3, CacheMachine.requests, lambda m, c: m.finish(c.randint(0, 4), c.randint(0, 3))),
        (5, CacheMachine.requests, lambda m, c: m.change_depth(c.randint(0, 4), c.choice((0, 1, 2, 3, 3, 3)))),
        (3, shallow, lambda m, c: m.change_depth(m.requests().index(shallow(m)[0]), m.max_depth)),
        (2, CacheMachine.running, lambda m, c: m.preempt(c.randint(0, 3))),
        (1, CacheMachine.requests, lambda m, c: m.abort(c.randint(0, 4))),
        (1, CacheMachine.has_room, lambda m, c: m.squeeze(depth(c), c.randint(1, 3))),
        (1, lambda m: m.directory, lambda m, c: m.restart()),
        (0.15, lambda m: True, lambda m, c: m.reset()),
    ]
    try:
        for _ in range(60):
            possible = [(weight, event) for weight, is_possible, event in events if is_possible(machine)]
            (event,) = chance.choices([event for _, event in possible], [weight for weight, _ in possible])
            event(machine, chance)
            machine.check()
        machine.teardown()
    finally:
        machine.clean_up()


def shallow(machine: CacheMachine) -> list[Request]:
    """Requests whose rows may be published before they ask for more modules."""
    return [request for request in machine.running() if 0 < request.max_depth < machine.max_depth]


def add(machine: CacheMachine, chance: random.Random) -> None:
    machine.add(
        source=chance.randint(0, 9),
        length=chance.choice((chance.randint(0, MAX_LEN), BLOCK * chance.randint(1, 9))),
        tail=tail(chance),
        depth=depth(chance),
        salt=chance.choice((None, None, None, "x")),
        priority=chance.randint(-1, 1),
        max_tokens=chance.choice((1, 3, MAX_NEW_TOKENS, MAX_NEW_TOKENS)),
    )


def tail(chance: random.Random) -> list[int]:
    return [chance.randrange(4) for _ in range(chance.randint(0, 5))]


def depth(chance: random.Random) -> int:
    return chance.choice((0, 1, 1, 1, 2, 3, 3))


# -- faults ----------------------------------------------------------------------------------------------------------


def assert_noticed(message: str, kind: str = "llama") -> None:
    """Some walk fails, and says so."""
    with pytest.raises(AssertionError, match=message):
        walks(machine_of(kind))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_writing_a_shared_block_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_renewed(self: CacheManager, request_id: str, first_row: int, *, keep_before: bool) -> int:
        return first_row // self.block_size * self.block_size

    monkeypatch.setattr(CacheManager, "renew_modules", not_renewed)
    assert_noticed("a published block has changed on the device|rows that others may not have written", kind)


def test_publishing_a_module_block_one_row_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = CacheManager.publish

    def early(
        self: CacheManager, request_id: str, tokens: Sequence[int], rows: int, exact: ExactRows, depth: int, states: int
    ) -> None:
        counts = tuple(min(count + 1, rows) for count in exact.num_exact_rows)
        publish(
            self, request_id, tokens, rows, ExactRows(counts, exact.cycle, exact.origin, exact.kept_from), depth, states
        )

    monkeypatch.setattr(CacheManager, "publish", early)
    assert_noticed("a wrong row is published")


def test_publishing_a_module_block_with_a_token_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = CacheManager._offer

    def short(self: CacheManager, tables: BlockTables, group: int, index: int, key: PartKey) -> None:
        offer(self, tables, group, index, (group, key[1][:-1]))

    monkeypatch.setattr(CacheManager, "_offer", short)
    assert_noticed("rows that others may not have written")


def test_ignoring_the_salt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    match = CacheManager.match

    def any_salt(self: CacheManager, token_ids: Sequence[int], salt: str | None, module_depth: int) -> PrefixMatch:
        return match(self, token_ids, None, module_depth)

    monkeypatch.setattr(CacheManager, "match", any_salt)
    assert_noticed("more is found than was left|the block of another prefix")


@pytest.mark.parametrize(("to_host", "place"), [(True, "host"), (False, "device")])
def test_a_copy_of_the_wrong_block_is_noticed(to_host: bool, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_blocks = ModelRunner.copy_blocks

    def wrong(self: ModelRunner, copies: Sequence[BlockCopy], **options: Any) -> None:
        kind = CopyKind.TO_HOST if to_host else CopyKind.TO_DEVICE
        shifted = [replace(c, source=max(1, c.source - 1)) if c.kind is kind else c for c in copies]
        copy_blocks(self, shifted, **options)

    monkeypatch.setattr(ModelRunner, "copy_blocks", wrong)
    assert_noticed(f"a published block has changed on the {place}")


def test_bringing_a_block_back_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of a plan are made after its forward passes."""
    execute = ModelRunner.execute

    def late(self: ModelRunner, plan: Any) -> Any:
        result = execute(self, replace(plan, copies=()))
        self.copy_blocks(plan.copies)
        return result

    monkeypatch.setattr(ModelRunner, "execute", late)
    assert_noticed("a published block has changed|other tokens than alone|a wrong row is published")


def test_giving_a_shared_block_back_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CacheManager.release

    def twice(self: CacheManager, request_id: str) -> None:
        tables: tuple[tuple[int, ...], ...] = ()
        with suppress(KeyError):
            tables = self.block_tables(request_id)
        release(self, request_id)
        for pool, blocks in zip(self.pools, tables):
            pool.release(block for block in blocks if block and not pool.is_free(block))

    monkeypatch.setattr(CacheManager, "release", twice)
    assert_noticed("references .* differ from owners")
