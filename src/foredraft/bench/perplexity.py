"""How well a target predicts given texts with its weights in several formats: perplexity, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "quantization": "none"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
"""The settings of each format."""


@dataclass(frozen=True)
class FormatResult:
    """One format: for each text the log-probabilities of its tokens but the first, and the likeliest token at each."""

    name: str
    logprobs: Sequence[Sequence[float]]
    best: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        return sum(len(text) for text in self.logprobs)

    @property
    def perplexity(self) -> float:
        """Over the tokens of all texts."""
        return math.exp(-math.fsum(map(math.fsum, self.logprobs)) / self.num_tokens)

    @property
    def perplexities(self) -> list[float]:
        """Of each text."""
        return [math.exp(-math.fsum(text) / len(text)) for text in self.logprobs]


@dataclass(frozen=True)
class PerplexityResult:
    """All formats, on the same texts; the others are compared with the first."""

    formats: Sequence[FormatResult]

    def ratio(self, result: FormatResult) -> float:
        """How many times the first format's perplexity."""
        return result.perplexity / self.formats[0].perplexity

    def agreement(self, result: FormatResult) -> float:
        """The share of places where the likeliest token is the first format's."""
        pairs = zip(result.best, self.formats[0].best)
        return sum(one == other for texts in pairs for one, other in zip(*texts)) / result.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "formats": [
                {
                    "name": each.name,
                    "perplexity": each.perplexity,
                    "ratio_to_first": self.ratio(each),
                    "same_best_token": self.agreement(each),
                    "num_tokens": each.num_tokens,
                    "perplexities": each.perplexities,
                }
                for each in self.formats
            ]
        }

    def table(self) -> Table:
        """A table that is Markdown as well."""
        first = self.formats[0].name
        table = Table("format", box=box.MARKDOWN)
        for heading in ("perplexity", f"x {first}", f"best token as with {first}", "tokens"):
            table.add_column(heading, justify="right")
        for each in self.formats:
            agreement = f"{100 * self.agreement(each):.2f} %"
            table.add_row(
                each.name, f"{each.perplexity:.4f}", f"{self.ratio(each):.5f}", agreement, f"{each.num_tokens:,}"
            )
        return table


def format_config(config: EngineConfig, name: str) -> EngineConfig:
    """`config` with the weights in one of FORMATS, and nothing drafted. Raises ConfigError for another name."""
    if name not in FORMATS:
        raise ConfigError(f"a format must be one of {', '.join(FORMATS)}, not {name!r}")
    changes: dict[str, Any] = {**FORMATS[name], "num_speculative_tokens": 0}
    return replace(config, **changes)


def score_texts(name: str, llm: LLM, texts: Iterable[Sequence[int]]) -> FormatResult:
    """Run the target over each text, given as token ids. Raises ForedraftError for one that it cannot score."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    logprobs: list[list[float]] = []
    best: list[list[int]] = []
    for index, text in enumerate(texts):
        (output,) = llm.generate([list(text)], params)
        if output.prompt_logprobs is None or len(text) < 2:
            reason = output.choices[0].error or "it has no second token"
            raise ForedraftError(f"text {index} cannot be scored: {reason}")
        scores = [score for score in output.prompt_logprobs if score is not None]
        logprobs.append([score.logprob for score in scores])
        best.append([score.top[0][0] for score in scores])
    return FormatResult(name, logprobs, best)
