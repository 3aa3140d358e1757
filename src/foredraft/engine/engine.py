"""The engine's loop: plan, execute, commit."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.cache.manager import CacheManager
from foredraft.cache.persistence import load_cache, save_cache
from foredraft.cache.snapshot import Signature
from foredraft.engine.handing_over import HandingOver
from foredraft.engine.output_text import OutputText
from foredraft.engine.text_tools import NO_TEXTS, TextTools
from foredraft.errors import ForedraftError, RequestError, described, shown
from foredraft.exactness import ExactRows
from foredraft.media import Media, MediaKind, row_ids
from foredraft.plan import AheadPlan, RequestResult, RequestTerms, StepPlan, StepResult
from foredraft.request import Request
from foredraft.runner.memory import CacheSize
from foredraft.runner.model_runner import ModelRunner
from foredraft.runner.resident.decoder import Flight
from foredraft.sampling.philox import seed_of_choice
from foredraft.sampling_params import MAX_SEED, SamplingParams
from foredraft.scheduler.scheduler import Committed, Scheduler
from foredraft.statistics import EngineStats
from foredraft.stopping import FinishReason

SCHEDULER_COUNTS = ("num_preemptions", "num_queried_tokens", "num_cached_tokens")
"""Totals that the scheduler counts and `EngineStats` repeats since its reset."""


@dataclass(frozen=True)
class KeptCache:
    """Where the cache is kept across restarts, and what must agree for it to be used."""

    directory: Path
    signature: Signature


@dataclass(frozen=True)
class EngineLimits:
    """What requests are checked against. placeholders: of media, by kind."""

    vocab_size: int
    max_model_len: int
    max_depth: int
    eos_token_ids: frozenset[int]
    verification: str = "rejection"
    placeholders: Mapping[MediaKind, int] = field(default_factory=dict)


class Engine(HandingOver):
    """Serves many requests at once, one step at a time. Not thread-safe: one caller drives it.

    Anything that a request may ask is checked in `add_request`, which raises RequestError and changes nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        cache: CacheManager,
        limits: EngineLimits,
        cache_size: CacheSize,
        kept: KeptCache | None = None,
        texts: TextTools = NO_TEXTS,
        *,
        overlaps: bool = False,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.cache = cache
        self.limits: EngineLimits = limits
        self.cache_size = cache_size
        self._kept = kept
        self._text_tools = texts
        self._texts: dict[str, OutputText] = {}
        self.reset_stats()
        self._num_arrivals = 0
        self._overlaps = overlaps
        self._under_way: tuple[StepPlan | AheadPlan, Flight] | None = None
        self._is_stepping = False
        self._aborted_within_step: list[str] = []
        self._has_lost_cache = False

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def reset_stats(self) -> None:
        """Begin counting anew."""
        self.stats = EngineStats(verification=self.limits.verification)
        self.scheduler.speculation = self.stats.speculation  # counted there, with each step

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        leader: Request | None = None,
        media: Sequence[Media] = (),
    ) -> Request:
        """Queue one choice of a request. Raises RequestError if it can never be served as asked.

        choice: which of params.n it is; each is added by itself. leader: the first one, whose rows of the prompt the
        others share. media: what the prompt shows, in the order of its placeholders.
        """
        if request_id in self.scheduler:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not ended")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        if self._is_stepping:
            raise RequestError("a request cannot be added within a step, by a logits processor for instance")
        request = self._build_request(request_id, tuple(prompt_token_ids), params, choice, leader, tuple(media))
        text = self._text_tools.output_text(request.terms)
        with self._whole():
            self._texts[request_id] = text
            self.scheduler.add(request)
        self._num_arrivals += 1
        if choice == 0:
            self.stats.num_requests += 1
            self.stats.num_prompt_tokens += len(request.prompt_token_ids)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request now and free what it holds; None if it has ended already.

        Within a step (the garbage collector may close a stream at any moment) it ends with the step.
        """
        if self._is_stepping:
            self._aborted_within_step.append(request_id)
            return None
        with self._whole():
            request = self.scheduler.abort(request_id)
            if request is not None:
                self._close(request)
        return request

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """For changes to requests and blocks: one that is broken off, by Ctrl-C say, leaves nothing of any request."""
        try:
            yield
        except BaseException:
            self._has_lost_cache = True
            try:
                requests = self.scheduler.abandon()
            except BaseException:  # Ctrl-C once more
                requests = self.scheduler.abandon()
                raise
            finally:
                for request in requests:
                    self._close(request)
                self._forget_all()
            raise

    def set_num_speculative_tokens(self, request_id: str, num_speculative_tokens: int) -> None:
        """Change how many tokens a running request drafts a step; takes effect with the next step to be launched."""
        self._check_depth(num_speculative_tokens)
        if request_id not in self.scheduler:
            raise RequestError(f"request_id {request_id!r} is not that of a request that runs")
        self.scheduler.set_depth(request_id, num_speculative_tokens)

    def step(self, *, ahead: bool = True) -> list[Committed]:
        """Run one step and return what it added to which requests. A failure ends all requests and is raised.

        ahead: where steps overlap, the next one may be under way when this returns.
        """
        try:
            self._is_stepping = True
            return self._step(ahead)
        finally:
            self._is_stepping = False
            while self._aborted_within_step:
                self.abort(self._aborted_within_step.pop())

    def settle(self) -> list[Committed]:
        """End the step that is under way, if any, so that none is; returns what it added."""
        if self._under_way is not None and not self.scheduler.has_member(self._under_way[0]):
            self._under_way = None
        return self.step(ahead=False) if self._under_way is not None else []

    def _step(self, ahead: bool) -> list[Committed]:
        started = time.perf_counter()
        before = self._scheduler_counts()
        with self._whole(), self.runner.on_device():
            plan, result = self._run(ahead)
            result, ends = self._add_texts(plan, result)
            committed = self.scheduler.commit(plan, result, ends)
            for update in committed:
                self.stats.num_generated_tokens += len(update.token_ids)
                if update.request.finish_reason is not None:
                    self._close(update.request)
        for name, count, earlier in zip(SCHEDULER_COUNTS, self._scheduler_counts(), before):
            setattr(self.stats, name, getattr(self.stats, name) + count - earlier)
        self.stats.observe_step(result.times, time.perf_counter() - started)
        return committed

    def _run(self, can_launch: bool) -> tuple[StepPlan, StepResult]:
        """Run the next step to its end; where steps overlap, the one after it has been launched when this returns."""
        under_way, self._under_way = self._under_way, None
        if under_way is None or not self.scheduler.has_member(under_way[0]):
            first = self.scheduler.plan()
            if not first.requests:
                raise RuntimeError(f"no request can proceed: {self.scheduler.unfinished_ids}")
            launched = self.runner.launch(first) if self._overlaps else None
            if launched is None:
                return first, self.runner.execute(first)
            under_way = first, launched
        plan, flight = under_way
        if can_launch and (ahead := self.scheduler.plan_ahead(plan)) is not None:
            self._under_way = ahead, self.runner.launch_ahead(ahead)
        if isinstance(plan, AheadPlan):
            plan = self.scheduler.resolve(plan)
        return plan, self.runner.collect(plan, flight)

    def _add_texts(self, plan: StepPlan, result: StepResult) -> tuple[StepResult, dict[str, int]]:
        """Turn new tokens into text. Returns how many tokens stay where a stop string is complete, by request.

        A tokenizer that fails ends its request only.
        """
        ends: dict[str, int] = {}
        outcomes = list(result.requests)
        for index, (request, outcome) in enumerate(zip(plan.requests, outcomes)):
            text = self._texts.get(request.request_id)
            if text is None or not outcome.token_ids:
                continue
            kept, reason = request.terms.first_stop(outcome.token_ids, request.num_tokens)
            shown = kept - (reason is FinishReason.STOP)
            depths = (*range(1, outcome.num_accepted + 1), 0)
            try:
                if (end := text.add(outcome.token_ids[:shown], depths[:shown])) is not None:
                    ends[request.request_id] = end
            except Exception as error:  # any tokenizer's own
                message = f"the tokenizer failed: {described(error)}"
                outcomes[index] = RequestResult(request.request_id, error=message)
        return StepResult(tuple(outcomes), result.times), ends

    def text_of(self, request_id: str) -> OutputText:
        """The text of a request that has not ended; keep it, and it will be whole when the request has."""
        return self._texts[request_id]

    def compile_grammar(self, params: SamplingParams) -> None:
        """Raise RequestError if a grammar is asked for that cannot be followed. Any thread may call this, so that the
        one that runs the model finds the grammar compiled."""
        self._text_tools.check_grammar(params)

    def _scheduler_counts(self) -> tuple[int, ...]:
        return tuple(getattr(self.scheduler, name) for name in SCHEDULER_COUNTS)

    def reset_prefix_cache(self) -> None:
        """Forget all cached rows; requests that run keep theirs."""
        with self._whole():
            self.cache.reset()

    def close(self) -> None:
        """End all requests, and save the cache if the settings say so. Raises ForedraftError if it cannot be saved."""
        for request_id in self.scheduler.unfinished_ids:
            self.abort(request_id)
        if self._kept is None or self.runner.host_storage is None:
            return
        with self._whole():
            self.cache.spill_cached()
        with self.runner.on_device():
            self.runner.copy_blocks(self.cache.take_copies(), is_final=True)
        place = self._kept.directory, self._kept.signature, self.cache, self.runner.host_storage
        try:
            if self._has_lost_cache:  # what was saved before is as good as ever
                load_cache(*place)
            save_cache(*place)
        except (OSError, ValueError) as error:
            raise ForedraftError(f"cache_dir {self._kept.directory}: the cache cannot be saved: {error}") from error

    def _forget_all(self) -> None:
        """No request is left: nor is anything of those that a broken-off change had taken out already."""
        self._under_way = None
        self.runner.forget_all()
        for text in self._texts.values():
            with suppress(Exception):
                text.flush()
        self._texts.clear()

    def _close(self, request: Request) -> None:
        self.runner.forget(request.request_id)
        if (text := self._texts.pop(request.request_id, None)) is not None:
            with suppress(Exception):  # a tokenizer that has failed fails again
                text.flush()

    def _build_request(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        choice: int,
        leader: Request | None,
        media: tuple[Media, ...],
    ) -> Request:
        limits = self.limits
        self._check_prompt(prompt, params)
        prompt = tuple(map(int, prompt))  # other kinds of integers, such as those of an IntEnum
        media_row_ids = self._media_row_ids(prompt, media)
        depth = limits.max_depth if params.num_speculative_tokens is None else params.num_speculative_tokens
        self._check_depth(depth)
        self._check_options(params)
        self._text_tools.check_grammar(params)
        wanted = limits.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        num_scored = params.prompt_logprobs
        if num_scored is None and params.echo:
            num_scored = params.logprobs
        terms = RequestTerms(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            seed=seed if params.seed is None else seed_of_choice(seed, choice),
            max_total_tokens=min(wanted, limits.max_model_len),
            stop_token_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else limits.eos_token_ids),
            arrival=self._num_arrivals,
            bad_words=self._text_tools.bad_words(params),
            num_prompt_logprobs=num_scored if choice == 0 else None,
            media=media,
            media_row_ids=media_row_ids,
        )
        return Request(terms, depth, ExactRows.none(self.scheduler.num_modules), leader)

    def _media_row_ids(self, prompt: tuple[int, ...], media: tuple[Media, ...]) -> tuple[int, ...] | None:
        """What the rows of a prompt go by; None for a model that takes text only."""
        placeholders = self.limits.placeholders
        for one in media:
            if not isinstance(one, Media):
                raise RequestError(f"media must hold Media, not {type(one).__name__}")
            if one.kind not in placeholders:
                takes = ", ".join(kind.value for kind in placeholders) or "text only"
                raise RequestError(f"media: the model takes no {one.kind.value} (it takes {takes})")
            if fault := self.runner.target.media_fault(one):
                raise RequestError(f"media: {fault}")
        if not placeholders:
            return None
        try:
            return row_ids(prompt, media, placeholders)
        except ValueError as error:
            raise RequestError(f"media: {error}") from error

    def _check_options(self, params: SamplingParams) -> None:
        words = [word for word in params.bad_words if not isinstance(word, str)]
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias token ids", [token_id for token_id, _ in params.biases]),
            ("bad_words", itertools.chain.from_iterable(words)),
        ):
            for token_id in token_ids:
                self._check_token(name, token_id)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.limits.vocab_size:
                raise RequestError(f"{name} must be at most {self.limits.vocab_size}, the number of token ids")
        if params.structured_output is not None and not self.limits.eos_token_ids:
            raise RequestError("structured_output needs a token that ends the output, and the checkpoint names none")

    def _check_prompt(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt must have at least one token")
        placeholders = self.limits.placeholders.values()  # which may lie behind the tokens that can be written
        for token_id in prompt:
            if token_id not in placeholders:
                self._check_token("prompt_token_ids", token_id)
        limit = self.limits.max_model_len
        if len(prompt) > limit or (len(prompt) == limit and params.max_tokens != 0):
            room = f"max_model_len={limit} leaves room for {limit - 1} and one new token"
            raise RequestError(f"the prompt has {len(prompt)} tokens; {room}")
        if len(prompt) + params.min_tokens > limit:
            room = f"after a prompt of {len(prompt)} tokens max_model_len={limit} leaves room for {limit - len(prompt)}"
            raise RequestError(f"min_tokens={shown(params.min_tokens)} do not fit: {room}")

    def _check_token(self, name: str, token_id: object) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"{name} must hold integers, not {shown(token_id)}")
        if not 0 <= token_id < self.limits.vocab_size:
            raise RequestError(f"{name} must be between 0 and {self.limits.vocab_size - 1}, not {shown(token_id)}")

    def _check_depth(self, depth: int) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= self.limits.max_depth:
            limit = f"between 0 and {self.limits.max_depth}"
            raise RequestError(f"num_speculative_tokens must be {limit}, not {shown(depth)}")
