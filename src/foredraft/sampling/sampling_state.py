"""What the rules of one request look at: its tokens so far, its grammar, its own processors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import RequestError
from foredraft.logits_processor import LogitsProcessor, StatefulLogitsProcessor, TokenHistory
from foredraft.plan import RequestTerms
from foredraft.sampling.grammar import GrammarState
from foredraft.sampling.token_counts import TokenCounts


class SamplingState:
    """The state of the rules of one request at its committed tokens.

    It looks ahead along drafts and changes with `commit` only, so that rejected drafts leave no trace.
    """

    def __init__(self, terms: RequestTerms, vocab_size: int, grammar: GrammarState | None = None) -> None:
        params = terms.params
        self.terms = terms
        self.params = params
        self.grammar = grammar
        self.stop_token_ids = np.array(sorted(t for t in terms.stop_token_ids if t < vocab_size), np.int64)
        self.bias_ids = np.array([token_id for token_id, _ in params.biases], np.int64)
        self.bias_values = np.array([bias for _, bias in params.biases], np.float32)
        self.output_token_ids: list[int] = []
        self._bad_words = BadWords(terms.bad_words) if terms.bad_words else None
        self._processors = [_ForkedProcessor(processor) for processor in params.logits_processors]
        self._allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self._allowed = torch.zeros(vocab_size, dtype=torch.bool)
            self._allowed[list(params.allowed_token_ids)] = True
        self._fixed_proposal: tuple[int | None] | None = None  # without a grammar it is always the same
        seen = [
            token_id for token_id in terms.prompt_token_ids if token_id < vocab_size
        ]  # placeholders may lie behind it
        self.counts = TokenCounts(seen) if params.has_penalty else None

    @property
    def num_tokens(self) -> int:
        return len(self.terms.prompt_token_ids) + len(self.output_token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens follow the committed ones for good."""
        self.output_token_ids += token_ids
        if self.counts is not None:
            self.counts.add(token_ids)
        if self.grammar is not None:
            self.grammar.commit(token_ids)
        for processor in self._processors:
            processor.commit(token_ids)

    def banned_after(self, draft_token_ids: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after these drafts."""
        if self._bad_words is None:
            return []
        length = self._bad_words.num_before
        tail = [*self.output_token_ids[-length:], *draft_token_ids][-length:] if length else []
        if len(tail) < length:  # what is written so far is short: the word may have begun in the prompt
            tail = [*self.terms.prompt_token_ids[len(tail) - length :], *tail]
        return self._bad_words.completed_by(tail)

    def mask_after(self, draft_token_ids: Sequence[int]) -> Tensor | None:
        """Which tokens [V] allowed_token_ids and the grammar leave after these drafts; None: all. RequestError."""
        mask = self.grammar.mask_after(draft_token_ids) if self.grammar is not None else None
        if self._allowed is None or mask is None:
            return mask if self._allowed is None else self._allowed
        return mask & self._allowed

    def holds_open(self, num_drafts: int, mask: Tensor | None) -> bool:
        """Whether min_tokens bans stop tokens after so many drafts. A grammar that leaves nothing else may end."""
        if len(self.output_token_ids) + num_drafts >= self.params.min_tokens:
            return False
        if self.grammar is None or mask is None:
            return True
        return int(mask.sum()) > int(mask[self.stop_token_ids].sum())

    def process(self, draft_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Run the request's own processors on the logits [V] float32 after these drafts.

        Raises what they raise, and ValueError for a result of another kind. They cannot bring back a banned token.
        """
        is_banned = logits == -torch.inf
        history = TokenHistory(self.terms.prompt_token_ids, (*self.output_token_ids, *draft_token_ids))
        for processor in self._processors:
            result = processor.after(draft_token_ids).process(history, logits)
            if not isinstance(result, Tensor) or result.shape != logits.shape or not result.is_floating_point():
                raise ValueError(f"it must return logits of shape {tuple(logits.shape)}")
            if result is not logits:  # the next one may change what it is given, and this one keep what it returned
                result = result.to(logits.device, torch.float32, copy=True)
            if not bool((result < torch.inf).all()):
                raise ValueError("it must return numbers or -inf")
            logits = result
        return logits.masked_fill(is_banned, -torch.inf)

    def proposal_after(self, draft_token_ids: Sequence[int], known: slice | Tensor) -> int | None:
        """The next draft, where there is nothing to choose: one token is allowed, or none that a draft head knows.

        known: the tokens that it knows, as an index on the host.
        """
        if self.grammar is None and self._fixed_proposal is not None:
            return self._fixed_proposal[0]
        try:
            mask = self.mask_after(draft_token_ids)
        except RequestError:  # if it is still there when the drafts before are accepted, it is reported then
            return None
        proposal = self._only_choice(mask, known) if mask is not None else None
        if self.grammar is None:
            self._fixed_proposal = (proposal,)
        return proposal

    @staticmethod
    def _only_choice(mask: Tensor, known: slice | Tensor) -> int | None:
        num_allowed = int(mask.sum())
        if num_allowed == 1 or (num_allowed and not bool(mask[known].any())):
            return int(mask.int().argmax())
        return None


class BadWords:
    """Sequences of tokens that must not appear, found by the token before their last."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.num_before = max(len(word) for word in words) - 1
        self._always = sorted({word[0] for word in words if len(word) == 1})
        self._by_previous: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_previous.setdefault(word[-2], []).append(word)

    def completed_by(self, tail: Sequence[int]) -> list[int]:
        """The tokens that complete a word after `tail`."""
        longer = self._by_previous.get(tail[-1], ()) if tail else ()
        found = [word[-1] for word in longer if tuple(tail[-len(word) + 1 :]) == word[:-1]]
        return [*self._always, *found]


class _ForkedProcessor:
    """A processor at the committed tokens, and its clones along the drafts that were asked for last.

    A clone that could not be made, or advanced, is kept as the error: it is raised if it is asked for.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self._drafts: list[int] = []
        self._clones: list[StatefulLogitsProcessor | Exception] = []
        if processor.is_stateful:
            assert isinstance(processor, StatefulLogitsProcessor)
            self._clones = [_advanced(processor, None)]

    def after(self, draft_token_ids: Sequence[int]) -> LogitsProcessor:
        """The processor in the state after these drafts."""
        if not self._clones:
            return self._processor
        self._follow(draft_token_ids)
        clone = self._clones[len(draft_token_ids)]
        if isinstance(clone, Exception):
            raise clone
        return clone

    def commit(self, token_ids: Sequence[int]) -> None:
        if self._clones:
            self._follow(token_ids)
            self._drafts, self._clones = [], [self._clones[len(token_ids)]]

    def _follow(self, token_ids: Sequence[int]) -> None:
        num_common = 0
        for known, token_id in zip(self._drafts, token_ids):
            if known != token_id:
                break
            num_common += 1
        if num_common < len(token_ids):
            del self._drafts[num_common:], self._clones[num_common + 1 :]
            for token_id in token_ids[num_common:]:
                self._clones.append(_advanced(self._clones[-1], token_id))
                self._drafts.append(token_id)


def _advanced(
    processor: StatefulLogitsProcessor | Exception, token_id: int | None
) -> StatefulLogitsProcessor | Exception:
    """A clone, one token further if there is one."""
    if isinstance(processor, Exception):
        return processor
    try:
        clone = processor.clone()
        if token_id is not None:
            clone.advance(token_id)
    except Exception as error:  # a caller's own code may raise anything
        return error
    return clone
