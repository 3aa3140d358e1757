"""What the runner keeps of a request from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.logprobs import TokenLogprob
from foredraft.media import FIRST_MEDIA_ID
from foredraft.plan import RequestPlan, RequestTerms
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.sampling.logprobs import token_logprobs
from foredraft.sampling.sampling_state import SamplingState

MAX_SCORED_ROWS = 256
"""Prompt rows that go through the head at once: their logits take much more memory than anything else of a step."""


@dataclass
class RequestMemory:
    """rules: the state of its options that change logits, if it has any. draft_probs: what each pending draft was drawn
    from, None for one that was chosen without chance. prompt_logprobs: of the prompt tokens whose rows have been there.
    """

    rules: SamplingState | None = None
    draft_probs: tuple[Tensor | None, ...] = ()
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])

    @classmethod
    def of(cls, terms: RequestTerms, vocab_size: int, compiler: GrammarCompiler | None) -> RequestMemory:
        """What is kept of a request when its first step is run."""
        if not terms.params.changes_logits:
            return cls()
        grammar, wanted = None, terms.params.structured_output
        if wanted is not None:
            assert compiler is not None, "checked when the request was added"
            grammar = compiler.start(wanted)
        return cls(SamplingState(terms, vocab_size, grammar))

    def score_prompt(self, plan: RequestPlan, logits_of_rows: Callable[[int, int], Tensor]) -> None:
        """Add what this step's rows and the cached ones before them tell of the prompt's tokens.

        logits_of_rows: from first row and end to logits [R, V].
        """
        terms = plan.terms
        assert terms.num_prompt_logprobs is not None, "asked for only"
        end = min(plan.first_row + len(plan.token_ids), len(terms.prompt_token_ids) - 1)
        for first in range(len(self.prompt_logprobs) - 1, end, MAX_SCORED_ROWS):
            last = min(end, first + MAX_SCORED_ROWS)
            logprobs = logits_of_rows(first, last).float().log_softmax(dim=-1)
            following = terms.prompt_token_ids[first + 1 : last + 1]
            is_shown = [row_id >= FIRST_MEDIA_ID for row_id in terms.row_ids[first + 1 : last + 1]]
            known = [0 if shown else token_id for shown, token_id in zip(is_shown, following)]
            scores = token_logprobs(logprobs, known, terms.num_prompt_logprobs)
            self.prompt_logprobs += [None if shown else score for shown, score in zip(is_shown, scores)]
