"""The engine's loop: plan, execute, commit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.cache.groups import CacheLayout
from foredraft.cache.manager import CacheManager
from foredraft.cache.storage import CacheStorage
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, RequestError
from foredraft.exactness import ExactRows
from foredraft.models.loader import LoadedModel
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.request import Request
from foredraft.runner.memory import size_cache
from foredraft.runner.model_runner import ModelRunner
from foredraft.sampling_params import MAX_SEED, SamplingParams
from foredraft.scheduler.scheduler import Committed, Scheduler, SchedulerLimits
from foredraft.speculation.drafter import Drafter
from foredraft.statistics import EngineStats

SCHEDULER_COUNTS = ("num_preemptions", "num_queried_tokens", "num_cached_tokens")
"""Totals that the scheduler counts and `EngineStats` repeats since its reset."""


@dataclass(frozen=True)
class EngineLimits:
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_depth: int
    eos_token_ids: frozenset[int]


class Engine:
    """Serves many requests at once, one step at a time. Not thread-safe: one caller drives it.

    Anything that a request may ask is checked in `add_request`, which raises RequestError and changes nothing.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, cache: CacheManager, limits: EngineLimits) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.cache = cache
        self.limits = limits
        self.stats = EngineStats()
        self._num_arrivals = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request. Raises RequestError if it can never be served as asked."""
        if request_id in self.scheduler:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not ended")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        request = self._build_request(request_id, tuple(prompt_token_ids), params)
        self.scheduler.add(request)
        self._num_arrivals += 1
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += len(request.prompt_token_ids)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request now and free what it holds; None if it has ended already."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._close(request)
        return request

    def set_num_speculative_tokens(self, request_id: str, num_speculative_tokens: int) -> None:
        """Change how many tokens a running request drafts a step; takes effect with the next step."""
        self._check_depth(num_speculative_tokens)
        if request_id not in self.scheduler:
            raise RequestError(f"request_id {request_id!r} is not that of a request that runs")
        self.scheduler.set_depth(request_id, num_speculative_tokens)

    def step(self) -> list[Committed]:
        """Run one step and return what it added to which requests. A failure ends all requests and is raised."""
        started = time.perf_counter()
        before = self._scheduler_counts()
        try:
            plan = self.scheduler.plan()
            if not plan.requests:
                raise RuntimeError(f"no request can proceed: {self.scheduler.unfinished_ids}")
            result = self.runner.execute(plan)
        except BaseException:
            for request_id in self.scheduler.unfinished_ids:
                self.abort(request_id)
            self.reset_prefix_cache()  # copies of blocks that the step should have made may be missing
            raise
        committed = self.scheduler.commit(plan, result)
        for update in committed:
            self.stats.num_generated_tokens += len(update.token_ids)
            if update.request.finish_reason is not None:
                self._close(update.request)
        for name, count, earlier in zip(SCHEDULER_COUNTS, self._scheduler_counts(), before):
            setattr(self.stats, name, getattr(self.stats, name) + count - earlier)
        self.stats.observe_step(result.times, time.perf_counter() - started)
        return committed

    def _scheduler_counts(self) -> tuple[int, ...]:
        return tuple(getattr(self.scheduler, name) for name in SCHEDULER_COUNTS)

    def reset_prefix_cache(self) -> None:
        """Forget all cached rows; requests that run keep theirs."""
        self.cache.reset()

    def _close(self, request: Request) -> None:
        self.runner.forget(request.request_id)
        self.stats.speculation.add(request.stats)

    def _build_request(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        limits = self.limits
        self._check_prompt(prompt)
        depth = limits.max_depth if params.num_speculative_tokens is None else params.num_speculative_tokens
        self._check_depth(depth)
        for token_id in params.stop_token_ids:
            self._check_token("stop_token_ids", token_id)
        wanted = limits.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
            arrival=self._num_arrivals,
            max_total_tokens=min(wanted, limits.max_model_len),
            stop_token_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else limits.eos_token_ids),
            depth=depth,
            exact=ExactRows.none(self.scheduler.num_modules),
        )

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise RequestError("the prompt must have at least one token")
        for token_id in prompt:
            self._check_token("prompt_token_ids", token_id)
        if len(prompt) >= self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; max_model_len={self.limits.max_model_len} "
                f"leaves room for {self.limits.max_model_len - 1} and one new token"
            )

    def _check_token(self, name: str, token_id: object) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"{name} must hold integers, not {token_id!r}")
        if not 0 <= token_id < self.limits.vocab_size:
            raise RequestError(f"{name} must be between 0 and {self.limits.vocab_size - 1}, not {token_id}")

    def _check_depth(self, depth: int) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= self.limits.max_depth:
            raise RequestError(f"num_speculative_tokens must be between 0 and {self.limits.max_depth}, not {depth!r}")


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    drafter_type: Callable[[TargetModel, MtpModules, CacheStorage, int | None], Drafter] = Drafter,
) -> Engine:
    """Put an engine together for a loaded checkpoint. Raises ConfigError for settings that do not fit it."""
    target = TargetModel(loaded.target)
    modules = MtpModules(loaded.mtp) if loaded.mtp is not None else None
    max_depth = resolve_depth(config, modules.num_modules if modules is not None else 0)
    config.check_depth(max_depth)
    if config.draft_vocab_size is not None and config.draft_vocab_size > target.vocab_size:
        raise ConfigError(f"draft_vocab_size={config.draft_vocab_size} is more than the {target.vocab_size} token ids")
    module_shapes = modules.kv_shapes if modules is not None else ()
    layout = CacheLayout.build(target.kv_shapes, module_shapes, target.hidden_size, target.dtype)
    size = size_cache(config, layout, loaded.info.max_position_embeddings)
    try:
        storage = CacheStorage(layout, size.num_blocks, config.block_size, target.device)
    except RuntimeError as error:
        tokens = zip(size.num_blocks, range(len(layout.groups)))
        num_bytes = sum(layout.bytes_per_token(group) * config.block_size * count for count, group in tokens)
        raise ConfigError(
            f"there is no memory for a cache of {max(size.num_blocks)} blocks, {num_bytes} bytes: "
            f"lower num_blocks or kv_cache_memory_bytes"
        ) from error
    drafter = drafter_type(target, modules, storage, config.draft_vocab_size) if modules is not None else None
    runner = ModelRunner(target, drafter, storage, greedy_drafts=config.draft_sampling == "greedy")
    cache = CacheManager(layout, size.num_blocks, config.block_size, is_shared=config.enable_prefix_caching)
    scheduler_limits = SchedulerLimits(
        config.max_num_seqs, config.max_num_batched_tokens, len(module_shapes), config.scheduling_policy
    )
    limits = EngineLimits(target.vocab_size, size.max_model_len, max_depth, loaded.eos_token_ids)
    return Engine(runner, Scheduler(cache, scheduler_limits), cache, limits)


def resolve_depth(config: EngineConfig, num_mtp_modules: int) -> int:
    """The most draft tokens a step: as asked, else as many as there are modules.

    Raises ConfigError if more are asked than the modules can make; one module may be chained over several drafts.
    """
    wanted = config.num_speculative_tokens
    if wanted is None:
        return num_mtp_modules
    if wanted > 0 and num_mtp_modules == 0:
        raise ConfigError(f"num_speculative_tokens={wanted}, but the checkpoint has no MTP modules; name them with mtp")
    if wanted > num_mtp_modules > 1:
        raise ConfigError(f"num_speculative_tokens={wanted}, but the checkpoint has {num_mtp_modules} MTP modules")
    return wanted
