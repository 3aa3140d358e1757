"""One step on tensors: the target's forward, verification, drafting."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.models.target import TargetModel
from foredraft.plan import BlockCopy, RequestPlan, RequestResult, StepPlan, StepResult, StepTimes
from foredraft.runner.inputs import sampled_slots, target_inputs
from foredraft.sampling.sampler import SamplingTensors, greedy, probabilities
from foredraft.speculation.drafter import Drafter, Window
from foredraft.speculation.verifier import rejection_sample, verify_greedy
from foredraft.stopping import first_stop

Emitted = dict[str, tuple[int, ...]]
"""Tokens by request: accepted drafts, then one of the target's own."""


class ModelRunner:
    """Executes plans. Its only state is the paged storage and the probabilities that pending drafts were drawn from."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        storage: CacheStorage,
        host_storage: CacheStorage | None = None,
        *,
        greedy_drafts: bool = False,
    ) -> None:
        self.target = target
        self._drafter = drafter
        self.storage = storage
        self.host_storage = host_storage
        self._greedy_drafts = greedy_drafts
        self._draft_probs: dict[str, Tensor] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: target rows of all requests in one forward, then verification, then the module passes."""
        started = self._now()
        self.copy_blocks(plan.copies)
        self._run_target([p for p in plan.requests if p.token_ids])
        sampling = [p for p in plan.requests if p.is_sampling]
        logits = self._logits(sampling)
        forwarded = self._now()
        emitted = self._verify(sampling, logits)
        verified = self._now()
        drafts = self._draft(plan.requests, emitted)
        drafted = self._now()
        results = tuple(
            RequestResult(p.request_id, emitted.get(p.request_id, ()), drafts.get(p.request_id, ()))
            for p in plan.requests
        )
        return StepResult(results, StepTimes(forwarded - started, verified - forwarded, drafted - verified))

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that is over."""
        self._draft_probs.pop(request_id, None)

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def copy_blocks(self, copies: Sequence[BlockCopy], *, is_final: bool = False) -> None:
        """Move evicted blocks to the host, and others back from there. On a GPU, in the order of its stream.

        is_final: all copies have been made when this returns.
        """
        for copy in copies:
            assert self.host_storage is not None
            on_device = self.storage.block(copy.group, copy.block)
            on_host = self.host_storage.block(copy.group, copy.host_block)
            for device_rows, host_rows in zip(on_device, on_host):
                source, destination = (device_rows, host_rows) if copy.to_host else (host_rows, device_rows)
                destination.copy_(source, non_blocking=True)
        if is_final and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _run_target(self, plans: Sequence[RequestPlan]) -> None:
        """Forward all target rows and store h0."""
        if plans:
            inputs = target_inputs(plans, self.storage, self.target.device)
            hidden = self.target.forward(inputs.token_ids, inputs.positions, inputs.paged)
            self.storage.hidden.index_copy_(0, inputs.hidden_slots, hidden)

    def _logits(self, plans: Sequence[RequestPlan]) -> Tensor:
        """The target's logits [R, V] at the rows that are sampled, from h0 as it is cached."""
        device = self.target.device
        if not plans:
            return torch.empty(0, self.target.vocab_size, device=device)
        return self.target.logits(self.storage.hidden.index_select(0, sampled_slots(plans, self.storage, device)))

    def _verify(self, plans: Sequence[RequestPlan], logits: Tensor) -> Emitted:
        """Decide drafts and draw the next token, greedy and sampled requests apart. logits: [sum(drafts + 1), V]."""
        emitted: Emitted = {}
        first_rows = _cumulative([plan.num_draft_tokens + 1 for plan in plans])
        for is_greedy in (True, False):
            members = [(p, f) for p, f in zip(plans, first_rows) if (p.params.temperature == 0) == is_greedy]
            if not members:
                continue
            chosen = [plan for plan, _ in members]
            rows = _padded_rows(members).to(logits.device)
            ids = self._verify_greedy(chosen, logits, rows) if is_greedy else self._verify_sampled(chosen, logits, rows)
            for plan, row in zip(chosen, ids.tolist()):
                emitted[plan.request_id] = tuple(token_id for token_id in row if token_id >= 0)
        return emitted

    def _verify_greedy(self, plans: Sequence[RequestPlan], logits: Tensor, rows: Tensor) -> Tensor:
        return verify_greedy(_pending_drafts(plans).to(logits.device), greedy(logits)[rows])

    def _verify_sampled(self, plans: Sequence[RequestPlan], logits: Tensor, rows: Tensor) -> Tensor:
        sampling = _sampling(plans, logits.device)
        num_rows = rows.shape[1]
        per_row = sampling.rows(torch.arange(len(plans), device=logits.device).repeat_interleave(num_rows))
        target_probs = probabilities(logits[rows.flatten()], per_row).view(len(plans), num_rows, -1)
        positions = torch.tensor([plan.num_tokens for plan in plans], device=logits.device)
        drafts = _pending_drafts(plans).to(logits.device)
        draft_probs = self._pending_probs(plans, target_probs)
        return rejection_sample(drafts, draft_probs, target_probs, sampling.seeds, positions)

    def _pending_probs(self, plans: Sequence[RequestPlan], target_probs: Tensor) -> Tensor | None:
        """The probabilities that the pending drafts were drawn from, padded to [B, K, V]; None: all point masses."""
        if self._greedy_drafts:
            return None
        padded = torch.zeros_like(target_probs[:, 1:])
        for row, plan in zip(padded, plans):
            if plan.num_draft_tokens:
                probs = self._draft_probs[plan.request_id][: plan.num_draft_tokens]
                row[: plan.num_draft_tokens, : probs.shape[1]] = probs
        return padded

    def _draft(self, plans: Sequence[RequestPlan], emitted: Emitted) -> dict[str, tuple[int, ...]]:
        """Run the module passes of every request that has a window, and return the new drafts."""
        pairs = [(plan, self._window(plan, emitted.get(plan.request_id, ()))) for plan in plans if plan.window]
        members = [(plan, window) for plan, window in pairs if window is not None]
        if not members or self._drafter is None:
            return {}
        windows = [window for _, window in members]
        sampling = _sampling([plan for plan, _ in members], self.target.device, force_greedy=self._greedy_drafts)
        drafts = self._drafter.run(windows, sampling)
        for window, probs in zip(windows, drafts.probs):
            if probs is not None:
                self._draft_probs[window.request_id] = probs
        return {
            window.request_id: tuple(token_id for token_id in row if token_id >= 0)
            for window, row in zip(windows, drafts.token_ids.tolist())
        }

    def _window(self, plan: RequestPlan, new_token_ids: tuple[int, ...]) -> Window | None:
        """The window of a request now that its new tokens are known; None if it has ended or has no use for drafts."""
        planned, layout = plan.window, self.storage.layout
        assert planned is not None
        start, end, exact = planned.start, planned.end, planned.exact
        num_tokens, num_passes, num_drafts = plan.num_tokens, planned.depth, 0
        if plan.is_sampling:
            kept, reason = first_stop(new_token_ids, num_tokens, plan.terms.max_total_tokens, plan.terms.stop_token_ids)
            num_tokens += kept
            # A step emits up to drafts + 1 tokens: a draft that could not be used is not made.
            num_drafts = num_passes = min(planned.depth, plan.terms.max_total_tokens - num_tokens - 1)
            end = num_tokens - 1
            if reason is not None or num_drafts <= 0:
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


def _cumulative(counts: Sequence[int]) -> list[int]:
    """Where each part begins when parts of these sizes lie end to end."""
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _padded_rows(members: Sequence[tuple[RequestPlan, int]]) -> Tensor:
    """Rows of the logits of each request, [B, max drafts + 1]; padding repeats the last."""
    width = max(plan.num_draft_tokens for plan, _ in members) + 1
    offsets = torch.arange(width).unsqueeze(0)
    last = torch.tensor([plan.num_draft_tokens for plan, _ in members]).unsqueeze(1)
    return torch.tensor([first for _, first in members]).unsqueeze(1) + torch.minimum(offsets, last)


def _pending_drafts(plans: Sequence[RequestPlan]) -> Tensor:
    """[B, max drafts] int64, padded with -1."""
    width = max(plan.num_draft_tokens for plan in plans)
    padded = torch.full((len(plans), width), -1, dtype=torch.int64)
    for row, plan in zip(padded, plans):
        if plan.num_draft_tokens:
            row[: plan.num_draft_tokens] = torch.tensor(plan.token_ids[-plan.num_draft_tokens :])
    return padded


def _sampling(plans: Sequence[RequestPlan], device: torch.device, *, force_greedy: bool = False) -> SamplingTensors:
    params = [(0.0 if force_greedy else p.params.temperature, p.params.top_k, p.params.top_p, p.seed) for p in plans]
    return SamplingTensors.from_params(params, device)
