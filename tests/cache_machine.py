"""A machine that shares, loses, keeps and regains cached blocks in any order, and proves after every event that

- the books balance, and every request finds its own tokens in the blocks that it holds;
- every published part, when it is first seen, equals the rows of a fresh prefill of its tokens, and is never changed
  after that, wherever it goes: to the host, to the disk, and back;
- requests return what the same request returns alone in a cold engine, and find no more than others left behind.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from cached_parts import Part, PartName, cached_parts, part_rows, tokens_of
from cold import BUILDERS, MAX_LEN, MAX_NEW_TOKENS, cold, loaded_model
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted import scripted_engine
from torch import Tensor

from foredraft.cache.block_pool import BlockPool
from foredraft.cache.block_tables import RowDemand
from foredraft.cache.prefix_index import CachedBlock
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.config import EngineConfig, SchedulingPolicy
from foredraft.exactness import ExactRows
from foredraft.plan import BlockCopy, CopyKind, StepPlan
from foredraft.request import Request, RequestStatus
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason

BLOCK = 4
GIB = 1 << 30

prefixes = st.one_of(st.integers(0, MAX_LEN), st.sampled_from(range(BLOCK, MAX_LEN, BLOCK)))
tails = st.lists(st.integers(0, 3), max_size=5)
depths = st.sampled_from((0, 1, 1, 2, 3, 3))
salts = st.sampled_from((None, None, None, "x"))


class CacheMachine(RuleBasedStateMachine):
    """One engine after the other over the same directory, with a small pool, a small budget and a small host cache."""

    kind: ClassVar[str] = "llama"
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.integers(8, 20),
        max_num_seqs=st.integers(2, 3),
        budget=st.integers(10, 20),
        num_host_blocks=st.sampled_from((0, 4, 12, 40)),
        policy=st.sampled_from(("fcfs", "priority")),
    )
    def start(
        self, num_blocks: int, max_num_seqs: int, budget: int, num_host_blocks: int, policy: SchedulingPolicy
    ) -> None:
        self.max_depth = BUILDERS[self.kind][1]
        self.cold = cold(self.kind)
        self.max_len = min(MAX_LEN, (num_blocks - 1) * BLOCK)
        self.directory = tempfile.TemporaryDirectory() if num_host_blocks else None
        bytes_per_block = self.cold.engine.cache.layout.bytes_per_token() * BLOCK
        self.config = EngineConfig(
            num_speculative_tokens=self.max_depth,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs * (self.max_depth + 1)),
            max_model_len=self.max_len,
            scheduling_policy=policy,
            cpu_cache_gib=(num_host_blocks + 0.5) * bytes_per_block / GIB if num_host_blocks else 0.0,
            cache_dir=self.directory.name if self.directory else None,
        )
        self.num_added = 0
        self.parts: dict[PartName, Part] = {}
        self.earlier: list[Request] = []  # whose rows may be cached, latest last
        self.unpublished: set[str] = set()  # running requests from before a reset, whose rows are not to be found
        self.build()

    def build(self) -> None:
        """A new engine, and the watch over what it does."""
        self.engine, self.drafter = scripted_engine(loaded_model(self.kind), self.config)
        self.is_fresh, self.is_closing = True, False
        self.copied: set[tuple[int, int]] = set()  # device blocks that were filled from the host, since the last check
        self.handed_out: set[tuple[int, int]] = set()  # and those that were handed out
        cache, scheduler, runner = self.engine.cache, self.engine.scheduler, self.engine.runner
        plan, admit, renew, copy_blocks = scheduler.plan, cache.admit, cache.renew_modules, runner.copy_blocks

        def watched_copies(copies: Sequence[BlockCopy], **options: Any) -> None:
            self.happened.update("spill" if copy.kind is CopyKind.TO_HOST else "restore" for copy in copies)
            self.copied |= {(copy.group, copy.destination) for copy in copies if copy.kind is CopyKind.TO_DEVICE}
            copy_blocks(copies, **options)

        def watch_pool(group: int, pool: BlockPool[CachedBlock]) -> None:
            allocate = pool.allocate

            def watched_allocate(count: int) -> list[int]:
                blocks = allocate(count)
                self.handed_out |= {(group, block) for block in blocks}
                return blocks

            pool.allocate = watched_allocate  # type: ignore[method-assign]

        def watched_plan() -> StepPlan:
            self.plan = plan()
            self.happened["wholly cached"] += any(not p.token_ids for p in self.plan.requests if p.is_sampling)
            return self.plan

        def watched_admit(request_id: str, salt: str | None, match: PrefixMatch, demand: RowDemand) -> bool:
            is_admitted = admit(request_id, salt, match, demand)
            if is_admitted:
                self.note_admission(next(r for r in self.requests() if r.request_id == request_id), match)
            return is_admitted

        def watched_renew(request_id: str, first_row: int, *, keep_before: bool) -> int:
            self.happened["renewed" if keep_before else "restarted"] += 1
            self.happened["restarted at an origin"] += not keep_before and first_row > 0
            return renew(request_id, first_row, keep_before=keep_before)

        scheduler.plan = watched_plan  # type: ignore[method-assign]
        runner.copy_blocks = watched_copies  # type: ignore[method-assign]
        cache.admit, cache.renew_modules = watched_admit, watched_renew  # type: ignore[method-assign]
        for group, pool in enumerate(cache.pools):
            watch_pool(group, pool)

    def note_admission(self, request: Request, match: PrefixMatch) -> None:
        """What a hit may be, and what kind of a hit it is. The request does not know of it yet."""
        is_first = request.num_cached_tokens is None
        known = (other for other in self.earlier if other.params.cache_salt == request.params.cache_salt)
        others = [
            common_blocks(request.token_ids, other.token_ids) for other in known if not (is_first and other is request)
        ]
        self.unpublished.discard(request.request_id)
        assert match.num_rows % BLOCK == 0
        assert match.num_module_rows <= match.num_rows <= max(others, default=0), "more is found than was left"
        self.happened.update(
            name
            for name, has_happened in (
                ("hit", match.num_rows > 0),
                ("module hit", match.num_module_rows > 0),
                ("partial module hit", 0 < match.num_module_rows < match.num_rows),
                ("deeper module hit", match.module_depth > request.useful_depth),
                ("preempted and hit", not is_first and match.num_rows > 0),
                ("hit after a restart", self.is_fresh and match.num_rows > 0),
                ("module hit after a restart", self.is_fresh and match.num_module_rows > 0),
                ("restarted at an origin", match.module_origin > 0),
            )
            if has_happened
        )

    # -- events --------------------------------------------------------------------------------------------------------

    def requests(self) -> list[Request]:
        return list(self.engine.scheduler.requests())

    def running(self) -> list[Request]:
        return [request for request in self.requests() if request.status is RequestStatus.RUNNING]

    def submit(
        self,
        prompt: Sequence[int],
        depth: int,
        salt: str | None,
        priority: int = 0,
        max_tokens: int = MAX_NEW_TOKENS,
    ) -> Request:
        name = f"r{self.num_added}"
        self.num_added += 1
        prompt = tuple(prompt[: self.max_len - 2]) or (0,)
        self.drafter.continuations[name] = self.cold.sequence(prompt)
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            num_speculative_tokens=min(depth, self.max_depth),
            cache_salt=salt,
            priority=priority,
        )
        self.earlier.append(self.engine.add_request(name, prompt, params))
        return self.earlier[-1]

    def has_room(self) -> bool:
        return len(self.requests()) < 5

    @precondition(has_room)
    @rule(
        source=st.integers(0, 9),
        length=prefixes,
        tail=tails,
        depth=depths,
        salt=salts,
        priority=st.integers(-1, 1),
        max_tokens=st.sampled_from((1, 3, MAX_NEW_TOKENS, MAX_NEW_TOKENS)),
    )
    def add(
        self, source: int, length: int, tail: list[int], depth: int, salt: str | None, priority: int, max_tokens: int
    ) -> None:
        """A prompt that begins as an earlier sequence did."""
        begin = self.earlier[-1 - source % len(self.earlier)].token_ids[:length] if self.earlier else []
        self.submit([*begin, *tail], depth, salt, priority, max_tokens)

    @precondition(lambda self: self.has_room() and self.running())
    @rule(index=st.integers(0, 3), depth=depths)
    def fork(self, index: int, depth: int) -> None:
        """A request that goes on from all that a running one has so far."""
        request = self.running()[index % len(self.running())]
        self.submit(request.token_ids, depth, request.params.cache_salt)

    @precondition(lambda self: self.has_room() and self.earlier)
    @rule(source=st.integers(0, 4), tail=tails, depth=depths)
    def next_turn(self, source: int, tail: list[int], depth: int) -> None:
        """Prompt and output of a request that has ended, and a little more."""
        ended = [request for request in self.earlier if request.status is RequestStatus.FINISHED]
        if ended:
            request = ended[-1 - source % len(ended)]
            self.submit([*request.token_ids, *tail], depth, request.params.cache_salt)

    @precondition(lambda self: self.requests())
    @rule(num_right=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def steps(self, num_right: list[int]) -> None:
        for number in num_right:
            if self.requests():
                self.step(number)

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 4), num_right=st.integers(0, 3))
    def finish(self, index: int, num_right: int) -> None:
        """Until a request has ended."""
        self.run(self.requests()[index % len(self.requests())], num_right)

    def run(self, request: Request, num_right: int) -> None:
        while request.status is not RequestStatus.FINISHED:
            self.step(num_right)

    @precondition(has_room)
    @rule(depth=depths, num_requests=st.integers(1, 3))
    def squeeze(self, depth: int, num_requests: int) -> None:
        """Requests that share nothing with others take the room of what is cached."""
        for number in range(num_requests):
            prompt = [(20 + number + row) % 64 for row in range(self.max_len)]
            self.run(self.submit(prompt, depth, f"squeeze {self.num_added}", -1, max_tokens=2), 0)

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 4), depth=depths)
    def change_depth(self, index: int, depth: int) -> None:
        request = self.requests()[index % len(self.requests())]
        self.engine.set_num_speculative_tokens(request.request_id, min(depth, self.max_depth))

    @precondition(lambda self: self.running())
    @rule(index=st.integers(0, 3))
    def preempt(self, index: int) -> None:
        request = self.running()[index % len(self.running())]
        left = request.num_computed_tokens, request.exact
        self.engine.scheduler.preempt(request)
        self.check_left(request, *left)

    @precondition(lambda self: self.requests())
    @rule(index=st.integers(0, 4))
    def abort(self, index: int) -> None:
        request = self.requests()[index % len(self.requests())]
        left = request.num_computed_tokens, request.exact
        self.engine.abort(request.request_id)
        self.check_left(request, *left)

    @rule()
    def reset(self) -> None:
        """Nothing is cached any more."""
        self.engine.reset_prefix_cache()
        assert not list(self.engine.cache.cached_nodes())
        assert not any(content for pool in self.engine.cache.pools for content in pool.contents)
        self.parts.clear()
        self.earlier = self.requests()
        self.unpublished = {request.request_id for request in self.running()}

    @precondition(lambda self: self.directory is not None)
    @rule()
    def restart(self) -> None:
        """What the host holds in the end is there again in a new engine, and nothing else is."""
        requests = self.requests()
        self.is_closing = True
        self.engine.close()
        assert all(request.finish_reason is FinishReason.ABORT for request in requests)
        self.check()
        before = self.parts
        assert all(part.blocks.keys() == {"host"} for part in before.values())
        self.build()
        self.parts = {part.name: part for part in cached_parts(self.engine)}
        assert self.parts.keys() == before.keys(), "parts are lost, or come from nowhere"
        assert all(part.bytes == before[name].bytes for name, part in self.parts.items()), (
            "a part is not as it was saved"
        )
        self.happened["restart"] += 1

    def step(self, number: int) -> None:
        """One step; how many drafts are right differs between requests."""
        for index, request in enumerate(self.requests()):
            self.drafter.num_right[request.request_id] = (number + index) % (self.max_depth + 1)
        self.drafter.seen.clear()
        for update in self.engine.step():
            expected = self.drafter.continuations[update.request.request_id]
            assert tuple(update.request.token_ids) == expected[: update.request.num_tokens], "other tokens than alone"
            if update.request.finish_reason is FinishReason.LENGTH:
                assert update.request.num_tokens == update.request.max_total_tokens
        self.is_fresh = False
        self.check()

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        self.engine.cache.check_integrity()
        self.check_parts()
        self.check_counts()
        for request in self.running():
            self.check_tables(request)
        self.note_sharing()

    def check_parts(self) -> None:
        """A part is right where it appears, and stays as it is there."""
        present = {part.name: part for part in cached_parts(self.engine)}
        for name, part in present.items():
            before = self.parts.get(name)
            if before is None or before.identity is not part.identity:
                before = Part(name, part.identity, {}, {})
            for place in part.blocks:
                allowed = self.allowed(before, part, place)
                if part.bytes[place] in allowed:
                    continue
                # What requests publish in the end may go to the host at once, in place of what was there.
                assert not allowed or self.is_closing, f"a published block has changed on the {place}: {name}"
                self.check_rows(name, part_rows(self.engine, part.identity, place))
        self.happened["eviction"] += len(self.parts.keys() - present)
        self.parts = present
        self.copied.clear()
        self.handed_out.clear()

    def allowed(self, before: Part, part: Part, place: str) -> list[bytes]:
        """What a part may hold that was there before. Nothing: it was computed since."""
        block = part.identity.group, part.blocks[place]
        is_kept = part.blocks[place] == before.blocks.get(place) and block not in self.handed_out
        if place == "host" or block in self.copied:
            return list(before.bytes.values())
        return [before.bytes[place]] if is_kept else []

    def check_rows(self, name: PartName, tensors: Sequence[Tensor]) -> None:
        """The rows equal those of a fresh prefill."""
        _, path, group, continuation = name
        sequences = [self.cold.sequence(request.prompt_token_ids) for request in self.earlier]
        expected = self.cold.rows(path + continuation, sequences)[group]
        for ours, theirs in zip(tensors, expected):
            difference = (ours - theirs[len(path) - BLOCK : len(path)]).abs().max()
            assert difference <= 1e-5 * theirs[: len(path)].abs().max(), f"a wrong row is published: {name}"

    def check_left(self, request: Request, num_rows: int, exact: ExactRows) -> None:
        """All full blocks of a request that gives its own back are there to be found. (With sliding windows, what is
        left depends on where in a block it was.)"""
        cache, salt = self.engine.cache, request.params.cache_salt
        if cache.layout.has_windows or request.request_id in self.unpublished:
            return
        assert cache.match(request.token_ids, salt, 0).num_rows >= num_rows // BLOCK * BLOCK, "target rows are lost"
        num_exact = exact.num_exact_rows[0] // BLOCK * BLOCK
        assert cache.match(request.token_ids, salt, 1).num_module_rows >= num_exact, "module rows are lost"

    def check_counts(self) -> None:
        for request in self.earlier:
            cached = request.num_cached_tokens or 0
            assert 0 <= cached <= len(request.prompt_token_ids)
            assert cached % BLOCK == 0

    def check_tables(self, request: Request) -> None:
        """Published blocks in the tables of a request hold its own tokens, and what it takes for exact is in them."""
        for group, blocks in enumerate(self.engine.cache.block_tables(request.request_id)):
            contents = self.engine.cache.pools[group].contents
            for index, block in enumerate(blocks):
                part, end = contents[block], (index + 1) * BLOCK
                if part is None:
                    continue
                _, continuation = part.key
                found = part.node.salt, part.group, tokens_of(part) + continuation
                tokens = tuple(request.token_ids[: end + len(continuation)])
                assert found == (request.params.cache_salt, group, tokens), (
                    "a request holds the block of another prefix"
                )
                if group in self.engine.cache.layout.module_groups:
                    num_exact = sum(count >= end for count in request.exact.num_exact_rows)
                    assert num_exact <= len(continuation), "rows that others may not have written are taken for exact"

    def note_sharing(self) -> None:
        tables = {request.request_id: self.engine.cache.block_tables(request.request_id) for request in self.running()}
        for group in range(len(self.engine.cache.pools)):
            held = Counter(block for table in tables.values() for block in table[group] if block)
            self.happened["shared live block"] += any(count > 1 for count in held.values())
        for plan in self.plan.requests if hasattr(self, "plan") else ():
            pairs = zip(plan.blocks, tables.get(plan.request_id, ()))
            self.happened["dedup"] += any(b and a and a != b for before, after in pairs for b, a in zip(before, after))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            for request in self.requests():
                self.engine.abort(request.request_id)
            self.check()
            assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in self.engine.cache.pools)
            self.reset()
        finally:
            self.clean_up()

    def clean_up(self) -> None:
        if self.directory is not None:
            self.directory.cleanup()


def common_blocks(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many rows of leading full blocks two sequences have in common."""
    length = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return length // BLOCK * BLOCK
