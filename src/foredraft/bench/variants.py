"""Ways to generate that the speed benchmark compares: Foredraft at one depth, and transformers."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError, ForedraftError
from foredraft.statistics import SpeculationStats

# How transformers keeps its cache, by the name that a variant is asked for with.
TRANSFORMERS_CACHES: dict[str, str | None] = {"transformers-dynamic": None, "transformers-static": "static"}


@dataclass(frozen=True)
class Generation:
    """New tokens of each prompt of a batch, the seconds that all took, prefill included, and how our drafts fared."""

    token_ids: list[tuple[int, ...]]
    seconds: float
    speculation: SpeculationStats | None = None


class Variant(Protocol):
    """One way to generate."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generation:
        """Continue a batch greedily by exactly `num_tokens` tokens each, whatever EOS says."""


class ForedraftVariant:
    """Our engine with `depth` draft tokens a step; 0 is plain decoding."""

    def __init__(self, llm: LLM, depth: int) -> None:
        self.name = f"foredraft K={depth}" if depth else "foredraft plain"
        self._llm = llm
        self._depth = depth
        self._salts = (f"{self.name}, call {number}" for number in itertools.count())

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generation:
        """See `Variant`."""
        params = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            num_speculative_tokens=self._depth,
            cache_salt=next(self._salts),  # no variant is to find what another has computed
        )
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        speculation = SpeculationStats()
        for output in outputs:
            if output.error is not None:
                raise ForedraftError(f"{self.name}: {output.error}")
            speculation.add(output.stats)
        return Generation([output.token_ids for output in outputs], seconds, speculation)


class TransformersVariant:
    """transformers' own `generate` of the target alone."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self._model = model
        self._cache = TRANSFORMERS_CACHES[name]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generation:
        """See `Variant`."""
        started = time.perf_counter()
        width = max(len(prompt) for prompt in prompts)
        padding = [width - len(prompt) for prompt in prompts]
        device = self._model.device
        token_ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts)], device=device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=device)
        whole = self._model.generate(
            token_ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=self._cache,
        )
        new_token_ids = [tuple(row) for row in whole[:, width:].tolist()]
        return Generation(new_token_ids, time.perf_counter() - started)


def check_peers(names: list[str]) -> None:
    """Raise ConfigError for a name that `load_peers` does not know."""
    if unknown := sorted(set(names) - set(TRANSFORMERS_CACHES)):
        raise ConfigError(f"unknown peers {', '.join(unknown)}; known are {', '.join(TRANSFORMERS_CACHES)}")


def load_peers(names: list[str], llm: LLM) -> list[TransformersVariant]:
    """The variants of transformers called `names`: one model of their own, from the files that `llm` was loaded from.

    It has transformers' default attention (ours is set in the model object, so that one cannot be shared).
    """
    check_peers(names)
    model = _load_model(llm.info.path, llm.dtype, llm.device) if names else None
    return [TransformersVariant(name, model) for name in names]


def _load_model(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to(device)
    # Nothing but the number of tokens ends a text, and nothing but the largest logit chooses.
    model.generation_config.eos_token_id = None
    model.generation_config.temperature = model.generation_config.top_k = model.generation_config.top_p = None
    return model
