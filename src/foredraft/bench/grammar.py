"""What it costs to compute masks of allowed tokens, for llguidance and, where it is installed, xgrammar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median, quantiles
from typing import Any, Protocol

from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from rich import box
from rich.table import Table
from transformers import PreTrainedTokenizerBase

NUM_DRAFTS = 8  # of a block that is masked, followed and taken back


@dataclass(frozen=True)
class Sample:
    """A text, and a JSON schema or a regular expression that allows it."""

    name: str
    text: str
    schema: str | None = None
    regex: str | None = None


class Follower(Protocol):
    """A grammar that follows the tokens of one text."""

    def fill_mask(self) -> None:
        """Compute which tokens may follow."""

    def consume(self, token_id: int) -> bool:
        """Go on; False if the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""


@dataclass(frozen=True)
class Library:
    """One that computes masks: its name, and how it compiles a sample's grammar, with nothing kept of earlier ones."""

    name: str
    compile: Callable[[Sample], Follower]


@dataclass
class LibraryResult:
    """Times of one library: one entry for each sample and repeat, for each row, for each block of drafts."""

    name: str
    compile_seconds: list[float] = field(default_factory=list)  # up to the first mask, which is part of it
    mask_seconds: list[float] = field(default_factory=list)
    consume_seconds: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)  # its masks, back to its beginning, and on again
    num_refused: int = 0  # tokens of the samples that were not allowed: the library's mistake, or the sample's

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in microseconds."""
        columns = {
            "compile": self.compile_seconds,
            "mask": self.mask_seconds,
            "consume": self.consume_seconds,
            "block": self.block_seconds,
        }
        figures = {f"{name}_us": _figures(seconds) for name, seconds in columns.items()}
        return {"name": self.name, "num_masks": len(self.mask_seconds), "num_refused": self.num_refused, **figures}


@dataclass(frozen=True)
class GrammarResult:
    """Times of all libraries, over the same texts."""

    libraries: tuple[LibraryResult, ...]
    samples: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"samples": list(self.samples), "libraries": [library.to_dict() for library in self.libraries]}

    def table(self) -> Table:
        """A table that is Markdown as well; times in microseconds, median and 99th percentile."""
        table = Table("library", box=box.MARKDOWN)
        for heading in ("compile", "mask", "token", f"block of {NUM_DRAFTS} drafts", "refused"):
            table.add_column(heading, justify="right")
        for library in self.libraries:
            times = (library.compile_seconds, library.mask_seconds, library.consume_seconds, library.block_seconds)
            cells = [" / ".join(f"{figure:.0f}" for figure in _figures(seconds).values()) for seconds in times]
            table.add_row(library.name, *cells, str(library.num_refused))
        return table


def load_libraries(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Iterable[int]) -> list[Library]:
    """llguidance, and xgrammar if it can be imported, for a fast tokenizer."""
    eos = sorted(eos_token_ids)
    libraries = [_llguidance(tokenizer, vocab_size, eos)]
    if find_spec("xgrammar") is not None:
        libraries.append(_xgrammar(tokenizer, vocab_size, eos))
    return libraries


def measure_grammar(
    libraries: Iterable[Library], tokenizer: PreTrainedTokenizerBase, repeats: Iterable[int]
) -> GrammarResult:
    """Compile every sample and follow its tokens, once per repeat, the libraries taking turns.

    Each row's mask and token are timed; then, from a fresh grammar, blocks of drafts as in speculative decoding: a mask
    before each draft and after the last, all taken back, and committed. Nothing is kept between repeats, so tables that
    a library fills as it goes are part of the times.
    """
    tried = [(library, LibraryResult(library.name)) for library in libraries]
    for _ in repeats:
        for sample in SAMPLES:
            token_ids = tokenizer.encode(sample.text, add_special_tokens=False)
            for library, result in tried:
                _follow_rows(library.compile(sample), token_ids, result)
                _follow_blocks(_compile(library, sample, result), token_ids, result)
    return GrammarResult(tuple(result for _, result in tried), tuple(sample.name for sample in SAMPLES))


def _compile(library: Library, sample: Sample, result: LibraryResult) -> Follower:
    started = time.perf_counter()
    follower = library.compile(sample)
    follower.fill_mask()
    result.compile_seconds.append(time.perf_counter() - started)
    return follower


def _follow_rows(follower: Follower, token_ids: list[int], result: LibraryResult) -> None:
    for token_id in token_ids:
        started = time.perf_counter()
        follower.fill_mask()
        masked = time.perf_counter()
        result.num_refused += not follower.consume(token_id)
        result.consume_seconds.append(time.perf_counter() - masked)
        result.mask_seconds.append(masked - started)


def _follow_blocks(follower: Follower, token_ids: list[int], result: LibraryResult) -> None:
    for first in range(0, len(token_ids) - NUM_DRAFTS + 1, NUM_DRAFTS):
        drafts = token_ids[first : first + NUM_DRAFTS]
        started = time.perf_counter()
        for draft in drafts:
            follower.fill_mask()
            follower.consume(draft)
        follower.fill_mask()
        follower.rollback(NUM_DRAFTS)
        for draft in drafts:
            follower.consume(draft)
        result.block_seconds.append(time.perf_counter() - started)


def _figures(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in microseconds."""
    microseconds = [second * 1e6 for second in seconds]
    return {"median": median(microseconds), "percentile_99": quantiles(microseconds, n=100, method="inclusive")[-1]}


class _LlguidanceFollower:
    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = allocate_token_bitmask(1, vocab_size)

    def fill_mask(self) -> None:
        fill_next_token_bitmask(self._matcher, self._mask)

    def consume(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


def _llguidance(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: list[int]) -> Library:
    wrapped = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)  # type: ignore[arg-type]

    def compile_sample(sample: Sample) -> Follower:
        if sample.schema is not None:
            grammar = LLMatcher.grammar_from_json_schema(sample.schema)
        else:
            grammar = LLMatcher.grammar_from_regex(sample.regex or "")
        return _LlguidanceFollower(LLMatcher(wrapped, grammar, log_level=0), vocab_size)

    return Library(f"llguidance {version('llguidance')}", compile_sample)


class _XgrammarFollower:
    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def fill_mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)

    def consume(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


def _xgrammar(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: list[int]) -> Library:
    xgrammar: Any = import_module("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=eos)
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def compile_sample(sample: Sample) -> Follower:
        if sample.schema is not None:
            compiled = compiler.compile_json_schema(sample.schema)
        else:
            compiled = compiler.compile_regex(sample.regex)
        return _XgrammarFollower(xgrammar, compiled, vocab_size)

    return Library(f"xgrammar {version('xgrammar')}", compile_sample)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _json_sample(name: str, schema: dict[str, Any], value: object) -> Sample:
    return Sample(name, json.dumps(value, ensure_ascii=False), schema=json.dumps(schema))


_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}

SAMPLES = (
    _json_sample(
        "function call",
        _object(name={"enum": ["get_weather", "get_time"]}, arguments=_object(city=_TEXT, unit={"enum": ["C", "F"]})),
        {"name": "get_weather", "arguments": {"city": "Reykjavík", "unit": "C"}},
    ),
    _json_sample(
        "free text",
        _object(title=_TEXT, summary=_TEXT),
        {
            "title": "On the Analytical Engine",
            "summary": "It weaves algebraic patterns just as the Jacquard loom weaves flowers and leaves. "
            "It has no pretensions to originate anything; it can do whatever we know how to order it to perform.",
        },
    ),
    _json_sample(
        "list of records",
        {"type": "array", "items": _object(id={"type": "integer"}, x=_NUMBER, tags={"type": "array", "items": _TEXT})},
        [{"id": number, "x": number / 8, "tags": ["odd" if number % 2 else "even", "small"]} for number in range(5)],
    ),
    _json_sample(
        "recursive",
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": _object(key=_TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})},
        },
        {
            "key": "a",
            "children": [{"key": "b", "children": []}, {"key": "c", "children": [{"key": "d", "children": []}]}],
        },
    ),
    _json_sample(
        "any JSON object",
        {"type": "object"},
        {"mixed": [1, -2.5, True, None, "text", {"deep": [[], {}]}], "another key": {"x": 1e-6, "y": "a \\ b\n"}},
    ),
    Sample(
        "regular expression",
        "2026-11-29T08:15:30Z ada.lovelace@example.org order of 250 brass wheels confirmed",
        regex=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z [a-z.]+@[a-z]+\.(org|com) (\w+ )+(confirmed|rejected)",
    ),
)
