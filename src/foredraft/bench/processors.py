"""What the options that act on logits cost: decode steps with each of them, and with all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.bench.steps import StepTime, time_decode_steps
from foredraft.errors import ForedraftError

GREEDY, TEMPERATURE = "none, greedy", "temperature"
"""What all others are compared with: no options at all, and nothing but a temperature."""

NUM_BIASES = 10
FORBIDDEN_STRIDE = 50
"""allowed_token_ids leaves one in so many tokens out."""

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class OptionsCost:
    """Decode steps with one set of options at one depth."""

    name: str
    depth: int
    steps: tuple[StepTime, ...]

    @property
    def median_seconds(self) -> float:
        return median(step.seconds for step in self.steps)

    @property
    def median_verification_seconds(self) -> float:
        """Of the part that decides the tokens: the options on the target's logits, and sampling."""
        return median(step.verification_seconds for step in self.steps)

    @property
    def median_drafting_seconds(self) -> float:
        return median(step.drafting_seconds for step in self.steps)


@dataclass(frozen=True)
class ProcessorsResult:
    """Figures of all sets of options at all depths."""

    costs: tuple[OptionsCost, ...]

    def ratio(self, cost: OptionsCost, name: str) -> float:
        """How many times as long as a step at the same depth with the options called `name`."""
        (other,) = (other for other in self.costs if (other.name, other.depth) == (name, cost.depth))
        return cost.median_seconds / other.median_seconds

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"options": [self._cost_dict(cost) for cost in self.costs]}

    def _cost_dict(self, cost: OptionsCost) -> dict[str, Any]:
        return {
            "median_seconds": cost.median_seconds,
            "median_verification_seconds": cost.median_verification_seconds,
            "median_drafting_seconds": cost.median_drafting_seconds,
            "ratio_to_greedy": self.ratio(cost, GREEDY),
            "ratio_to_temperature": self.ratio(cost, TEMPERATURE),
            **asdict(cost),
        }

    def table(self) -> Table:
        """A table that is Markdown as well."""
        table = Table("options", box=box.MARKDOWN)
        for heading in ("K", "ms a step", "x greedy", "x temperature", "verification, ms", "drafting, ms"):
            table.add_column(heading, justify="right")
        for cost in self.costs:
            table.add_row(
                cost.name,
                str(cost.depth),
                f"{1e3 * cost.median_seconds:.2f}",
                f"{self.ratio(cost, GREEDY):.3f}",
                f"{self.ratio(cost, TEMPERATURE):.3f}",
                f"{1e3 * cost.median_verification_seconds:.2f}",
                f"{1e3 * cost.median_drafting_seconds:.2f}",
            )
        return table


def sets_of_options(vocab_size: int, text_token_ids: Sequence[int], num_tokens: int) -> dict[str, SamplingParams]:
    """By name: no options, a temperature, each option with it, and all at once; requests of `num_tokens` tokens.

    text_token_ids: tokens of which biases and bad words are made, so that some of them do come up.
    """
    tokens = list(dict.fromkeys(text_token_ids))
    tokens += [token_id for token_id in range(vocab_size) if token_id not in tokens][:NUM_BIASES]
    words = [tokens[:1], tokens[1:2], tokens[2:4], tokens[4:6], tokens[6:9]]
    options: dict[str, dict[str, Any]] = {
        f"logit_bias of {NUM_BIASES} tokens": {"logit_bias": dict.fromkeys(tokens[-NUM_BIASES:], 0.5)},
        "three penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        f"{len(words)} bad_words": {"bad_words": words},
        "min_tokens": {"min_tokens": num_tokens, "ignore_eos": False},
        "allowed_token_ids": {"allowed_token_ids": [i for i in range(vocab_size) if i % FORBIDDEN_STRIDE]},
        "top_k=50": {"top_k": 50},
        "top_p=0.9": {"top_p": 0.9},
        "min_p=0.02": {"min_p": 0.02},
        "typical_p=0.9": {"typical_p": 0.9},
    }
    at_once = {name: value for each in options.values() for name, value in each.items()}
    options = {TEMPERATURE: {}, **options, "all of these": at_once, "logprobs=5": {"logprobs": 5}}
    plain = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    return {GREEDY: plain} | {name: replace(plain, temperature=1.0, **values) for name, values in options.items()}


def measure_processors(
    llm: LLM,
    prompts: Sequence[list[int]],
    options: Mapping[str, SamplingParams],
    depths: Sequence[int],
    num_steps: int,
    repeats: Iterable[int],
) -> ProcessorsResult:
    """Time `num_steps` decode steps of all prompts as one batch, for each set of options and depth, once per repeat.

    They take turns, in an order that rotates. The first steps of each turn are not counted.
    """
    kinds = [(name, depth) for depth in depths for name in options]
    times: dict[tuple[str, int], list[StepTime]] = {kind: [] for kind in kinds}
    for repeat in repeats:
        first = repeat % len(kinds)
        for name, depth in (*kinds[first:], *kinds[:first]):
            params = replace(options[name], num_speculative_tokens=depth)
            steps = time_decode_steps(llm, prompts, [params] * len(prompts), WARM_UP_STEPS + num_steps)
            if len(steps) < WARM_UP_STEPS + num_steps:
                raise ForedraftError(f"{name}, K={depth}: a request ended early: do its tokens fit max_model_len?")
            times[name, depth] += steps[WARM_UP_STEPS:]
    return ProcessorsResult(tuple(OptionsCost(*kind, tuple(steps)) for kind, steps in times.items()))


def num_tokens_of(num_steps: int, max_depth: int) -> int:
    """How many tokens a request must be allowed, that none ends in so many steps, those of its neighbours' prefill
    included."""
    return (2 * (WARM_UP_STEPS + num_steps) + 1) * (max_depth + 1) + 1
