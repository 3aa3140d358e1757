"""The loss of all depths against the target's distribution, in chunks: their logits never exist at once.

Depth k at row i predicts token i+k+2, and so is compared with the target's distribution at row i+k+1. Positions are
chosen of the target, and every depth takes the row that meets it: the target's logits are computed once for all depths.
Gradients with respect to the hidden states are made along with the loss, while a chunk's logits are at hand (as
in Hsu et al., 2024, "Liger kernel"): nothing is computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.training.chain import TeacherForcedChain
from foredraft.training.frozen_target import FrozenTarget, HeadRows
from foredraft.training.recipe import Recipe

_CHUNK_NUMBERS = 1 << 28
"""Logits of a chunk: a few of these tensors are there at once."""
_MAX_CHUNK_ROWS = 8192
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True)
class Losses:
    """Of one batch, by depth [K]: the loss that is trained on; match: share of positions where the greedy draft is the
    target's greedy token; overlap: mean probability that a sampled draft is accepted at temperature 1."""

    loss: Tensor
    match: Tensor
    overlap: Tensor


class Objective:
    """Computes the losses of batches of text."""

    def __init__(
        self,
        target: FrozenTarget,
        chain: TeacherForcedChain,
        recipe: Recipe,
        draft_tokens: list[int] | None,
        dtype: torch.dtype,
    ) -> None:
        self._target, self._chain, self._recipe, self._dtype = target, chain, recipe, dtype
        self._whole_head = target.head()
        self._draft_head = self._whole_head if draft_tokens is None else target.head(draft_tokens)
        self._terms: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = chunk_terms

    def compile(self) -> None:
        """Fuse what is done with the logits of a chunk."""
        self._terms = torch.compile(chunk_terms, dynamic=False)

    def __call__(self, token_ids: Tensor, is_spoken: Tensor, depths: int, generator: torch.Generator) -> Losses:
        """token_ids, is_spoken [B, L]; the first `depths` modules take part. generator: decides which positions."""
        hidden = self._target.hidden(token_ids)
        first, last = depths, token_ids.shape[1] - 1  # rows of the target that every depth has a row for
        chosen = self._choose(is_spoken[:, first + 1 : last + 1], generator)
        of_target = _rows(self._target.before_head(hidden), first, last, chosen)
        labels = token_ids[:, first + 1 : last + 1].flatten()[chosen]
        outputs = []
        chain = self._chain.run(token_ids, hidden, depths, self._dtype)
        output: Tensor | None = next(chain)
        for module in range(depths):
            assert output is not None
            start = first - module - 1
            outputs.append(_rows(self._target.before_head(output), start, start + last - first, chosen))
            if module + 1 < depths:
                output = chain.send(self._own_inputs(token_ids, module + 1, output, generator))
        sums = _ChunkedLoss.apply(torch.stack(outputs), of_target, labels, self)  # type: ignore[no-untyped-call]
        return Losses(*(sums / len(chosen)))

    def total(self, losses: Losses) -> Tensor:
        """What is minimised: the sum over depths, with their weights."""
        decay = self._recipe.depth_decay ** torch.arange(len(losses.loss), device=losses.loss.device)
        return (losses.loss * decay).sum()

    def _choose(self, is_spoken: Tensor, generator: torch.Generator) -> Tensor:
        """Positions drawn without replacement, those that an assistant said more often (Efraimidis and Spirakis, 2006);
        a whole number of equal chunks."""
        weights = torch.where(is_spoken.flatten(), 1.0, max(self._recipe.other_weight, _LEAST_WEIGHT))
        wanted = max(1, int(self._recipe.position_share * weights.numel()))
        num_chunks = -(-wanted // self._chunk_rows)
        wanted -= wanted % num_chunks
        if wanted == weights.numel():
            return torch.arange(wanted, device=weights.device)
        keys = torch.rand(weights.shape, generator=generator, device=weights.device).log() / weights
        return keys.topk(wanted, sorted=False).indices

    @property
    def _chunk_rows(self) -> int:
        return max(1, min(_MAX_CHUNK_ROWS, _CHUNK_NUMBERS // self._whole_head.weight.shape[0]))

    @torch.no_grad()
    def _own_inputs(
        self, token_ids: Tensor, module: int, previous: Tensor, generator: torch.Generator
    ) -> Tensor | None:
        """Embeddings in which some of the text's tokens are the drafts of the module before; None: the text's own."""
        share = self._recipe.on_policy_share
        if not share:
            return None
        embeddings = self._chain.inputs(token_ids, module)
        batch_size, length, size = embeddings.shape
        count = max(1, int(share * batch_size * length))
        rows = torch.rand(batch_size * length, generator=generator, device=token_ids.device).topk(count).indices
        hidden = self._target.before_head(previous).reshape(-1, size)[rows]
        drafts = torch.cat(
            [_logits(part, self._draft_head).argmax(-1) for part in torch.split(hidden, self._chunk_rows)]
        )
        if self._draft_head.token_ids is not None:
            drafts = self._draft_head.token_ids[drafts]
        replaced = embeddings.reshape(-1, size).index_copy(0, rows, self._chain.embed(drafts))
        return replaced.view_as(embeddings)

    def loss_and_gradient(self, hidden: Tensor, of_target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [K, M, H], of_target [M, H], labels [M] -> sums over M [3, K], the gradient of the first [K, M, H]."""
        num_chunks = -(-hidden.shape[1] // self._chunk_rows)
        draft_head, whole = self._draft_head, self._whole_head
        columns = _columns(draft_head, whole.weight.shape[0])
        weight = draft_head.weight
        sums = torch.zeros(3, len(hidden), device=hidden.device)
        gradients = []
        parts = (hidden.chunk(num_chunks, dim=1), of_target.chunk(num_chunks), labels.chunk(num_chunks))
        for states, target_states, tokens in zip(*parts):
            target_logits = _logits(target_states, whole)
            normalizer = target_logits.float().logsumexp(-1, keepdim=True)
            best = target_logits.argmax(-1)
            if columns is not None:
                assert draft_head.token_ids is not None
                target_logits = target_logits.index_select(1, draft_head.token_ids)
                best, tokens = columns[best], columns[tokens]
            of_chunk = []
            for depth, own in enumerate(states):
                logits = _logits(own, draft_head)
                loss, match, overlap, slope = self._terms(
                    logits, target_logits, normalizer, best, tokens,
                    self._recipe.targets == "hard", self._recipe.overlap_weight,
                )  # fmt: skip
                sums[0, depth] += loss
                sums[1, depth] += match
                sums[2, depth] += overlap
                of_chunk.append(slope @ weight)
            gradients.append(torch.stack(of_chunk))
        return sums, torch.cat(gradients, dim=1)


def chunk_terms(
    logits: Tensor,
    target_logits: Tensor,
    normalizer: Tensor,
    best: Tensor,
    labels: Tensor,
    is_hard: bool,
    overlap_weight: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over a chunk: loss, matches, overlap; and the gradient of the loss with respect to `logits`, in their dtype.

    logits, target_logits [C, V] in the same columns; normalizer [C, 1]: log of the sum of the target's exponentials
    over all tokens, so that its probabilities here may add up to less than 1, and a row counts by what they do. best,
    labels [C]: columns of the target's greedy token and of the text's, -1 where there is none.
    """
    wide = logits.float()
    log_sum = wide.logsumexp(-1, keepdim=True)
    log_probs = wide - log_sum
    probs = log_probs.exp()
    target_probs = (target_logits.float() - normalizer).exp()
    is_less = probs < target_probs
    overlap = torch.where(is_less, probs, target_probs).sum(-1)
    if is_hard:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        wanted = (columns == labels[:, None]).float()
    else:
        wanted = target_probs
    loss = -(wanted * log_probs).sum(-1)
    slope = wanted.sum(-1, keepdim=True) * probs - wanted
    if overlap_weight:
        loss = loss + overlap_weight * (1 - overlap)
        rising = torch.where(is_less, probs, 0.0)
        slope = slope - overlap_weight * (rising - probs * rising.sum(-1, keepdim=True))
    match = (wide.argmax(-1) == best).float()
    return loss.sum(), match.sum(), overlap.sum(), slope.to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Sums [3, K] of loss, matches and overlap; only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, of_target: Tensor, labels: Tensor, objective: Objective) -> Tensor:
        sums, gradient = objective.loss_and_gradient(hidden, of_target, labels)
        ctx.save_for_backward(gradient.to(hidden.dtype))
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0][0].to(gradient.dtype)[:, None, None], None, None, None


def _rows(hidden: Tensor, first: int, last: int, chosen: Tensor) -> Tensor:
    """hidden [B, L, H], of whose rows first..last-1 some are chosen, counted over all texts -> [M, H]."""
    return hidden[:, first:last].reshape(-1, hidden.shape[-1]).index_select(0, chosen)


def _logits(hidden: Tensor, head: HeadRows) -> Tensor:
    return F.linear(hidden.to(head.weight.dtype), head.weight, head.bias)


def _columns(head: HeadRows, vocab_size: int) -> Tensor | None:
    """For each token id its column in the draft head, -1 if it has none; None: they are the same."""
    if head.token_ids is None:
        return None
    columns = torch.full((vocab_size,), -1, device=head.weight.device)
    columns[head.token_ids] = torch.arange(len(head.token_ids), device=head.weight.device)
    return columns
