"""Requests that leave an engine, and those that come from another."""

from __future__ import annotations

import sys
from abc import abstractmethod
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from foredraft.cache.manager import CacheManager
from foredraft.cache.placement import Placement, SentRows, rows_of
from foredraft.engine.handover import DRAFT_PROBS, Handover, Origin
from foredraft.engine.handover_bytes import NamedTensor
from foredraft.engine.output_text import OutputText
from foredraft.engine.text_tools import TextTools
from foredraft.errors import EngineBusyError, HandoverError, RequestError
from foredraft.exactness import ExactRows
from foredraft.media import Media
from foredraft.models.fingerprint import target_fingerprint
from foredraft.plan import AheadPlan, StepPlan
from foredraft.request import Request
from foredraft.runner.model_runner import ModelRunner
from foredraft.runner.request_memory import RequestMemory
from foredraft.runner.resident.decoder import Flight
from foredraft.sampling_params import SamplingParams
from foredraft.scheduler.scheduler import Scheduler
from foredraft.statistics import EngineStats


class _Limits(Protocol):
    """What is asked of an engine's limits here."""

    @property
    def max_depth(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


@dataclass(frozen=True)
class _Arrival:
    """A request that has come, with all that an engine keeps of it. placement: None where its rows are of no use."""

    request: Request
    memory: RequestMemory
    text: OutputText
    placement: Placement | None


class HandingOver:
    """What an engine does to hand requests over and to take them on; `Engine` has the rest.

    A request leaves with its committed rows as they are, module rows that may still become exact among them, so that
    the engine that takes it on computes nothing again that this one would not have.
    """

    runner: ModelRunner
    scheduler: Scheduler
    cache: CacheManager
    limits: _Limits
    stats: EngineStats
    _text_tools: TextTools
    _texts: dict[str, OutputText]
    _num_arrivals: int
    _is_stepping: bool
    _under_way: tuple[StepPlan | AheadPlan, Flight] | None

    @abstractmethod
    def abort(self, request_id: str) -> Request | None:
        """As in `Engine`."""

    @abstractmethod
    def _whole(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _build_request(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        choice: int,
        leader: Request | None,
        media: tuple[Media, ...],
    ) -> Request: ...

    @abstractmethod
    def _check_token(self, name: str, token_id: object) -> None: ...

    # -- leaving -------------------------------------------------------------------------------------------------------

    def export_request(self, request_id: str) -> Handover:
        """End a request here so that another engine can go on with it; it may run, wait or have been preempted.

        What was published of its rows stays cached here, as of any request that ends. Its `finish_reason` is "abort".
        RequestError, and nothing has changed, if it has ended, if a step of it is under way (`settle` ends that), or if
        it has logits_processors, which are a caller's own objects.
        """
        request = self.scheduler.request(request_id)
        if request is None:
            raise RequestError(f"request_id {request_id!r} is not that of a request that has not ended")
        under_way = self._under_way[0].requests if self._under_way is not None else ()
        if self._is_stepping or any(one.terms.request_id == request_id for one in under_way):
            raise RequestError(f"a step of request {request_id!r} is under way: call settle first")
        if request.params.logits_processors:
            raise RequestError(
                "a request with logits_processors cannot be handed over: they are objects of this process"
            )
        with self.runner.on_device():
            self._make_copies()
            handover = self._handover(request)
        self.abort(request_id)
        return handover

    def _make_copies(self) -> None:
        """Blocks that were given to others in the books only are moved now: the rows in them are about to change."""
        with self._whole():
            self.runner.copy_blocks(self.cache.take_copies())

    def _handover(self, request: Request) -> Handover:
        memory = self.runner.memory_of(request.request_id) or RequestMemory()
        drafts = request.draft_token_ids
        is_drawn = request.params.temperature > 0 and not self.runner.has_greedy_drafts
        probs = memory.draft_probs[: len(drafts)] if is_drawn else ()
        drawn = [one for one in probs if one is not None]
        sent = self._rows_of(request)
        tensors = [NamedTensor(name, own.rows, own.first) for name, own in sent.items()]
        tensors += [NamedTensor(DRAFT_PROBS, torch.stack(drawn).cpu())] if drawn else []
        for index, one in enumerate(request.terms.media):
            features = one.features.items()
            tensors += [NamedTensor(f"media.{index}.{name}", tensor.contiguous()) for name, tensor in features]
        is_default = request.params.num_speculative_tokens is None and request.depth == self.limits.max_depth
        return Handover(
            origin=self._origin,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            row_ids=request.terms.row_ids,
            media=request.terms.media,
            params=request.params,
            seed=request.terms.seed,
            num_prompt_logprobs=request.terms.num_prompt_logprobs,
            depth=None if is_default else request.depth,
            max_depth=request.max_depth,
            output_token_ids=tuple(request.output_token_ids),
            token_depths=tuple(request.token_depths),
            logprobs=tuple(request.logprobs),
            prompt_logprobs=request.prompt_logprobs,
            scored_prompt=tuple(memory.prompt_logprobs),
            draft_token_ids=drafts,
            drafting=self._drafting,
            drawn_drafts=tuple(one is not None for one in probs),
            num_computed_tokens=request.num_computed_tokens if sent else 0,
            num_state_rows=request.num_state_rows if sent else 0,
            exact=request.exact,
            num_cached_tokens=request.num_cached_tokens,
            stats=deepcopy(request.stats),
            windows={name: own.window for name, own in sent.items()},
            tensors=tuple(tensors),
        )

    def _rows_of(self, request: Request) -> dict[str, SentRows]:
        if not request.num_computed_tokens:
            return {}
        exact, ends = request.exact, list(request.exact.num_exact_rows)
        if (cycle := exact.cycle) is not None:  # some of these become exact if drafts are accepted
            for module in range(cycle.depth):
                ends[module] = max(ends[module], cycle.num_computed_tokens)
        tables = self.cache.block_tables(request.request_id)
        held = self.cache.num_held_blocks(request.request_id)
        num_rows, num_state_rows = request.num_computed_tokens, request.num_state_rows
        came = request.first_rows
        return rows_of(self.runner.storage, tables, held, ends, num_rows, num_state_rows, exact.origin, came)

    @cached_property
    def _origin(self) -> Origin:
        """What requests of this engine were begun with."""
        modules = self.runner.modules
        return Origin(
            target=target_fingerprint(self.runner.target.model),
            modules=modules.fingerprints() if modules is not None else (),
            dtype=str(self.runner.storage.layout.dtype),
            byte_order=sys.byteorder,
        )

    @cached_property
    def _drafting(self) -> str:
        """How drafts of sampled requests are made: whoever goes on must read what they were drawn from as it is."""
        head = self.runner.draft_head
        if head is None:
            return "none"
        ids = b"" if head.token_ids is None else head.token_ids.cpu().numpy().tobytes()
        digest = blake2b(ids, digest_size=16).hexdigest()
        return f"{'greedy' if self.runner.has_greedy_drafts else 'drawn'}, {head.num_tokens} tokens, {digest}"

    # -- arriving ------------------------------------------------------------------------------------------------------

    def import_request(self, handover: Handover, request_id: str | None = None, *, recompute: bool = False) -> Request:
        """Go on with a request that another engine has handed over, under its own id or another.

        Its limits are those that it would have if it had been added here: `max_model_len`, and drafts a step.
        recompute: if its rows do not find room, or are fewer than the modules here need, it waits as a preempted
        request does and its rows are computed again; otherwise that is an EngineBusyError: try again later.

        Raises HandoverError, which names what differs, for a request of another model, and RequestError for one that
        cannot be served here. Whatever is raised, nothing has changed.
        """
        if self._is_stepping:
            raise RequestError("a request cannot be imported within a step, by a logits processor for instance")
        name = handover.request_id if request_id is None else request_id
        if name in self.scheduler:
            raise RequestError(f"request_id {name!r} is in use by a request that has not ended")
        self._check_origin(handover.origin)
        arrival = self._arrival(handover, name)
        if not self._enter(arrival, can_wait=recompute or not handover.num_computed_tokens):
            reason = "not enough blocks are free, or max_num_seqs requests run"
            if arrival.placement is None:
                reason = "it was begun with fewer modules, and the h0 that those of this engine need were not kept"
            raise EngineBusyError(f"the rows of request {name!r} find no room: {reason}")
        return arrival.request

    def _check_origin(self, theirs: Origin) -> None:
        ours = self._origin
        for what, their, our in (
            ("dtype", theirs.dtype, ours.dtype),
            ("byte order", theirs.byte_order, ours.byte_order),
            ("target model (weights or configuration)", theirs.target, ours.target),
        ):
            if their != our:
                raise HandoverError(f"the request was begun with another {what}: {their:.60}, and here it is {our}")
        for depth, (their, our) in enumerate(zip(theirs.modules, ours.modules), start=1):
            if their != our:
                raise HandoverError(f"the request was begun with another MTP module {depth}: {their:.60}, here {our}")

    def _arrival(self, handover: Handover, name: str) -> _Arrival:
        """All that is to be kept of a request, before anything of it is."""
        limit = self.limits.max_depth
        params = handover.params
        if (params.num_speculative_tokens or 0) > limit:
            params = replace(params, num_speculative_tokens=limit)
        built = self._build_request(name, handover.prompt_token_ids, params, 0, None, handover.media)
        terms = replace(built.terms, seed=handover.seed, num_prompt_logprobs=handover.num_prompt_logprobs)
        if terms.row_ids != handover.row_ids:
            raise HandoverError("row_ids are not those of the prompt and what it shows")
        depth = limit if handover.depth is None else min(limit, handover.depth)
        num_modules = self.scheduler.num_modules
        request = Request(terms, depth, ExactRows.none(num_modules))
        for token_id in (*handover.output_token_ids, *handover.draft_token_ids):
            self._check_token("tokens of a handover", token_id)
        request.token_ids += handover.output_token_ids
        if request.num_tokens >= request.max_total_tokens:
            rule = f"max_model_len={self.limits.max_model_len}"
            raise RequestError(f"the request has {request.num_tokens} tokens, and {rule} leaves no room for more")
        request.token_depths += handover.token_depths
        request.logprobs += handover.logprobs
        request.prompt_logprobs = handover.prompt_logprobs
        request.num_cached_tokens = handover.num_cached_tokens
        request.max_depth = max(depth, min(limit, handover.max_depth))
        request.stats.add(handover.stats)
        memory = self._memory(request, handover)
        text = self._text_tools.output_text(terms)
        if text.add(handover.output_token_ids, handover.token_depths) is not None:
            raise HandoverError("a stop string is complete in the output: the request was begun with another tokenizer")
        return _Arrival(request, memory, text, self._place(request, handover))

    def _memory(self, request: Request, handover: Handover) -> RequestMemory:
        """The rules, made anew and led through the tokens so far; and pending drafts with what they were drawn from.

        Drafts that do not fit, or were drawn in another way than those of this engine, are dropped: the next token is
        the target's as before, if perhaps another sample of it.
        """
        memory = RequestMemory.of(request.terms, self.runner.target.vocab_size, self._text_tools.compiler)
        if memory.rules is not None:
            memory.rules.commit(handover.output_token_ids)
        memory.prompt_logprobs = list(handover.scored_prompt)
        room = min(self.limits.max_depth, request.max_total_tokens - request.num_tokens - 1)
        drafts = handover.draft_token_ids[:room]
        if request.params.temperature > 0:
            if handover.drafting != self._drafting:
                return memory
            memory.draft_probs = self._draft_probs(handover)[: len(drafts)]
        request.draft_token_ids = drafts
        return memory

    def _draft_probs(self, handover: Handover) -> tuple[Tensor | None, ...]:
        sent = next((one.tensor for one in handover.tensors if one.name == DRAFT_PROBS), torch.empty(0, 0))
        head = self.runner.draft_head
        num_drawn = sum(handover.drawn_drafts)
        if num_drawn and (head is None or sent.shape != (num_drawn, head.num_tokens) or sent.dtype != torch.float32):
            raise HandoverError(f"draft_probs are {sent.dtype} {list(sent.shape)} for {num_drawn} drafts")
        rows = iter(sent.to(self.runner.target.device))
        return tuple(next(rows) if is_drawn else None for is_drawn in handover.drawn_drafts)

    def _place(self, request: Request, handover: Handover) -> Placement | None:
        """Where the rows go, and how many of them are exact here. HandoverError unless they are this model's."""
        if not handover.num_computed_tokens:
            return None
        num_modules = self.scheduler.num_modules
        counts = (*handover.exact.num_exact_rows, *(0,) * num_modules)[:num_modules]
        exact = handover.exact._replace(num_exact_rows=counts)
        if exact.cycle is not None:
            exact = exact._replace(cycle=exact.cycle._replace(depth=min(exact.cycle.depth, num_modules)))
            if not request.draft_token_ids:
                exact = exact.after_verify(0)
        sent = {name: SentRows(one.first, one.tensor, handover.windows[name]) for name, one in handover.rows.items()}
        request.exact = exact
        request.num_computed_tokens, request.num_state_rows = handover.num_computed_tokens, handover.num_state_rows
        try:
            placement = Placement.of(
                self.runner.storage, sent, request.num_computed_tokens, request.num_state_rows, counts, exact.origin
            )
        except ValueError as error:
            raise HandoverError(f"the rows are of another layout: {error}") from error
        return None if placement.lacks_hidden(self.cache.layout, request.num_computed_tokens) else placement

    def _enter(self, arrival: _Arrival, *, can_wait: bool) -> bool:
        """Begin to run a request with its rows, or let it wait without them; False: neither."""
        request, placement = arrival.request, arrival.placement
        request.terms = replace(request.terms, arrival=self._num_arrivals)

        def fill() -> None:
            assert placement is not None
            self.runner.copy_blocks(self.cache.take_copies())
            placement.fill(self.runner.storage, self.cache.block_tables(request.request_id))
            request.first_rows = {name: own.first for name, own in placement.sent.items()}

        with self._whole(), self.runner.on_device():
            is_running = placement is not None and self.scheduler.adopt(
                request, placement.match, placement.num_module_rows, fill
            )
            if not is_running:
                if not can_wait:
                    return False
                request.num_computed_tokens = request.num_state_rows = 0
                request.exact = ExactRows.none(self.scheduler.num_modules)
                self.scheduler.add(request)
            self._texts[request.request_id] = arrival.text
            self.runner.keep_memory(request.request_id, arrival.memory)
        self._num_arrivals += 1
        self.stats.num_requests += 1
        return True
