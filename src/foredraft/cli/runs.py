"""One generation with its measurements: what `foredraft generate` shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.outputs import TextPiece
from foredraft.sampling_params import SamplingParams
from foredraft.statistics import EngineStats

if TYPE_CHECKING:
    from foredraft import LLM, MediaPrompt

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Run:
    """What came of one prompt with `depth` draft tokens a step, as far as it went; `seconds` include the prefill."""

    depth: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    stats: EngineStats

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def milliseconds_per_token(self) -> dict[str, float]:
        """Where the time went; the parts add up to `seconds`, the host has what is in none of the others."""
        stats = self.stats
        parts = {
            "target": stats.target_seconds,
            "drafting": stats.drafting_seconds,
            "verification": stats.verification_seconds,
        }
        parts["host"] = self.seconds - sum(parts.values())
        return {part: 1000 * seconds / max(1, len(self.token_ids)) for part, seconds in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_speculative_tokens": self.depth,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.stats.num_prompt_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "milliseconds_per_token": self.milliseconds_per_token,
            "speculation": self.stats.speculation.to_dict(),
        }


def run_prompt(
    llm: LLM, prompt: MediaPrompt, params: SamplingParams, depth: int, show: Callable[[TextPiece], None]
) -> Run:
    """Stream one prompt, piece by piece to `show`. Ctrl-C ends it early, with what it has."""
    llm.reset_stats()
    pieces: list[TextPiece] = []
    token_ids: list[int] = []
    finish_reason = INTERRUPTED
    started = time.perf_counter()
    with closing(llm.stream(prompt, params)) as chunks:
        try:
            for chunk in chunks:
                token_ids += chunk.token_ids
                pieces += chunk.pieces
                for piece in chunk.pieces:
                    show(piece)
                if chunk.output is not None:
                    finish_reason = str(chunk.output.finish_reason)
        except KeyboardInterrupt:
            pass
    seconds = time.perf_counter() - started
    return Run(depth, "".join(piece.text for piece in pieces), tuple(token_ids), finish_reason, seconds, llm.stats)
