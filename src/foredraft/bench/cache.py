"""What the prefix cache saves, and what it costs: first tokens, the prefix index, the scheduler's share of a step."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, cycle, islice
from random import Random
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from foredraft import LLM, RequestOutput, SamplingParams
from foredraft.cache.block_tables import RowDemand
from foredraft.cache.groups import CacheLayout, KVShape, StoredRows
from foredraft.cache.manager import CacheManager
from foredraft.errors import ConfigError, ForedraftError
from foredraft.exactness import ExactRows
from foredraft.plan import RequestResult, RequestTerms, StepPlan, StepResult, StepTimes
from foredraft.request import Request
from foredraft.scheduler.scheduler import Committed, Scheduler, SchedulerLimits

CASES = ("nothing", "the prefix", "the whole prompt")
"""How much of a prompt is cached when it comes."""

NUM_MORE_TOKENS = 8
"""How many tokens the trials compare beyond those that the first drafts need room for."""

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 125
INDEX_DEPTH = 3
NUM_SAMPLES = 32
"""Sequences whose publishing or matching is timed at each size of the index."""

STEP_DEPTHS = (0, 3)
STEP_PROMPT_TOKENS = 500
NUM_WARM_UP_STEPS = 5


# -- time to first token -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstTokenTimes:
    """Seconds until a request's first token was committed, for each trial of one of CASES at one depth."""

    depth: int
    case: str
    num_cached_tokens: int
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


def check_prefix(num_prefix_tokens: int, block_size: int) -> None:
    """Raise ConfigError for a prefix that fills no block."""
    if num_prefix_tokens < block_size:
        raise ConfigError(f"prefix_tokens={num_prefix_tokens} must be at least block_size={block_size}")


def shared_prefix_prompts(
    llm: LLM, text_token_ids: Sequence[int], num_prefix_tokens: int, num_prompts: int
) -> list[list[int]]:
    """Prompts that differ from the first token after a common prefix on, and that whole blocks hold to their end.

    They are text, repeated as often as needed, but for the token that differs: one of the last of the vocabulary.
    """
    block_size, vocab_size = llm.config.block_size, llm.engine.limits.vocab_size
    check_prefix(num_prefix_tokens, block_size)
    if num_prompts > vocab_size:
        raise ConfigError(f"repeats={num_prompts} is more than the {vocab_size} token ids that tell prompts apart")
    num_tokens = (num_prefix_tokens // block_size + 1) * block_size
    text = list(islice(cycle(text_token_ids), num_tokens - 1))
    prefix, rest = text[:num_prefix_tokens], text[num_prefix_tokens:]
    return [[*prefix, vocab_size - 1 - index, *rest] for index in range(num_prompts)]


class FirstTokenTrials:
    """Runs prompts with a common prefix, and refuses a trial that is not what it is meant to measure."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], num_prefix_tokens: int) -> None:
        block_size, max_depth = llm.config.block_size, llm.engine.limits.max_depth
        self.depths = sorted({0, max_depth})
        self._llm = llm
        self._prompts = prompts
        self._num_cached = dict(zip(CASES, (0, num_prefix_tokens // block_size * block_size, len(prompts[0]))))
        self._num_tokens = max_depth + NUM_MORE_TOKENS
        self._seconds: dict[tuple[int, str], list[float]] = {(d, case): [] for d in self.depths for case in CASES}
        self._expected: dict[int, tuple[str, tuple[int, ...]]] = {}
        wanted, longest = len(prompts[0]) + self._num_tokens, llm.engine.limits.max_model_len
        if wanted > longest:
            raise ConfigError(
                f"prompts and new tokens are {wanted} tokens; max_model_len={longest}: lower prefix_tokens"
            )

    def warm_up(self) -> None:
        """Run the first prompt once at each depth."""
        for depth in self.depths:
            self._llm.generate([self._prompts[0]], self._params(depth))

    def take_turn(self, index: int) -> None:
        """One trial of each kind. The prefix that the second finds is what the first, another prompt, left."""
        first = index % len(self.depths)
        following = (index + 1) % len(self._prompts)
        for depth in (*self.depths[first:], *self.depths[:first]):
            self._llm.reset_prefix_cache()
            for case, number in zip(CASES, (index, following, following)):
                self._try(depth, case, number)

    def times(self) -> tuple[FirstTokenTimes, ...]:
        """All that was measured so far."""
        return tuple(
            FirstTokenTimes(depth, case, self._num_cached[case], tuple(seconds))
            for (depth, case), seconds in self._seconds.items()
        )

    def _try(self, depth: int, case: str, number: int) -> None:
        seconds, output = time_first_token(self._llm, self._prompts[number], self._params(depth))
        name = f"prompt {number} with {case} cached, K={depth}"
        if output.num_cached_tokens != self._num_cached[case]:
            raise ForedraftError(
                f"{name}: {output.num_cached_tokens} tokens were cached instead of {self._num_cached[case]}: "
                f"is prefix caching on, and does the cache hold the prompts?"
            )
        earlier, token_ids = self._expected.setdefault(number, (name, output.token_ids))
        if output.token_ids != token_ids or len(token_ids) != self._num_tokens:
            raise ForedraftError(
                f"{name}: the new tokens are {list(output.token_ids)}, not the {self._num_tokens} of {earlier}, "
                f"{list(token_ids)}; rounding alone may do that, if dtype is not float32"
            )
        self._seconds[depth, case].append(seconds)

    def _params(self, depth: int) -> SamplingParams:
        return SamplingParams(max_tokens=self._num_tokens, ignore_eos=True, num_speculative_tokens=depth)


def time_first_token(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, RequestOutput]:
    """Run one request to its end: seconds until the step that committed its first token was over, and its output."""
    started = time.perf_counter()
    chunks = llm.stream(prompt, params)
    first = next(chunks)
    seconds = time.perf_counter() - started
    *_, last = first, *chunks
    assert last.output is not None
    return seconds, last.output


def measure_first_token(
    llm: LLM, prompts: Sequence[list[int]], num_prefix_tokens: int, turns: Iterable[int]
) -> tuple[FirstTokenTimes, ...]:
    """Times of CASES without drafts and at the engine's largest depth, which take turns.

    prompts: at least two, as `shared_prefix_prompts` makes them; turns: their numbers, from 0 on. Raises ForedraftError
    if a trial found other than it should in the cache, or if not all trials of a prompt gave the same tokens.
    """
    trials = FirstTokenTrials(llm, prompts, num_prefix_tokens)
    trials.warm_up()
    for index in turns:
        trials.take_turn(index)
    return trials.times()


# -- the prefix index --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexCost:
    """Median microseconds with `num_blocks` blocks cached: for a block to publish or to find, for a sequence to miss.

    A block is one of the target's rows and one of the modules'. A sequence that is not cached costs no more than the
    look for its first block.
    """

    num_blocks: int
    publish_microseconds_per_block: float
    match_microseconds_per_block: float
    miss_microseconds: float


class IndexTrials:
    """A cache manager without tensors, full of sequences of BLOCKS_PER_SEQUENCE blocks; a new one evicts the oldest."""

    def __init__(self, num_sequences: int) -> None:
        self.num_blocks = num_sequences * BLOCKS_PER_SEQUENCE
        self._cache = _new_cache(INDEX_DEPTH, self.num_blocks)
        self._random = Random(num_sequences)
        self._sequences: deque[list[int]] = deque(maxlen=num_sequences)
        for _ in range(num_sequences):
            self.time_publish()

    def time_publish(self) -> float:
        """Seconds to publish a new sequence."""
        token_ids, num_rows = self._new_sequence(), BLOCKS_PER_SEQUENCE * BLOCK_SIZE
        demand = RowDemand(num_rows, num_rows, num_rows, num_rows)
        match = self._cache.match(token_ids, None, INDEX_DEPTH)
        if not self._cache.admit("sequence", None, match, demand):
            raise ForedraftError(f"a prefix index of {self.num_blocks} blocks has no room for a new sequence")
        exact = ExactRows((num_rows,) * INDEX_DEPTH)
        started = time.perf_counter()
        self._cache.publish("sequence", token_ids, num_rows, exact, INDEX_DEPTH)
        seconds = time.perf_counter() - started
        self._cache.release("sequence")
        self._sequences.append(token_ids)
        return seconds

    def time_match(self, *, is_cached: bool) -> float:
        """Seconds to look for a sequence. Raises ForedraftError if not all, or not nothing, of it is found."""
        token_ids = self._random.choice(self._sequences) if is_cached else self._new_sequence()
        started = time.perf_counter()
        match = self._cache.match(token_ids, None, INDEX_DEPTH)
        seconds = time.perf_counter() - started
        expected = BLOCKS_PER_SEQUENCE * BLOCK_SIZE if is_cached else 0
        if (match.num_rows, match.num_module_rows) != (expected, expected):
            found = f"{match.num_rows} target rows and {match.num_module_rows} module rows"
            raise ForedraftError(f"the prefix index of {self.num_blocks} blocks found {found} instead of {expected}")
        return seconds

    def _new_sequence(self) -> list[int]:
        return self._random.choices(range(1 << 15), k=BLOCKS_PER_SEQUENCE * BLOCK_SIZE + INDEX_DEPTH)


def measure_index(num_blocks: int) -> IndexCost:
    """Cost of the prefix index with about `num_blocks` blocks cached, rounded up to whole sequences."""
    gc.collect()  # what an earlier measurement left is not to be cleared away during this one
    trials = IndexTrials(-(-num_blocks // BLOCKS_PER_SEQUENCE))
    published, matched, missed = (
        1e6 * median(time_one() for _ in range(NUM_SAMPLES))
        for time_one in (
            trials.time_publish,
            lambda: trials.time_match(is_cached=True),
            lambda: trials.time_match(is_cached=False),
        )
    )
    return IndexCost(trials.num_blocks, published / BLOCKS_PER_SEQUENCE, matched / BLOCKS_PER_SEQUENCE, missed)


def _new_cache(num_modules: int, num_blocks: int) -> CacheManager:
    """Books for so many blocks of the target's rows, and of the modules' if there are any; no tensors."""
    shape = KVShape(num_kv_heads=1, key_dim=1, value_dim=1, window=None)
    layout = CacheLayout.build(StoredRows((shape,)), StoredRows((shape,) * num_modules), 1, torch.float32)
    return CacheManager(layout, [num_blocks + 1] * len(layout.groups), BLOCK_SIZE)


# -- the scheduler -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """What planning and committing cost in each steady decode step; num_tokens: what all of these steps committed."""

    num_running: int
    depth: int
    num_tokens: int
    milliseconds: tuple[float, ...]

    @property
    def median_milliseconds(self) -> float:
        return median(self.milliseconds)


class MadeUpResults:
    """Stands in for the runner: of K drafts 0, 1, ... K are accepted in turn, and no token comes twice."""

    def __init__(self) -> None:
        self._new_ids = count()
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """The results of a step in which every request samples."""
        results = []
        for index, request in enumerate(plan.requests):
            num_accepted = (self._num_steps + index) % (request.num_draft_tokens + 1)
            drafts = request.token_ids[len(request.token_ids) - request.num_draft_tokens :]
            new_drafts = tuple(islice(self._new_ids, request.window.depth if request.window is not None else 0))
            results.append(RequestResult(request.request_id, (*drafts[:num_accepted], next(self._new_ids)), new_drafts))
        self._num_steps += 1
        return StepResult(tuple(results), StepTimes())


def measure_steps(num_running: int, depth: int, num_steps: int) -> StepCost:
    """Time the scheduler alone over steady decode steps of `num_running` requests with `depth` drafts each.

    Raises ForedraftError if a request is left out of a step, or does not get the tokens made up for it.
    """
    gc.collect()
    scheduler = _new_scheduler(num_running, depth, 1 + NUM_WARM_UP_STEPS + num_steps)
    runner = MadeUpResults()
    num_tokens, milliseconds = 0, []
    for step in range(1 + NUM_WARM_UP_STEPS + num_steps):  # the first one runs all prompts
        started = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        result = runner.execute(plan)
        executed = time.perf_counter()
        committed = scheduler.commit(plan, result)
        ended = time.perf_counter()
        _check_step(plan, result, committed, num_running, depth if step else 0)
        if step > NUM_WARM_UP_STEPS:
            num_tokens += sum(len(update.token_ids) for update in committed)
            milliseconds.append(1e3 * (planned - started + ended - executed))
    return StepCost(num_running, depth, num_tokens, tuple(milliseconds))


def _check_step(
    plan: StepPlan, result: StepResult, committed: Sequence[Committed], num_running: int, num_drafts: int
) -> None:
    steady = sum(request.is_sampling and request.num_draft_tokens == num_drafts for request in plan.requests)
    if steady != num_running or steady != len(plan.requests):
        raise ForedraftError(f"{steady} of {num_running} requests decode {num_drafts} drafts in a steady step")
    if [update.token_ids for update in committed] != [outcome.token_ids for outcome in result.requests]:
        raise ForedraftError("the scheduler committed other tokens than the step made")


def _new_scheduler(num_running: int, depth: int, num_steps: int) -> Scheduler:
    """A scheduler with room for all prompts in one step, and for all that so many steps add to them."""
    longest = STEP_PROMPT_TOKENS + (num_steps + 1) * (depth + 1) + 1
    cache = _new_cache(depth, num_running * -(-longest // BLOCK_SIZE))
    scheduler = Scheduler(cache, SchedulerLimits(num_running, num_running * STEP_PROMPT_TOKENS, depth))
    random = Random(num_running)
    for arrival in range(num_running):
        request = Request(
            RequestTerms(
                request_id=f"request-{arrival}",
                prompt_token_ids=tuple(random.choices(range(1 << 15), k=STEP_PROMPT_TOKENS)),
                params=SamplingParams(max_tokens=longest - STEP_PROMPT_TOKENS, ignore_eos=True),
                seed=0,
                max_total_tokens=longest,
                stop_token_ids=frozenset(),
                arrival=arrival,
            ),
            depth=depth,
            exact=ExactRows.none(depth),
        )
        scheduler.add(request)
    return scheduler


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheResult:
    """All figures of a run."""

    num_prompt_tokens: int
    first_token: tuple[FirstTokenTimes, ...]
    index: tuple[IndexCost, ...]
    steps: tuple[StepCost, ...]

    def ratio(self, times: FirstTokenTimes) -> float:
        """How many times as long the first token takes at that depth when nothing is cached."""
        (miss,) = (other for other in self.first_token if (other.depth, other.case) == (times.depth, CASES[0]))
        return miss.median_seconds / times.median_seconds

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "first_token": [
                {"median_seconds": times.median_seconds, "ratio_to_nothing_cached": self.ratio(times), **asdict(times)}
                for times in self.first_token
            ],
            "index": [asdict(cost) for cost in self.index],
            "steps": [{"median_milliseconds": cost.median_milliseconds, **asdict(cost)} for cost in self.steps],
        }

    def tables(self) -> dict[str, Table]:
        """Tables that are Markdown as well, by what they show."""
        first_token = _table("K", "cached", "tokens cached", "ms to first token", "x sooner than with nothing cached")
        for times in self.first_token:
            milliseconds, ratio = f"{1e3 * times.median_seconds:.1f}", f"{self.ratio(times):.2f}"
            first_token.add_row(str(times.depth), times.case, str(times.num_cached_tokens), milliseconds, ratio)
        index = _table("blocks cached", "publish, us a block", "match, us a block", "miss, us a sequence")
        for cost in self.index:
            figures = (cost.publish_microseconds_per_block, cost.match_microseconds_per_block, cost.miss_microseconds)
            index.add_row(str(cost.num_blocks), *(f"{figure:.2f}" for figure in figures))
        steps = _table("requests running", "K", "ms a step", "us a request")
        for step in self.steps:
            each = 1e3 * step.median_milliseconds / step.num_running
            steps.add_row(str(step.num_running), str(step.depth), f"{step.median_milliseconds:.3f}", f"{each:.1f}")
        return {
            f"Time to first token, prompts of {self.num_prompt_tokens} tokens": first_token,
            "Prefix index": index,
            "Scheduler, decode steps": steps,
        }


def _table(*headings: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
