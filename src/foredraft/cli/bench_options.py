"""What the commands of `foredraft bench` share: options, prompts, a progress bar, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.progress import track

from foredraft.cli.display import open_console
from foredraft.cli.options import build_prompt

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
    return [build_prompt(llm, text, is_raw=is_raw) for text in texts]


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
