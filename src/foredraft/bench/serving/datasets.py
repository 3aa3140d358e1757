"""What a benchmark asks: prompts of a file, random token ids, or prompts with common beginnings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.errors import ConfigError, shown

DatasetKind = Literal["prompts", "random", "jsonl", "shared-prefix"]
Message = Mapping[str, Any]

MAX_LENGTH = 2**24
DEFAULT_VOCAB_SIZE = 1000
"""Random ids are drawn below it where the vocabulary is not known: nearly every model has as many."""

_USED_BY: dict[str, tuple[DatasetKind, ...]] = {
    "prompts": ("prompts", "jsonl"),
    "max_tokens": ("prompts", "jsonl"),
    "input_len": ("random",),
    "range_ratio": ("random",),
    "output_len": ("random", "shared-prefix"),
    "vocab_size": ("random", "shared-prefix"),
    "prefix_len": ("shared-prefix",),
    "num_prefixes": ("shared-prefix",),
    "suffix_len": ("shared-prefix",),
}
_DEFAULTS = {"max_tokens": 128, "output_len": 128, "input_len": 512, "range_ratio": 0.0}
_DEFAULTS |= {"prefix_len": 512, "num_prefixes": 4, "suffix_len": 128}


@dataclass(frozen=True)
class WorkItem:
    """One request: text, token ids, or (then `prompt` is empty) messages; and how many tokens to ask for."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """Which requests to make; None takes the default of the kind. Raises ConfigError.

    prompts: texts of a file (`prompts`), each with `max_tokens`. jsonl: lines with `prompt` (text or token ids) or
    `messages`, and perhaps `output_tokens` in place of max_tokens. random: prompts of `input_len` token ids and outputs
    of `output_len`, both drawn evenly from the length times 1 - range_ratio to 1 + range_ratio. shared-prefix:
    `num_prefixes` beginnings of `prefix_len` ids that requests take in turn, each followed by `suffix_len` of its own.
    """

    kind: DatasetKind = "prompts"
    num_prompts: int = 64
    seed: int = 0
    prompts: Path | None = None
    max_tokens: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float | None = None
    prefix_len: int | None = None
    num_prefixes: int | None = None
    suffix_len: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(DatasetKind):
            raise ConfigError(f"dataset must be one of {', '.join(get_args(DatasetKind))}, not {shown(self.kind)}")
        for name, kinds in _USED_BY.items():
            value = getattr(self, name)
            if value is not None and self.kind not in kinds:
                raise ConfigError(f"{name} has no effect with dataset={self.kind}: it belongs to {' and '.join(kinds)}")
            if name in ("prompts", "range_ratio") or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
                raise ConfigError(f"{name} must be an integer from 1 to {MAX_LENGTH}, not {shown(value)}")
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts must be at least 1, not {self.num_prompts}")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, not {self.seed}")
        if not 0 <= (self.range_ratio or 0.0) < 1:
            raise ConfigError(f"range_ratio must be from 0 to less than 1, not {self.range_ratio}")
        if self.kind == "jsonl" and self.prompts is None:
            raise ConfigError("dataset=jsonl needs a file: name it with --prompts")

    @property
    def has_token_ids(self) -> bool:
        """Whether the prompts are made of random token ids."""
        return self.kind in ("random", "shared-prefix")

    def settings(self) -> dict[str, Any]:
        """What counts for this kind, for a report."""
        names = [
            name for name, kinds in _USED_BY.items() if self.kind in kinds and name not in ("prompts", "vocab_size")
        ]
        settings: dict[str, Any] = {"dataset": self.kind, "num_prompts": self.num_prompts, "seed": self.seed}
        settings |= {name: self._value(name) for name in names}
        return settings if self.has_token_ids else settings | {"prompts": self._file.name}

    def items(self, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[WorkItem]:
        """The requests, the same ones for the same settings. vocab_size: where the settings name none.

        Raises ConfigError for a file that cannot be read, naming file and line.
        """
        if self.kind == "prompts":
            texts = read_prompts(self._file, self.num_prompts)
            return [WorkItem(text, int(self._value("max_tokens"))) for text in texts]
        if self.kind == "jsonl":
            return _read_jsonl(self._file, self.num_prompts, int(self._value("max_tokens")))
        random = np.random.default_rng(self.seed)
        if self.kind == "random":
            return self._random_items(random, self.vocab_size or vocab_size)
        return self._shared_prefix_items(random, self.vocab_size or vocab_size)

    def _random_items(self, random: np.random.Generator, vocab_size: int) -> list[WorkItem]:
        ratio = self._value("range_ratio")
        lengths = [
            random.integers(
                max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)) + 1, self.num_prompts
            )
            for length in (self._value("input_len"), self._value("output_len"))
        ]
        return [
            WorkItem(_token_ids(random, vocab_size, int(num_prompt)), int(num_new))
            for num_prompt, num_new in zip(*lengths)
        ]

    def _shared_prefix_items(self, random: np.random.Generator, vocab_size: int) -> list[WorkItem]:
        prefix_len, num_prefixes = int(self._value("prefix_len")), int(self._value("num_prefixes"))
        prefixes = [_token_ids(random, vocab_size, prefix_len) for _ in range(num_prefixes)]
        suffix_len, output_len = int(self._value("suffix_len")), int(self._value("output_len"))
        return [
            WorkItem(prefixes[index % num_prefixes] + _token_ids(random, vocab_size, suffix_len), output_len)
            for index in range(self.num_prompts)
        ]

    @property
    def _file(self) -> Path:
        return self.prompts or DEFAULT_PROMPTS

    def _value(self, name: str) -> float:
        value = getattr(self, name)
        return _DEFAULTS[name] if value is None else value


def warm_up_items(items: Sequence[WorkItem], count: int) -> list[WorkItem]:
    """`count` requests like the first ones that begin differently, so that they leave no cached rows to those."""
    return [_altered(items[index % len(items)], f"Warm-up {index}. ") for index in range(count)]


def _altered(item: WorkItem, beginning: str) -> WorkItem:
    if item.messages is not None:
        first = dict(item.messages[0])
        if isinstance(first.get("content"), str):
            first["content"] = beginning + first["content"]
        return replace(item, messages=(first, *item.messages[1:]))
    if isinstance(item.prompt, str):
        return replace(item, prompt=beginning + item.prompt)
    return replace(item, prompt=item.prompt[::-1])


def _token_ids(random: np.random.Generator, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(random.integers(0, vocab_size, length).tolist())


def _read_jsonl(file: Path, count: int, max_tokens: int) -> list[WorkItem]:
    items: list[WorkItem] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(items) == count:
                    break
                if line.strip():
                    items.append(_item(line, f"{file}, line {number}", max_tokens))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {file} cannot be read: {error}") from error
    if len(items) < count:
        raise ConfigError(f"{count} prompts asked for, but {file} has {len(items)}")
    return items


def _item(line: str, where: str, max_tokens: int) -> WorkItem:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ConfigError(f'{where}: not a JSON object with the key "prompt" or the key "messages"')
    num_tokens = fields.get("output_tokens", max_tokens)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_LENGTH:
        raise ConfigError(f"{where}: output_tokens must be an integer from 1 to {MAX_LENGTH}, not {shown(num_tokens)}")
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise ConfigError(f"{where}: messages must be a list of objects, not {shown(messages)}")
        return WorkItem("", num_tokens, tuple(messages))
    prompt = fields["prompt"]
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)
    ):
        return WorkItem(tuple(prompt), num_tokens)
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: prompt must be text or a list of token ids, not {shown(prompt)}")
    return WorkItem(prompt, num_tokens)
