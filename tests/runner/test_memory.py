"""The size of the cache: blocks of each group, what they are enough for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import finish
from tiny_models import tiny_mistral, tiny_qwen2

from foredraft.cache.groups import CacheLayout, KVShape, StoredRows
from foredraft.cache.manager import CacheManager
from foredraft.cache.storage import CacheStorage
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.exactness import ExactRows
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.plan import RequestPlan, RequestResult, RequestTerms, StepResult, StepTimes
from foredraft.request import Request
from foredraft.runner.memory import CacheDemand, CacheSize, size_cache
from foredraft.sampling_params import SamplingParams
from foredraft.scheduler.scheduler import Scheduler
from foredraft.scheduler.shares import SchedulerLimits

VOCAB_SIZE = 3
"""Few tokens, so that prompts begin alike and drafts repeat what others have written."""
MANY = 10**6


def layout_of(target: Sequence[int | None], modules: Sequence[int | None] = ()) -> CacheLayout:
    """Layers with these windows. A row takes 16 bytes in a layer or module and 8 as h0."""
    layers, depths = (
        StoredRows(tuple(KVShape(1, 2, 2, window) for window in windows)) for windows in (target, modules)
    )
    return CacheLayout.build(layers, depths, 2, torch.float32)


def demand_of(layout: CacheLayout, max_depth: int = 0, max_positions: int = 100, **settings: Any) -> CacheDemand:
    return CacheDemand(EngineConfig(**settings), layout, max_depth, max_positions)


def with_blocks(demand: CacheDemand, num_blocks: int) -> CacheSize:
    settings = {name: getattr(demand.config, name) for name in demand.config.__dataclass_fields__}
    config = EngineConfig(**(settings | {"num_blocks": num_blocks}))
    return size_cache(CacheDemand(config, demand.layout, demand.max_depth, demand.max_positions), None)


def smallest(demand: CacheDemand) -> CacheSize:
    """With as few blocks as are accepted."""
    for num_blocks in range(2, MANY):
        try:
            return with_blocks(demand, num_blocks)
        except ConfigError:
            continue
    raise AssertionError


# -- the formula -----------------------------------------------------------------------------------------------------


def test_groups_that_keep_all_rows_share_the_memory() -> None:
    demand = demand_of(layout_of([None, None], [None]), 1, block_size=4, max_num_seqs=2)
    # 16 bytes each in two layers and a module, 8 for h0.
    size = size_cache(demand, 10 * 4 * 56 + 55)
    assert size.num_blocks == (10, 10)
    assert (size.num_tokens, size.max_model_len, size.num_bytes) == (36, 36, 10 * 4 * 56)


def test_a_window_gets_what_it_can_use_and_the_others_the_rest() -> None:
    settings: dict[str, Any] = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 20}
    demand = demand_of(layout_of([None, 9]), **settings)
    # 2 requests with 8 rows before the next one, and 20 rows of a step: 9 blocks, and 2 for the ends of each; as much
    # again for cached prefixes; the reserved one.
    window = 1 + 2 * ((2 * 8 + 20) // 4 + 2 * 2)
    assert demand.num_blocks(MANY) == (MANY, window)
    num_bytes = 4 * (16 * window + 24 * 50)
    assert size_cache(demand, num_bytes).num_blocks == (50, window)
    assert size_cache(demand, num_bytes - 1).num_blocks == (49, window)
    assert demand_of(demand.layout, enable_prefix_caching=False, **settings).num_blocks(MANY)[1] == 1 + window // 2
    assert with_blocks(demand, 9).num_blocks == (9, 9)


def test_module_windows_keep_what_a_rebuild_needs() -> None:
    # Modules of windows 4 and 4: a rebuild begins 2 * 3 + 2 rows before c, and its first row attends to 3 before.
    two = demand_of(layout_of([None], [4, 4]), 2)
    assert two.num_rows_behind(1) == 3 + 8
    # One that is chained: a rebuild begins 3 + 1 rows before c.
    one = demand_of(layout_of([None], [4]), 3, block_size=1, max_num_seqs=2, max_num_batched_tokens=8)
    assert one.num_rows_behind(1) == 3 + 4
    assert one.num_held_blocks(1, 2, 100) == 2 * (7 + 3 + 2) + 8 + 2 * 2
    # Behind a module that sees all rows, a rebuild may begin at row 0.
    assert demand_of(layout_of([8], [None, 4]), 2).num_blocks(MANY)[-1] == MANY


def test_windows_alone_bound_no_sequence() -> None:
    demand = demand_of(layout_of([5], [5]), 1, 10**5, block_size=4, max_num_seqs=1, max_num_batched_tokens=8)
    size = size_cache(demand, 1 << 30)
    assert size.max_model_len == 10**5
    assert size.num_tokens is None
    assert max(size.num_blocks) < 20
    assert size.num_bytes < 1 << 20


@st.composite
def demands(draw: st.DrawFn) -> CacheDemand:
    """Any layout and limits that fit each other, of any length up to 90 tokens."""
    windows = st.sampled_from([2, 3, 5, 8, 17])
    any_windows = st.one_of(st.none(), windows)
    target = draw(st.lists(draw(st.sampled_from([windows, any_windows])), min_size=1, max_size=3))
    modules = draw(st.lists(draw(st.sampled_from([windows, any_windows])), max_size=3))
    max_depth = draw(st.integers(0, 4 if len(modules) == 1 else len(modules)))
    max_num_seqs = draw(st.integers(1, 5))
    return demand_of(
        layout_of(target, modules),
        max_depth,
        block_size=draw(st.sampled_from([1, 2, 4, 7])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * (max_depth + 1) + draw(st.sampled_from([0, 2, 30])),
        max_model_len=draw(st.sampled_from([12, 40, 90])),
        enable_prefix_caching=draw(st.booleans()),
    )


@given(demands(), st.integers(0, 1 << 18))
def test_as_many_blocks_as_the_memory_holds(demand: CacheDemand, memory_bytes: int) -> None:
    try:
        size = size_cache(demand, memory_bytes)
    except ConfigError:
        most = demand.most_blocks(memory_bytes)
        assert most < max(smallest(demand).num_blocks)
        return
    assert size.num_bytes <= memory_bytes
    storage = CacheStorage(demand.layout, size.num_blocks, demand.config.block_size, torch.device("cpu"))
    assert storage.num_bytes == size.num_bytes
    more = demand.num_blocks(max(size.num_blocks) + 1)
    if more != size.num_blocks:
        assert demand.num_bytes(max(size.num_blocks) + 1) > memory_bytes
    else:
        assert not demand.is_bounded


# -- what the scheduler does with it -----------------------------------------------------------------------------------


@dataclass
class Simulation:
    """The scheduler over a cache of `size` without a model: any number of drafts is accepted, by chance."""

    demand: CacheDemand
    size: CacheSize
    chance: Random
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.demand.config
        num_blocks = [min(count, 3000) for count in self.size.num_blocks]
        self.num_modules = len(self.demand.layout.modules)
        self.cache = CacheManager(
            self.demand.layout, num_blocks, config.block_size, is_shared=config.enable_prefix_caching
        )
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, self.num_modules)
        self.scheduler = Scheduler(self.cache, limits)
        self.num_held = [0] * len(num_blocks)

    def add(self, prompt: Sequence[int], num_tokens: int, depth: int) -> None:
        request = Request(
            RequestTerms(
                request_id=str(len(self.requests)),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(),
                seed=0,
                max_total_tokens=num_tokens,
                stop_token_ids=frozenset(),
                arrival=len(self.requests),
            ),
            depth=depth,
            exact=ExactRows.none(self.num_modules),
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def add_any(self, shared: Sequence[int]) -> None:
        """A request of any length that may begin like others."""
        longest = self.size.max_model_len
        num_prompt, num_shared = self.chance.randint(1, longest - 1), self.chance.randint(0, longest)
        prompt = [*shared[:num_shared], *self.tokens(num_prompt)][:num_prompt]
        depth = self.chance.choice([self.demand.max_depth, self.chance.randint(0, self.demand.max_depth)])
        self.add(prompt, self.chance.randint(num_prompt + 1, longest), depth)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.chance.randrange(VOCAB_SIZE) for _ in range(count))

    def step(self) -> None:
        """One step; raises AssertionError if no request can proceed."""
        plan = self.scheduler.plan()
        assert plan.requests, "no request can proceed"
        held = (pool.num_usable_blocks - pool.num_free_blocks for pool in self.cache.pools)
        self.num_held = [max(counts) for counts in zip(self.num_held, held)]
        results = tuple(self._result(request) for request in plan.requests)
        self.scheduler.commit(plan, StepResult(results, StepTimes()))
        self.cache.check_integrity()

    def _result(self, plan: RequestPlan) -> RequestResult:
        if not plan.is_sampling:
            return RequestResult(plan.request_id)
        first_draft = len(plan.token_ids) - plan.num_draft_tokens
        num_accepted = self.chance.randint(0, plan.num_draft_tokens)
        token_ids = (*plan.token_ids[first_draft : first_draft + num_accepted], *self.tokens(1))
        kept, reason = plan.terms.first_stop(token_ids, plan.num_tokens)
        num_drafts = 0
        if plan.window is not None and reason is None:
            num_drafts = max(0, min(plan.window.depth, plan.terms.max_total_tokens - plan.num_tokens - kept - 1))
        return RequestResult(plan.request_id, token_ids, self.tokens(num_drafts))

    def finish(self, *, is_changing_depth: bool) -> None:
        shared = self.tokens(self.size.max_model_len)
        for _ in range(2 * self.demand.config.max_num_seqs + 2):
            self.add_any(shared)
        while self.scheduler.has_unfinished:
            self.step()
            for request_id in self.scheduler.unfinished_ids if is_changing_depth else ():
                if self.chance.random() < 0.1:
                    self.scheduler.set_depth(request_id, self.chance.randint(0, self.demand.max_depth))


@given(demands(), st.integers(0, 1 << 32), st.booleans())
def test_a_full_batch_is_never_short_of_blocks(demand: CacheDemand, seed: int, is_changing_depth: bool) -> None:
    simulation = Simulation(demand, with_blocks(demand, MANY), Random(seed))
    simulation.finish(is_changing_depth=is_changing_depth)
    assert simulation.scheduler.num_preemptions == 0
    for number, num_held in enumerate(simulation.num_held):
        bound = demand.num_held_blocks(number, demand.config.max_num_seqs, simulation.size.max_model_len)
        assert num_held <= bound


@given(demands(), st.integers(0, 1 << 32), st.booleans())
def test_with_the_fewest_blocks_all_requests_end(demand: CacheDemand, seed: int, is_changing_depth: bool) -> None:
    Simulation(demand, smallest(demand), Random(seed)).finish(is_changing_depth=is_changing_depth)


class Never(Random):
    """Accepts no draft."""

    def randint(self, a: int, b: int) -> int:
        return a


def test_a_rebuild_after_a_spell_without_drafts_has_room() -> None:
    """The deepest module's rows lag behind by all that is kept for it, when the others come to lag behind as well."""
    settings: dict[str, Any] = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 4, "max_model_len": 99}
    demand = demand_of(layout_of([8], [12, 12, 12]), 3, enable_prefix_caching=False, **settings)
    simulation = Simulation(demand, smallest(demand), Never(0))
    simulation.add([1, 2], 99, 3)
    for depth in [3] * 4 + [2] * 34 + [0] * 23 + [2] * 12:
        simulation.scheduler.set_depth("0", depth)
        simulation.step()
    modules = demand.layout.module_groups[0]
    behind = demand.num_rows_behind(modules)
    assert behind is not None
    assert behind + 3 + 4 < simulation.num_held[modules]


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """A model of windows only, or one whose first layer has none."""
    made: dict[str, LoadedModel] = {}

    def get(kind: str) -> LoadedModel:
        if kind not in made:
            path = tmp_path_factory.mktemp("model")
            build = {"mistral": tiny_mistral, "qwen2": tiny_qwen2}[kind]
            directory = build(path, sliding_window=8)
            made[kind] = load_checkpoint(directory, dtype=torch.float32, device=torch.device("cpu"))
        return made[kind]

    return get


def engine_of(loaded: LoadedModel, num_blocks: int) -> Engine:
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 90}
    return build_engine(loaded, EngineConfig(block_size=4, num_blocks=num_blocks, **limits))


def serve(engine: Engine) -> list[list[int]]:
    """The tokens of more requests with long prompts than run at once."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[(7 * index + 3 * row) % 61 for row in range(30 + 5 * index)] for index in range(7)]
    requests = [engine.add_request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    finish(engine)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_an_engine_with_windows_needs_no_more_and_can_do_with_less(
    sliding: Callable[[str], LoadedModel], kind: str
) -> None:
    large = engine_of(sliding(kind), 1000)
    token_ids = serve(large)
    assert large.stats.num_preemptions == 0
    groups = large.cache_size.groups
    assert all(group.num_blocks == 1000 if group.is_bounded else group.num_blocks < 100 for group in groups)
    assert [pool.num_blocks for pool in large.cache.pools] == [group.num_blocks for group in groups]
    assert large.runner.storage.num_bytes == large.cache_size.num_bytes
    for num_blocks in range(2, 1000):
        try:
            small = engine_of(sliding(kind), num_blocks)
            break
        except ConfigError as error:
            refusal = str(error)
    assert "the cache" in refusal
    assert max(small.cache_size.num_blocks) == num_blocks < 30
    assert serve(small) == token_ids


# -- what is refused, and what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "memory_bytes", "message"),
    [
        (
            {"num_blocks": 2, "block_size": 1},
            None,
            "too small: 2 blocks of 1 rows, one .* hold 1 tokens .*raise num_bl",
        ),
        (
            {"kv_cache_memory_bytes": 600},
            600,
            r"too small: 1 blocks of 16 rows \(from 600 bytes\), one .* hold 0 tokens \(384 bytes a block.*raise kv_c",
        ),
        ({}, 600, "or, on a GPU, gpu_memory_utilization"),
        ({"num_blocks": 5, "max_model_len": 101}, None, "max_model_len=101 is more than the 100 positions"),
        (
            {"num_blocks": 5, "max_model_len": 65},
            None,
            "max_model_len=65 does not fit the cache: 5 blocks of 16 rows, one of them reserved, hold a sequence of 64 "
            "tokens: raise num_blocks, or lower max_model_len",
        ),
        ({"num_blocks": 5, "cpu_cache_gib": 1e-7}, None, "cpu_cache_gib=1e-07 is less than two blocks of 384 bytes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, memory_bytes: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_cache(demand_of(layout_of([None]), **settings), memory_bytes)


def test_windows_too_small_for_one_step_are_refused() -> None:
    demand = demand_of(layout_of([9]), block_size=4, max_num_batched_tokens=70, num_blocks=20)
    message = (
        "the cache is too small: 20 blocks of 4 rows, one of them reserved, are fewer than the 22 that one request may "
        r"need in the group 'target, last 9 rows': 8 rows behind .* max_num_batched_tokens=70 and of 0 drafts: "
        "raise num_blocks, or lower max_num_batched_tokens or max_model_len"
    )
    with pytest.raises(ConfigError, match=message):
        size_cache(demand, None)
    assert with_blocks(demand, 22).num_blocks == (22, 22)
    shorter = demand_of(demand.layout, block_size=4, max_num_batched_tokens=70, max_model_len=76, num_blocks=20)
    assert size_cache(shorter, None).num_blocks == (20, 20)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), True, "0.9"])
def test_utilization_is_a_share(share: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be a number above 0 and at most 1, not"):
        EngineConfig(gpu_memory_utilization=share)


def test_one_setting_sizes_the_cache() -> None:
    with pytest.raises(ConfigError, match="num_blocks and gpu_memory_utilization each set the size of the cache"):
        EngineConfig(num_blocks=10, gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="num_blocks and kv_cache_memory_bytes each"):
        EngineConfig(num_blocks=10, kv_cache_memory_bytes=10**9)


def test_utilization_on_a_cpu_is_refused(sliding: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.5 has no effect on cpu: set kv_cache_memory_by"):
        build_engine(sliding("mistral"), EngineConfig(gpu_memory_utilization=0.5))


def test_what_is_said() -> None:
    demand = demand_of(layout_of([None, 9], [None]), 1, max_num_seqs=1, num_blocks=1001, cpu_cache_gib=0.25)
    size = size_cache(demand, None)
    window, host = size.num_blocks[1], (1 << 28) // (16 * 56)
    assert size.lines() == (
        f"cache: 16,000 tokens in {size.num_bytes / 2**20:.2f} MiB, sequences of up to 100 tokens",
        "  target and h0: 1,001 blocks of 16 rows, 24 bytes a token",
        f"  target, last 9 rows: {window} blocks of 16 rows, 16 bytes a token",
        "  modules: 1,001 blocks of 16 rows, 16 bytes a token",
        f"  host: {host:,} blocks of each group, 256.00 MiB",
    )
    windows = size_cache(demand_of(layout_of([9]), num_blocks=400), None)
    assert windows.lines()[0].startswith("cache: sliding windows in ")
    assert len(windows.lines()) == 3
