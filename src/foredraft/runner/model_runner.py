"""One step on tensors: the target's forward, verification, drafting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.config import Execution
from foredraft.errors import described
from foredraft.logprobs import TokenLogprob
from foredraft.models.draft_head import DraftHead
from foredraft.models.media_store import MediaStore
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetForward, TargetModel
from foredraft.plan import AheadPlan, BlockCopy, CopyKind, RequestPlan, RequestResult, StepPlan, StepResult, StepTimes
from foredraft.runner.inputs import sampled_slots, target_inputs
from foredraft.runner.pass_graphs import PassGraphs
from foredraft.runner.request_memory import RequestMemory
from foredraft.runner.resident.decoder import Flight
from foredraft.runner.resident.graphs import CaptureStats
from foredraft.runner.settings import DEFAULT_SETTINGS, RunnerSettings
from foredraft.runner.verification import Decision, Verification, sampling_tensors
from foredraft.speculation.drafter import Drafter, Window


class ModelRunner:
    """Executes plans. Its only state is the paged storage and a `RequestMemory` for each request."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        storage: CacheStorage,
        host_storage: CacheStorage | None = None,
        settings: RunnerSettings = DEFAULT_SETTINGS,
    ) -> None:
        self.target = target
        self._drafter = drafter
        self.storage = storage
        self.host_storage = host_storage
        self._settings = settings
        self._verification = Verification(settings.verification)
        self._memories: dict[str, RequestMemory] = {}
        self.media = MediaStore(target.encode, settings.max_media_bytes) if target.placeholders else None
        if drafter is not None:
            drafter.media = self.media
        self.resident = settings.resident(storage) if settings.resident is not None else None
        self._graphed: TargetForward | None = None
        if self.resident is not None and self.resident.graphs.is_enabled:
            self._use_pass_graphs(PassGraphs(self.resident.graphs, storage, self.resident.max_blocks))

    def _use_pass_graphs(self, passes: PassGraphs) -> None:
        """Run from graphs what is in fused form: what else a layer may do is not known to be the same each time."""
        if self.target.fused is not None:
            self._graphed = passes.of_target(self.target.forward)
        if self._drafter is not None and self._drafter.modules.is_fused:
            self._drafter.graphed = passes.of_modules(self._drafter.modules.forward)

    def on_device(self) -> AbstractContextManager[object]:
        """Kernels and graphs are launched on the current device of a thread: within this it is the model's."""
        return current_device(self.target.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the CUDA graphs that decoding needs most; see `ResidentDecoder.capture`."""
        if self.resident is not None:
            self.resident.capture()

    @property
    def execution(self) -> Execution:
        """Who runs decode steps."""
        return self._settings.execution

    @property
    def draft_head(self) -> DraftHead | None:
        """What drafts are chosen with; None where none are made."""
        return self._drafter.head if self._drafter is not None else None

    @property
    def modules(self) -> MtpModules | None:
        """What makes drafts; None where none are made."""
        return self._drafter.modules if self._drafter is not None else None

    @property
    def has_greedy_drafts(self) -> bool:
        """Whether drafts are chosen without chance, those of sampled requests too."""
        return self._settings.verification.greedy_drafts

    @property
    def captured(self) -> CaptureStats | None:
        """What capturing CUDA graphs has taken so far; None where none are made."""
        return self.resident.graphs.stats if self.resident is not None and self.resident.graphs.is_enabled else None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight | None:
        """Start a step of which nothing needs the host before its end; None, and nothing is done, if it is another."""
        if not plan.requests or not all(map(self._is_resident, plan.requests)):
            return None
        self.copy_blocks(plan.copies)
        return self._launch(plan.requests)

    @torch.inference_mode()
    def launch_ahead(self, plan: AheadPlan) -> Flight:
        """Start the step after one that was launched and is not collected yet."""
        assert self.resident is not None
        return self.resident.launch_ahead(plan.requests)

    def collect(self, plan: StepPlan, flight: Flight) -> StepResult:
        """Wait for a launched step. plan: what it has turned out to be; results of other requests are dropped."""
        found = flight.collect()
        return StepResult(tuple(found[request.request_id] for request in plan.requests), flight.times())

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for it.

        Steady decodes run with their state on the device, if there is a resident decoder; others request by request.
        """
        resident = [request for request in plan.requests if self._is_resident(request)]
        if not resident:
            return self._execute(plan)
        with torch.inference_mode():
            self.copy_blocks(plan.copies)
            flight = self._launch(resident)
        others = StepPlan(tuple(request for request in plan.requests if request not in resident))
        result = self._execute(others) if others.requests else StepResult((), StepTimes())
        found = flight.collect() | {outcome.request_id: outcome for outcome in result.requests}
        times = result.times.plus(flight.times())
        return StepResult(tuple(found[request.request_id] for request in plan.requests), times)

    def _is_resident(self, plan: RequestPlan) -> bool:
        """Whether the resident decoder runs a request's step."""
        if self.resident is None or plan.params.changes_logits or plan.params.logprobs is not None:
            return False
        is_scored = plan.terms.num_prompt_logprobs is not None and plan.num_tokens == len(plan.terms.prompt_token_ids)
        return not is_scored and self.resident.can_run(plan)

    def _launch(self, plans: Sequence[RequestPlan]) -> Flight:
        """What pending drafts were drawn from moves into the slots; it stays there while the resident decoder runs
        them."""
        assert self.resident is not None
        for request_id in self.resident.surplus(plans):  # preempted ones, which have kept their slots
            if (kept := self._memories.get(request_id)) is not None:
                kept.draft_probs = self.resident.take_probs(request_id)
            self.resident.forget(request_id)
        probs: list[tuple[Tensor | None, ...]] = []
        for plan in plans:
            memory = self._memory(plan)
            is_drawn = plan.params.temperature > 0 and not self._settings.verification.greedy_drafts
            probs.append(memory.draft_probs[: plan.num_draft_tokens] if is_drawn else ())
            memory.draft_probs = ()
        return self.resident.launch(plans, probs)

    def _leave(self, plan: RequestPlan) -> None:
        """A request's step runs elsewhere: what its drafts were drawn from comes along."""
        if self.resident is not None and plan.request_id in self.resident:
            self._memory(plan).draft_probs = self.resident.take_probs(plan.request_id)
            self.resident.forget(plan.request_id)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        """Target rows of all requests in one forward, then verification, then the module passes."""
        started = self._now()
        masks_before = self._mask_counts(plan.requests)
        self.copy_blocks(plan.copies)
        for request in plan.requests:
            self._leave(request)
        unseen = self._prepare_media(plan.requests)
        able = [request for request in plan.requests if request.request_id not in unseen]
        finite = self._run_target([p for p in able if p.token_ids])
        broken = {p.request_id for p in able if not _is_whole(p, finite, 0)}
        whole = [request for request in able if request.request_id not in broken]
        for request in whole:
            if request.terms.num_prompt_logprobs is not None:
                self._memory(request).score_prompt(request, partial(self._logits_of_rows, request))
        sampling = [p for p in whole if p.is_sampling and p.num_tokens < p.terms.max_total_tokens]
        logits = self._logits(sampling)
        forwarded = self._now()
        decisions = self._decide(sampling, logits)
        broken |= {
            p.request_id for p in sampling if not _is_whole(p, finite, len(decisions[p.request_id].token_ids) - 1)
        }
        whole = [request for request in whole if request.request_id not in broken]
        verified = self._now()
        drafts = self._draft(whole, decisions)
        drafted = self._now()
        masks, num_masks = (now - before for now, before in zip(self._mask_counts(plan.requests), masks_before))
        times = StepTimes(forwarded - started, verified - forwarded, drafted - verified, masks, int(num_masks))
        results = unseen | {
            p.request_id: RequestResult.broken(p.request_id)
            if p.request_id in broken
            else self._result(p, decisions, drafts)
            for p in able
        }
        return StepResult(tuple(results[p.request_id] for p in plan.requests), times)

    def _prepare_media(self, plans: Sequence[RequestPlan]) -> dict[str, RequestResult]:
        """Make ready what the step reads. Returns the results of requests that a tower cannot read; they end alone."""
        if self.media is None:
            return {}
        unseen = {}
        self.media.begin_step()
        for plan in plans:
            if plan.terms.media:
                read = (*plan.token_ids, *(plan.window.token_ids if plan.window is not None else ()))
                try:
                    self.media.prepare(read, plan.terms.media)
                except Exception as error:  # any tower's own
                    message = f"media cannot be shown to the model: {described(error)}"
                    unseen[plan.request_id] = RequestResult(plan.request_id, error=message, is_broken=True)
        return unseen

    def memory_of(self, request_id: str) -> RequestMemory | None:
        """What is kept of a request between steps, with what its pending drafts were drawn from; it stays here."""
        memory = self._memories.get(request_id)
        if memory is not None and self.resident is not None and request_id in self.resident:
            memory.draft_probs = self.resident.take_probs(request_id)
            self.resident.forget(request_id)
        return memory

    def keep_memory(self, request_id: str, memory: RequestMemory) -> None:
        """Keep this of a request that was begun elsewhere."""
        self._memories[request_id] = memory

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that is over."""
        self._memories.pop(request_id, None)
        if self.resident is not None:
            self.resident.forget(request_id)

    def forget_all(self) -> None:
        """Drop what is kept for any request."""
        self._memories.clear()
        if self.resident is not None:
            self.resident.forget_all()

    def _memory(self, plan: RequestPlan) -> RequestMemory:
        memory = self._memories.get(plan.request_id)
        if memory is None:
            memory = RequestMemory.of(plan.terms, self.target.vocab_size, self._settings.compiler)
            self._memories[plan.request_id] = memory
        return memory

    def _mask_counts(self, plans: Sequence[RequestPlan]) -> tuple[float, float]:
        """Seconds and number of the masks made so far for these requests."""
        rules = (memory.rules for p in plans if (memory := self._memories.get(p.request_id)) is not None)
        grammars = [state.grammar for state in rules if state is not None and state.grammar is not None]
        return sum(grammar.seconds for grammar in grammars), sum(grammar.num_masks for grammar in grammars)

    def _result(
        self, plan: RequestPlan, decisions: Mapping[str, Decision], drafts: Mapping[str, tuple[int, ...]]
    ) -> RequestResult:
        request_id = plan.request_id
        decision = decisions.get(request_id, Decision(()))
        scored: tuple[TokenLogprob | None, ...] = ()
        if (
            plan.is_sampling
            and plan.num_tokens == len(plan.terms.prompt_token_ids)
            and plan.terms.num_prompt_logprobs is not None
        ):
            scored = tuple(self._memories[request_id].prompt_logprobs)
        return RequestResult(
            request_id, decision.token_ids, drafts.get(request_id, ()), decision.logprobs, scored, decision.error
        )

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def copy_blocks(self, copies: Sequence[BlockCopy], *, is_final: bool = False) -> None:
        """Move evicted blocks to the host and others back, and copy blocks that choices share. In the stream's order.

        is_final: all copies have been made when this returns.
        """
        for copy in copies:
            from_host, to_host = copy.kind is CopyKind.TO_DEVICE, copy.kind is CopyKind.TO_HOST
            sources = self._storage_of(is_host=from_host).block(copy.group, copy.source)
            destinations = self._storage_of(is_host=to_host).block(copy.group, copy.destination)
            for source, destination in zip(sources, destinations):
                destination.copy_(source, non_blocking=True)
        if is_final and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _storage_of(self, *, is_host: bool) -> CacheStorage:
        if not is_host:
            return self.storage
        assert self.host_storage is not None
        return self.host_storage

    def _run_target(self, plans: Sequence[RequestPlan]) -> dict[str, Tensor]:
        """Forward all target rows and store h0. Returns which rows are finite, by request, unless all are."""
        if not plans:
            return {}
        inputs = target_inputs(plans, self.storage, self.target.device, self.media)
        forward = self._graphed or self.target.forward
        hidden = forward(inputs.token_ids, inputs.positions, inputs.paged)
        self.storage.hidden.index_copy_(0, inputs.hidden_slots, hidden)
        is_finite = hidden.sum(dim=-1, dtype=torch.float32).isfinite()
        if bool(is_finite.all()):
            return {}
        ends = itertools.accumulate(len(plan.token_ids) for plan in plans)
        return {plan.request_id: is_finite[end - len(plan.token_ids) : end] for plan, end in zip(plans, ends)}

    def _logits(self, plans: Sequence[RequestPlan]) -> Tensor:
        """The target's logits [R, V] at the rows that are sampled, from h0 as it is cached."""
        device = self.target.device
        if not plans:
            return torch.empty(0, self.target.vocab_size, device=device)
        return self.target.logits(self.storage.hidden.index_select(0, sampled_slots(plans, self.storage, device)))

    def _logits_of_rows(self, plan: RequestPlan, first: int, end: int) -> Tensor:
        """The target's logits [end - first, V] at rows of one request that are cached."""
        slots = self.storage.slots(plan.blocks[self.storage.layout.hidden_group], end)[first:]
        return self.target.logits(self.storage.hidden.index_select(0, slots.to(self.target.device)))

    def _decide(self, plans: Sequence[RequestPlan], logits: Tensor) -> dict[str, Decision]:
        """Decide the tokens of each request, and let its rules know those that it keeps."""
        memories = [self._memory(plan) for plan in plans]
        decisions = self._verification.decide(plans, memories, logits) if plans else {}
        for plan, memory in zip(plans, memories):
            if memory.rules is not None:
                assert memory.rules.num_tokens == plan.num_tokens, "the rules and the scheduler disagree about tokens"
                token_ids = decisions[plan.request_id].token_ids
                memory.rules.commit(token_ids[: plan.terms.first_stop(token_ids, plan.num_tokens)[0]])
        return decisions

    def _draft(self, plans: Sequence[RequestPlan], decisions: Mapping[str, Decision]) -> dict[str, tuple[int, ...]]:
        """Run the module passes of every request that has a window, and return the new drafts."""
        pairs = [(plan, self._window(plan, decisions.get(plan.request_id))) for plan in plans if plan.window]
        members = [(plan, window) for plan, window in pairs if window is not None]
        if not members or self._drafter is None:
            return {}
        windows = [window for _, window in members]
        memories = [self._memory(plan) for plan, _ in members]
        force_greedy = self._settings.verification.greedy_drafts
        sampling = sampling_tensors([plan for plan, _ in members], self.target.device, force_greedy=force_greedy)
        drafts = self._drafter.run(windows, sampling, [memory.rules for memory in memories])
        for window, memory, probs in zip(windows, memories, drafts.probs):
            if window.num_drafts:  # else drafts of an earlier step are still pending, with what they were drawn from
                memory.draft_probs = probs
        return {
            window.request_id: tuple(token_id for token_id in row if token_id >= 0)
            for window, row in zip(windows, drafts.token_ids.tolist())
        }

    def _window(self, plan: RequestPlan, decision: Decision | None) -> Window | None:
        """The window of a request now that its new tokens are known; None if it has ended or has no use for drafts."""
        planned, layout = plan.window, self.storage.layout
        assert planned is not None
        start, end, exact = planned.start, planned.end, planned.exact
        num_tokens, num_passes, num_drafts = plan.num_tokens, planned.depth, 0
        new_token_ids: tuple[int, ...] = ()
        if decision is not None:
            new_token_ids = decision.token_ids
            kept, reason = plan.terms.first_stop(new_token_ids, num_tokens)
            num_tokens += kept
            # A step emits up to drafts + 1 tokens: a draft that could not be used is not made.
            num_drafts = num_passes = min(planned.depth, plan.terms.max_total_tokens - num_tokens - 1)
            end = num_tokens - 1
            if reason is not None or decision.error is not None or num_drafts <= 0:
                return None
            exact = exact.after_verify(len(new_token_ids) - 1)
            start = exact.window_start(num_passes)
        return Window(
            request_id=plan.request_id,
            start=start,
            end=end,
            num_tokens=num_tokens,
            token_ids=planned.token_ids[start - planned.start :] + new_token_ids,
            num_exact_rows=exact.num_exact_rows,
            num_passes=num_passes,
            num_drafts=num_drafts,
            origin=exact.origin,
            hidden_slots=self.storage.slots(plan.blocks[layout.hidden_group], end)[start:],
            module_slots={
                group: self.storage.slots(plan.blocks[group], end + max(0, num_drafts - 1))
                for group in layout.module_groups
            },
        )


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_whole(plan: RequestPlan, finite: Mapping[str, Tensor], num_accepted: int) -> bool:
    """Whether the rows of a request that stay are finite: those of rejected drafts do not count."""
    rows = finite.get(plan.request_id)
    return rows is None or bool(rows[: len(plan.token_ids) - plan.num_draft_tokens + num_accepted].all())
