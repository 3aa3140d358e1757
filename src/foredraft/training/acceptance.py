"""Exact acceptance of a chain of modules on texts of the target, without the engine: from teacher-forced passes.

A lossless engine emits the target's own text, and whether draft k from row i is accepted depends on that text alone:
greedily, it is if it is the text's token x; sampled, with probability min(1, draft(x) / target(x)), given that x is
what came out (of all ways to emit x, that is the share in which the draft was accepted). Where cycles start follows
from what was accepted before: a sum over all ways to cut a text into cycles gives their expected number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.training.chain import TeacherForcedChain
from foredraft.training.frozen_target import FrozenTarget, HeadRows


@dataclass(frozen=True)
class Span:
    """A part of a text that is generated: tokens start..end-1; no more than `limit` could have come (limit >= end)."""

    start: int
    end: int
    limit: int


@dataclass(frozen=True)
class ChainAcceptance:
    """Counted or expected: cycles that had room for drafts of all depths, and accepted drafts of each depth."""

    num_cycles: float
    accepted: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the cycles in which the draft of each depth was accepted."""
        return tuple(each / self.num_cycles if self.num_cycles else 0.0 for each in self.accepted)

    @property
    def mean_length(self) -> float:
        """Tokens a cycle, the target's own included."""
        return 1.0 + sum(self.rates)

    def __add__(self, other: ChainAcceptance) -> ChainAcceptance:
        accepted = tuple(a + b for a, b in zip(self.accepted, other.accepted))
        return ChainAcceptance(self.num_cycles + other.num_cycles, accepted)

    @classmethod
    def none(cls, depths: int) -> ChainAcceptance:
        """Of no text."""
        return cls(0.0, (0.0,) * depths)


@torch.no_grad()
def accept_chances(
    target: FrozenTarget,
    chain: TeacherForcedChain,
    token_ids: Tensor,
    depths: int,
    temperature: float,
    dtype: torch.dtype,
    head: HeadRows | None = None,
) -> Tensor:
    """token_ids [B, L] -> [B, depths, L]: how likely the draft of each module at each row is to be accepted, 0 where
    the text has no token for it. head: rows that drafts are chosen among; None: all."""
    whole = target.head()
    head = head or whole
    hidden = target.hidden(token_ids)
    wanted = token_ids[:, 1:]
    own: Tensor | None = None
    if temperature > 0:
        own = _log_probs(target.before_head(hidden[:, :-1]), whole, wanted, temperature)
    chances = torch.zeros(len(token_ids), depths, token_ids.shape[1], device=token_ids.device)
    for module, output in enumerate(chain.run(token_ids, hidden, depths, dtype)):
        shift = module + 1
        num_rows = token_ids.shape[1] - shift - 1
        states = target.before_head(output[:, :num_rows])
        if own is None:
            chosen = torch.stack([_greedy(rows, head) for rows in states])
            chances[:, module, :num_rows] = (chosen == wanted[:, shift:]).float()
        else:
            drafted = _log_probs(states, head, wanted[:, shift:], temperature)
            chances[:, module, :num_rows] = (drafted - own[:, shift:]).exp().clamp(max=1.0)
    return chances


def chain_acceptance(chances: Tensor, span: Span) -> ChainAcceptance:
    """chances [K, L] of one text, on the CPU -> what cycles over the span are expected to come to.

    The first token comes from the prefill. A cycle at row i has i + 2 tokens before it. Those near the limit of tokens,
    which leaves no room for all drafts and a token of the target's own, are not counted.
    """
    depths = len(chances)
    rows: list[list[float]] = chances.T.tolist()
    starting = [0.0] * (span.end + depths + 2)
    starting[span.start - 1] = 1.0
    num_cycles, accepted = 0.0, [0.0] * depths
    for row in range(span.start - 1, min(span.end - 2, span.limit - depths - 2)):
        reach = starting[row]
        if reach == 0.0:
            continue
        num_cycles += reach
        for module in range(depths):
            is_inside = row + module + 2 < span.end
            further = reach * rows[row][module] if is_inside else 0.0
            accepted[module] += further
            starting[row + module + 1] += reach - further
            reach = further
        starting[row + depths + 1] += reach
    return ChainAcceptance(num_cycles, tuple(accepted))


def counted_acceptance(token_depths: Sequence[int], depths: int, max_tokens: int) -> ChainAcceptance:
    """The same, of an answer as the engine gave it. token_depths: as in `Choice`; max_tokens: the most there can be."""
    num_cycles, accepted = 0, [0] * depths
    begin = 1  # tokens of the answer before a cycle
    while begin < len(token_depths) and max_tokens - begin >= depths + 1:
        num_cycles += 1
        end = begin
        while end < len(token_depths) and token_depths[end]:
            accepted[end - begin] += 1
            end += 1
        begin = end + 1
    return ChainAcceptance(float(num_cycles), tuple(map(float, accepted)))


def spoken_spans(is_spoken: Sequence[bool]) -> list[Span]:
    """The assistant's turns of a row, those that something stands before and that hold two tokens or more."""
    spans, start = [], None
    for index, flag in enumerate([*is_spoken, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            if start > 0 and index - start > 1:
                spans.append(Span(start, index, 2 * len(is_spoken)))
            start = None
    return spans


def _greedy(hidden: Tensor, head: HeadRows) -> Tensor:
    chosen = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).argmax(-1)
    return chosen if head.token_ids is None else head.token_ids[chosen]


def _log_probs(hidden: Tensor, head: HeadRows, tokens: Tensor, temperature: float) -> Tensor:
    """hidden [B, R, H] -> log of the probability of tokens [B, R]; -inf for those that the head does not have."""
    return torch.stack([_text_log_probs(*pair, head, temperature) for pair in zip(hidden, tokens)])


def _text_log_probs(hidden: Tensor, tokens: Tensor, head: HeadRows, temperature: float) -> Tensor:
    logits = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).float() / temperature
    log_probs = logits.log_softmax(-1)
    if head.token_ids is None:
        return log_probs.gather(1, tokens[:, None])[:, 0]
    is_token = head.token_ids == tokens[:, None]
    found = log_probs.gather(1, is_token.int().argmax(1, keepdim=True))[:, 0]
    return torch.where(is_token.any(1), found, float("-inf"))
