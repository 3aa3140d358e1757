"""Deciding a step's tokens: rules, then drafts accepted or not and the next token drawn, then log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.config import VerificationMethod
from foredraft.logprobs import LogprobsMode, TokenLogprob
from foredraft.plan import RequestPlan
from foredraft.runner.request_memory import RequestMemory
from foredraft.sampling.logprobs import token_logprobs
from foredraft.sampling.philox import Stream, uniform
from foredraft.sampling.processors import RowError, RuledRows, apply_rules
from foredraft.sampling.sampler import RowSettings, SamplingTensors, greedy, probabilities, sample
from foredraft.speculation.verifier import block_verify, rejection_sample, typical_accept, verify_greedy


class Decision(NamedTuple):
    """Tokens that follow the committed ones: accepted drafts, then one of the target's own. error: why none follows."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class VerificationSettings:
    """How drafts are decided, for all requests of an engine.

    epsilon and delta are those of lossy-typical. synthetic_rates: accept drafts by chance instead, whatever they are:
    the rate at each depth among drafts whose predecessor was accepted, the last for all deeper ones. drafted_token_ids:
    column j of what drafts were drawn from is token j of these (`DraftHead.token_ids`); None: token j itself.
    """

    method: VerificationMethod = "rejection"
    greedy_drafts: bool = False
    epsilon: float = 0.0
    delta: float = 0.0
    logprobs_mode: LogprobsMode = "raw"
    synthetic_rates: tuple[float, ...] | None = None
    drafted_token_ids: Tensor | None = None


class Member(NamedTuple):
    """A request whose next tokens are decided, what is kept of it, and the first of its rows in the logits."""

    plan: RequestPlan
    memory: RequestMemory
    first_row: int

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        num_drafts = self.plan.num_draft_tokens
        return self.plan.token_ids[-num_drafts:] if num_drafts else ()


class Verification:
    """Decides which drafts are kept and which token follows, for all requests of a step."""

    def __init__(self, settings: VerificationSettings) -> None:
        self._settings = settings

    def decide(
        self, plans: Sequence[RequestPlan], memories: Sequence[RequestMemory], logits: Tensor
    ) -> dict[str, Decision]:
        """logits: the target's own [sum(drafts + 1), V], the rows of each request in order. Returns one by request."""
        first_rows = _cumulative([plan.num_draft_tokens + 1 for plan in plans])
        members = [Member(*each) for each in zip(plans, memories, first_rows)]
        ruled = [RuledRows(m.memory.rules, m.first_row, m.draft_token_ids) for m in members if m.memory.rules]
        scores, errors = apply_rules(logits, ruled) if ruled else (logits, {})
        emitted: dict[str, tuple[int, ...]] = {}
        for is_greedy in (True, False):
            chosen = [member for member in members if (member.plan.params.temperature == 0) == is_greedy]
            if chosen:
                rows = _padded_rows(chosen).to(logits.device)
                # Drafts after a row where no token can be chosen decide nothing, not even how many are accepted.
                drafts = _pending_drafts(chosen, errors).to(logits.device)
                decide = self._greedy if is_greedy else self._sampled
                ids = decide(chosen, drafts, scores, rows)
                for member, row in zip(chosen, ids.tolist()):
                    emitted[member.plan.request_id] = tuple(token_id for token_id in row if token_id >= 0)
        decisions = {request_id: Decision(ids) for request_id, ids in emitted.items()}
        for request_id, (num_drafts, message) in errors.items():
            if num_drafts < len(emitted[request_id]):  # what comes before stays, as in plain decoding
                decisions[request_id] = Decision(emitted[request_id][:num_drafts], error=message)
        self._add_logprobs(members, decisions, logits, scores)
        return decisions

    def _greedy(self, members: Sequence[Member], drafts: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        own = greedy(scores)[rows]
        if self._settings.synthetic_rates is not None:
            return self._synthetic(members, drafts, own, scores, rows)
        return verify_greedy(drafts, own)

    def _sampled(self, members: Sequence[Member], drafts: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        settings, device = self._settings, scores.device
        sampling = sampling_tensors([member.plan for member in members], device)
        per_row = sampling.rows(torch.arange(len(members), device=device).repeat_interleave(rows.shape[1]))
        target_probs = probabilities(scores[rows.flatten()], per_row).view(*rows.shape, -1)
        positions = torch.tensor([member.plan.num_tokens for member in members], device=device)
        if settings.synthetic_rates is not None:
            # The target's own token of each row, drawn by the numbers that would draw it without drafts.
            columns = torch.arange(rows.shape[1], device=device)
            drawn = uniform(sampling.seeds[:, None], positions[:, None] + columns, Stream.RECOVER)
            own = sample(target_probs.flatten(0, 1), drawn.flatten()).view_as(rows)
            return self._synthetic(members, drafts, own, scores, rows)
        if settings.method == "lossy-typical":
            return typical_accept(drafts, target_probs, sampling.seeds, positions, settings.epsilon, settings.delta)
        verify = block_verify if settings.method == "block" else rejection_sample
        draft_probs = None
        if not settings.greedy_drafts:
            draft_probs = _pending_probs(members, drafts, target_probs, settings.drafted_token_ids)
        return verify(drafts, draft_probs, target_probs, sampling.seeds, positions)

    def _synthetic(
        self, members: Sequence[Member], drafts: Tensor, own: Tensor, scores: Tensor, rows: Tensor
    ) -> Tensor:
        """own [B, K+1]: the target's token of each row. A draft that a request's rules forbid is not accepted."""
        rates, device = self._settings.synthetic_rates, scores.device
        assert rates is not None
        by_depth = torch.tensor([rates[min(depth, len(rates) - 1)] for depth in range(drafts.shape[1])], device=device)
        seeds = torch.tensor([member.plan.seed for member in members], device=device)
        positions = torch.tensor([member.plan.num_tokens for member in members], device=device)
        can_follow = scores[rows[:, :-1], drafts.clamp(min=0)].isfinite() & (drafts >= 0)
        return accept_by_chance(drafts, can_follow, own, by_depth, seeds, positions)

    def _add_logprobs(
        self, members: Sequence[Member], decisions: dict[str, Decision], logits: Tensor, scores: Tensor
    ) -> None:
        wanting = [m for m in members if m.plan.params.logprobs is not None and decisions[m.plan.request_id].token_ids]
        if not wanting:
            return
        counts = [len(decisions[member.plan.request_id].token_ids) for member in wanting]
        rows = [member.first_row + j for member, count in zip(wanting, counts) for j in range(count)]
        index = torch.tensor(rows, device=logits.device)
        if self._settings.logprobs_mode == "raw":
            logprobs = logits[index].float().log_softmax(dim=-1)
        else:
            repeated = [member.plan for member, count in zip(wanting, counts) for _ in range(count)]
            logprobs = _processed_logprobs(repeated, scores[index])
        for member, count, first in zip(wanting, counts, _cumulative(counts)):
            decision, num_top = decisions[member.plan.request_id], member.plan.params.logprobs
            assert num_top is not None
            found = token_logprobs(logprobs[first : first + count], decision.token_ids, num_top)
            decisions[member.plan.request_id] = decision._replace(logprobs=tuple(found))


def accept_by_chance(
    draft_token_ids: Tensor,
    can_follow: Tensor,
    target_token_ids: Tensor,
    rates: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Emit drafts by given rates, whatever they are, and one token of the target's. NOT the target's output.

    draft_token_ids [B, K] int64, padded with -1; can_follow [B, K] bool, False for what must not be accepted;
    target_token_ids [B, K+1] int64; rates [K]: the chance of each depth once those before it are accepted. seeds,
    positions [B] int64, of draft 0: the numbers drawn are functions of the seed and of the position that they decide.
    Each position is decided once at most, so they are independent from cycle to cycle.
    Returns ids [B, K+1], -1 after the last emitted token.
    """
    columns = torch.arange(target_token_ids.shape[1], device=target_token_ids.device)
    drawn = uniform(seeds[:, None], positions[:, None] + columns[:-1], Stream.ACCEPT)
    num_accepted = ((drawn < rates) & can_follow).cumprod(dim=1).sum(dim=1, keepdim=True)
    drafts = torch.nn.functional.pad(draft_token_ids, (0, 1), value=-1)
    emitted = torch.where(columns < num_accepted, drafts, target_token_ids)
    return emitted.masked_fill(columns > num_accepted, -1)


def sampling_tensors(
    plans: Sequence[RequestPlan], device: torch.device, *, force_greedy: bool = False
) -> SamplingTensors:
    """Temperature, filters and seed of each request."""
    rows = []
    for plan in plans:
        params = plan.params
        temperature = 0.0 if force_greedy else params.temperature
        rows.append(RowSettings(temperature, params.top_k, params.top_p, plan.seed, params.min_p, params.typical_p))
    return SamplingTensors.from_params(rows, device)


def _processed_logprobs(plans: Sequence[RequestPlan], scores: Tensor) -> Tensor:
    """Of the distribution that is sampled from; of a greedy request, which has none, after its rules."""
    sampled = probabilities(scores, sampling_tensors(plans, scores.device)).log()
    is_greedy = torch.tensor([plan.params.temperature == 0 for plan in plans], device=scores.device)
    return torch.where(is_greedy[:, None], scores.float().log_softmax(dim=-1), sampled)


def _cumulative(counts: Sequence[int]) -> list[int]:
    """Where each part begins when parts of these sizes lie end to end."""
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _padded_rows(members: Sequence[Member]) -> Tensor:
    """Rows of the logits of each request, [B, max drafts + 1]; padding repeats the last."""
    last = torch.tensor([member.plan.num_draft_tokens for member in members]).unsqueeze(1)
    offsets = torch.arange(int(last.max()) + 1).unsqueeze(0)
    return torch.tensor([member.first_row for member in members]).unsqueeze(1) + torch.minimum(offsets, last)


def _pending_drafts(members: Sequence[Member], errors: Mapping[str, RowError]) -> Tensor:
    """[B, max drafts] int64, padded with -1; those before a request's error."""
    width = max(member.plan.num_draft_tokens for member in members)
    padded = torch.full((len(members), width), -1, dtype=torch.int64)
    for row, member in zip(padded, members):
        error = errors.get(member.plan.request_id)
        if drafts := member.draft_token_ids[: None if error is None else error.num_drafts]:
            row[: len(drafts)] = torch.tensor(drafts)
    return padded


def _pending_probs(members: Sequence[Member], drafts: Tensor, target_probs: Tensor, token_ids: Tensor | None) -> Tensor:
    """What the pending drafts were drawn from, padded to [B, K, V]; a draft without chance is a point mass."""
    padded = torch.zeros_like(target_probs[:, 1:])
    for index, member in enumerate(members):
        for depth, probs in enumerate(member.memory.draft_probs[: member.plan.num_draft_tokens]):
            if probs is None:
                padded[index, depth, drafts[index, depth].clamp(min=0)] = 1.0
            else:
                padded[index, depth, slice(len(probs)) if token_ids is None else token_ids] = probs
    return padded
