"""One engine on tiny random weights, replayed step by step, and the oracles that every replay is held against.

1. Drafts change nothing, and 3. neither do company, cached rows, chunks and preemptions: `Replay.assert_right` compares
   with transformers alone, one sequence at a time, without drafts, without a cache.
2. A stream adds up to what is returned at once: `assert_streams_alike`.
4. All blocks are free again at the end, and no count is negative: `Replay.assert_drained`.
5. The next good request is served: `Replay.assert_serves`.

Beyond those, `Replay.assert_drafts_right` compares every draft with transformers' MTP layers over the whole history,
and in every step of every replay it is checked what the forwards read and where they write.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference import Checkpoint, RecordingDrafter
from scripted import ScriptedDrafter, held_rows
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.cache.block_pool import RESERVED_BLOCK
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.attention import PagedAttention
from foredraft.outputs import RequestOutput
from foredraft.plan import RequestPlan, StepPlan, StepResult
from foredraft.request import Request, RequestStatus
from foredraft.sampling.sampler import SamplingTensors
from foredraft.sampling.sampling_state import SamplingState
from foredraft.scheduler.scheduler import Committed
from foredraft.speculation.drafter import Drafts, Window

VOCAB_SIZE = 64
BLOCK = 4
ALL_RIGHT = 99


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def full_blocks(num_rows: int) -> int:
    """How many of so many rows lie in full blocks."""
    return num_rows // BLOCK * BLOCK


def num_blocks_for(num_rows: int) -> int:
    return -(-num_rows // BLOCK)


@dataclass(frozen=True)
class Forward:
    """One forward pass: module None is the target; slots: by cache group, where each row was written.

    run: how many calls of the drafter came before.
    """

    run: int
    module: int | None
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: dict[int, tuple[int, ...]]


class ReplayDrafter(RecordingDrafter):
    """Drafts as the script says, or (without a continuation) what the modules choose; keeps what all forwards read.

    scripts: by request id, how many drafts are right in each cycle; after its end `num_right` counts.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scripts: dict[str, Iterator[int]] = {}
        self.forwards: list[Forward] = []
        self._num_runs = 0
        self._watch_target()
        self._watch_modules()

    def _watch_target(self) -> None:
        forward, layout = self._target.forward, self._storage.layout

        def watched(token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
            slots = {group: paged.rows[layer].slots for layer, group in enumerate(layout.group_of_layer)}
            self._keep(None, token_ids, positions, slots)
            return forward(token_ids, positions, paged)

        self._target.forward = watched  # type: ignore[method-assign]

    def _watch_modules(self) -> None:
        forward, layout = self.modules.forward, self._storage.layout

        def watched(module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention) -> Tensor:
            slots = {layout.group_of_module[module]: paged.rows[module].slots}
            self._keep(module, token_ids, positions, slots)
            return forward(module, token_ids, positions, hidden, paged)

        self.modules.forward = watched  # type: ignore[method-assign]

    def _keep(self, module: int | None, token_ids: Tensor, positions: Tensor, slots: dict[int, Tensor]) -> None:
        written = {group: tuple(rows.tolist()) for group, rows in slots.items()}
        tokens = tuple(token_ids.tolist())
        self.forwards.append(Forward(self._num_runs, module, tokens, tuple(positions.tolist()), written))

    def run(
        self, windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
    ) -> Drafts:
        for window in windows:
            if window.num_drafts and (script := self.scripts.get(window.request_id)) is not None:
                self.num_right[window.request_id] = next(script, ALL_RIGHT)
        drafts = ScriptedDrafter.run(self, windows, sampling, rules)
        self._num_runs += 1
        return drafts


class Replay:
    """An engine with blocks of 4 rows, whose requests are drafted their own continuation.

    plans: of every step; `free_at_start`: free blocks of each cache group.
    """

    def __init__(self, checkpoint: Checkpoint, depth: int, *, eos_token_id: int | None = None, **settings: Any) -> None:
        settings = {"block_size": BLOCK, "num_blocks": 64, "max_num_seqs": 4} | settings
        settings.setdefault("max_model_len", min(256, (settings["num_blocks"] - 1) * settings["block_size"]))
        config = EngineConfig(num_speculative_tokens=depth, **settings)
        eos = frozenset() if eos_token_id is None else frozenset([eos_token_id])
        drafters: list[ReplayDrafter] = []

        def make(*args: Any) -> ReplayDrafter:
            drafters.append(ReplayDrafter(*args))
            return drafters[0]

        loaded = dataclasses.replace(checkpoint.loaded, eos_token_ids=eos)
        self.reference = checkpoint.reference
        self.engine: Engine = build_engine(loaded, config, make)
        self.drafter = drafters[0]
        self.plans: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.free_at_start = self.num_free_blocks()
        self._watch_plans()
        self._watch_writes()

    def _watch_plans(self) -> None:
        plan = self.engine.scheduler.plan

        def watched() -> StepPlan:
            self.plans.append(plan())
            return self.plans[-1]

        self.engine.scheduler.plan = watched  # type: ignore[method-assign]

    def _watch_writes(self) -> None:
        execute = self.engine.runner.execute

        def watched(plan: StepPlan) -> StepResult:
            first = len(self.drafter.forwards)
            result = execute(plan)
            for forward in self.drafter.forwards[first:]:
                self._assert_writes_are_own(plan, forward)
            return result

        self.engine.runner.execute = watched  # type: ignore[method-assign]

    def _assert_writes_are_own(self, plan: StepPlan, forward: Forward) -> None:
        """Inputs are tokens and positions of the model. A row goes to the block that its request holds there, which
        nobody can find yet; of the modules' rows, those that count already go to the reserved block."""
        assert all(0 <= token_id < VOCAB_SIZE for token_id in forward.token_ids)
        assert all(0 <= position < self.engine.limits.max_model_len for position in forward.positions)
        pools, size = self.engine.cache.pools, self.engine.cache.block_size
        for group, slots in forward.slots.items():
            own = {block for request in plan.requests for block in request.blocks[group]} - {RESERVED_BLOCK}
            for slot in slots:
                block = slot // size
                if forward.module is None or block != RESERVED_BLOCK:
                    assert block in own
                    assert pools[group].contents[block] is None
            if forward.module is None:
                rows = [
                    request.blocks[group][row // size] * size + row % size
                    for request in plan.requests
                    for row in range(request.first_row, request.first_row + len(request.token_ids))
                ]
                assert list(slots) == rows

    # -- driving it ----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int | None = 12,
        *,
        num_right: int = ALL_RIGHT,
        script: Sequence[int] | None = None,
        own_drafts: bool = False,
        **params: Any,
    ) -> Request:
        """Queue a request. Drafts are right as far as `script` or `num_right` say; own_drafts: the modules choose."""
        request = self.engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, **params))
        if not own_drafts:
            num_tokens = request.max_total_tokens - len(prompt)
            continuation = self.reference.sequence(prompt, num_tokens + self.engine.limits.max_depth)
            self.drafter.continuations[name] = continuation
        self.drafter.num_right[name] = num_right
        if script is not None:
            self.drafter.scripts[name] = iter(script)
        self.requests[name] = request
        return request

    def step(self) -> list[Committed]:
        committed = self.engine.step()
        self.engine.cache.check_integrity()
        return committed

    def run(self) -> None:
        """Step until nothing is left, and see that nothing is."""
        while self.engine.has_unfinished:
            self.step()
        self.assert_drained()

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int | None = 12, **options: Any) -> Request:
        """Run one request to its end, and compare with the target alone."""
        request = self.add(name, prompt, max_tokens, **options)
        self.run()
        self.assert_right(request)
        return request

    def abort(self, name: str) -> None:
        assert self.engine.abort(name) is self.requests[name]
        self.engine.cache.check_integrity()

    # -- what can be seen ----------------------------------------------------------------------------------------------

    def num_free_blocks(self) -> list[int]:
        return [pool.num_free_blocks for pool in self.engine.cache.pools]

    def num_cached_rows(self, token_ids: Sequence[int], salt: str | None = None) -> int:
        """How many target rows a request for these tokens would find."""
        return self.engine.cache.match(token_ids, salt, 0).num_rows

    def plans_of(self, name: str) -> list[RequestPlan]:
        """The request's share of every step in which it had one."""
        return [plan for step in self.plans for plan in step.requests if plan.request_id == name]

    def windows_of(self, name: str) -> list[Window]:
        return [window for window, _ in self.drafter.seen if window.request_id == name]

    def drafts_of(self, name: str) -> list[tuple[int, ...]]:
        """The drafts of every cycle."""
        return [drafts for window, drafts in self.drafter.seen if window.request_id == name and drafts]

    def counted_rows(self, request: Request) -> list[tuple[int, Tensor]]:
        """All rows of a running request that count: of each target layer and of h0 those below c, of module k those
        below E_k. For each, the first row that is held, and the rows from there on."""
        storage, name = self.engine.runner.storage, request.request_id
        layout, computed = storage.layout, request.num_computed_tokens
        parts = [(group, computed, [kv.key, kv.value]) for group, kv in zip(layout.group_of_layer, storage.target)]
        parts.append((layout.hidden_group, computed, [storage.hidden]))
        for group, count, kv in zip(layout.group_of_module, request.exact.num_exact_rows, storage.modules):
            parts.append((group, count, [kv.key, kv.value]))
        found = []
        for group, end, tensors in parts:
            first, slots = held_rows(self.engine, name, group, end)
            found.append((first, torch.cat([tensor[slots] for tensor in tensors], dim=1)))
        return found

    # -- the oracles ---------------------------------------------------------------------------------------------------

    def assert_right(self, request: Request) -> None:
        """The tokens are the target's own; as many as asked for, or up to a stop token, or so far."""
        assert request.status is not RequestStatus.WAITING
        count = len(request.output_token_ids)
        expected = self.reference.sequence(request.prompt_token_ids, count)
        assert request.token_ids == expected[: request.num_tokens]
        if request.finish_reason == "length":
            assert request.num_tokens == request.max_total_tokens
        if request.finish_reason == "stop":
            assert request.token_ids[-1] in request.stop_token_ids

    def assert_drafts_right(self, *names: str) -> None:
        """Every draft of the requests (none named: of all) was, or would have been, that of transformers' layers."""
        chosen = names or tuple(self.requests)
        seen, logits = self.drafter.seen, self.drafter.logits
        self.drafter.seen = [(window, drafts) for window, drafts in seen if window.request_id in chosen]
        self.drafter.logits = {key: value for key, value in logits.items() if key[0] in chosen}
        self.drafter.assert_equals(self.reference, {name: self.requests[name].token_ids for name in chosen})
        self.drafter.seen, self.drafter.logits = seen, logits

    def assert_drained(self) -> None:
        assert not self.engine.has_unfinished
        assert self.engine.scheduler.unfinished_ids == []
        self.engine.cache.check_integrity()
        assert self.num_free_blocks() == self.free_at_start
        assert all(count >= 0 for count in self.counts())

    def counts(self) -> list[float]:
        """Every count and time of the engine's statistics."""
        totals = dataclasses.asdict(self.engine.stats)
        del totals["verification"]  # a name
        speculation = totals.pop("speculation")
        by_depth = itertools.chain(speculation.pop("drafted_by_depth"), speculation.pop("accepted_by_depth"))
        return [*totals.values(), *speculation.values(), *by_depth]

    def assert_serves(self) -> None:
        """A plain request is served, now."""
        request = self.add(f"next-{len(self.requests)}", random_prompt(7, seed=99), 9)
        while request.finish_reason is None:
            self.step()
        assert request.finish_reason == "length"
        self.assert_right(request)


def assert_unchanged(before: Sequence[tuple[int, Tensor]], after: Sequence[tuple[int, Tensor]]) -> None:
    """Rows that counted and are still held are the same bits; none that is there no more than `before` is missed."""
    for (old_first, old), (new_first, new) in zip(before, after, strict=True):
        assert old_first <= new_first
        assert new_first + len(new) >= old_first + len(old)
        kept = old[new_first - old_first :]
        assert torch.equal(kept, new[: len(kept)])


def assert_streams_alike(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """A stream's chunks add up to its own output, and that is the one that `generate` returns."""
    llm.reset_prefix_cache()
    (whole,) = llm.generate([list(prompt)], params)
    llm.reset_prefix_cache()
    chunks = list(llm.stream(prompt, params))
    assert [chunk.output for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    output = chunks[-1].output
    assert output is not None
    assert dataclasses.replace(output, request_id=whole.request_id) == whole
    assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text
    return whole
