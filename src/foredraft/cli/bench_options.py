"""What the commands of `foredraft bench` share: options, prompts, a progress bar, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.progress import track

from foredraft.cli.display import open_console
from foredraft.cli.options import build_prompt
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft import LLM

Item = TypeVar("Item")

Prompts = Annotated[Path, typer.Option("--prompts", help='one JSON object a line, with the key "prompt"')]
NumPrompts = Annotated[int, typer.Option(min=1, help="how many of them, from the first")]
MaxTokens = Annotated[int, typer.Option(min=1, help="new tokens for each prompt")]
Depths = Annotated[str, typer.Option(help="draft tokens a step to try; 0 is plain decoding")]
Raw = Annotated[bool, typer.Option("--raw", help="leave out the chat template")]
Output = Annotated[Path | None, typer.Option(help="write the figures here, as JSON")]


def tokenize(llm: LLM, texts: Sequence[str], *, is_raw: bool = False) -> list[list[int]]:
    """Token ids of the prompts."""
    return [list(build_prompt(llm, text, is_raw=is_raw).token_ids) for text in texts]


def batches_of(prompts: list[list[int]], batch_size: int) -> list[list[list[int]]]:
    """The prompts in order, so many at a time."""
    return [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]


def with_progress(items: Sequence[Item]) -> Iterator[Item]:
    """Go through the items, with a bar on standard error if that is a terminal."""
    notes = open_console(stderr=True)
    yield from track(items, "Measuring", console=notes, transient=True, disable=not notes.is_terminal)


def integers(name: str, text: str, *, low: int = 1) -> list[int]:
    """The numbers of an option such as 1,2,4."""
    try:
        numbers = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = [low - 1]
    if any(number < low for number in numbers):
        raise typer.BadParameter(f"{name} must be numbers from {low} on, as in {low},2,4, not {text!r}")
    return numbers


def print_marks(marks: Sequence[str]) -> None:
    """Above a table: what makes its figures not those of the model's own output (`EngineConfig.marks`)."""
    for mark in marks:
        open_console().print(f"NOT the model's own output: {mark}", soft_wrap=True)


def write(output: Path | None, benchmark: str, llm: LLM, results: dict[str, Any]) -> None:
    """Write a report, if one is wanted."""
    if output is not None:
        from foredraft.bench.report import write_report

        write_report(output, benchmark, llm, results)


def with_room(config: EngineConfig, depths: Sequence[int], batch_size: int) -> EngineConfig:
    """With room for the deepest of `depths`, if the settings say nothing. ConfigError if they have no room."""
    deepest = max(depths)
    if batch_size > config.max_num_seqs:
        raise ConfigError(f"{batch_size} requests are to run at once, but max_num_seqs={config.max_num_seqs}")
    if config.num_speculative_tokens is None:
        return replace(config, num_speculative_tokens=deepest)
    if deepest > config.num_speculative_tokens:
        raise ConfigError(f"depth {deepest} asked for, but num_speculative_tokens={config.num_speculative_tokens}")
    return config


def engine_settings(llm: LLM) -> dict[str, Any]:
    """Settings that decide how fast the engine is, for a report."""
    config = llm.config
    return {
        "quantization": config.quantization,
        "draft_vocab_size": config.draft_vocab_size,
        "draft_head_bits": head.bits if (head := llm.engine.runner.draft_head) is not None else None,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "verification": llm.engine.limits.verification,
        "marks": config.marks,
    }


def keeper(output: Path | None, benchmark: str, llm: LLM, settings: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """A function that writes a report anew, whole at any moment: a run that is ended early leaves what it has."""

    def keep(figures: dict[str, Any]) -> None:
        if output is not None:
            unfinished = output.with_name(f"{output.name}.new")
            write(unfinished, benchmark, llm, {"settings": settings, **figures})
            unfinished.replace(output)

    return keep
