"""How generated text and its statistics look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foredraft.cli.runs import Run
from foredraft.outputs import TextPiece
from foredraft.statistics import SpeculationStats

_DEPTH_STYLES = ("green", "cyan", "bright_blue", "magenta", "yellow", "red", "bright_green", "bright_cyan")


def open_console(*, stderr: bool = False) -> Console:
    """A console whose tables are as wide as they need, unless a terminal limits them."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def depth_style(depth: int) -> str:
    """The colour of text that was drafted at `depth` and accepted; the target's own (0) is plain."""
    return _DEPTH_STYLES[(depth - 1) % len(_DEPTH_STYLES)] if depth else ""


class TextDisplay:
    """Generated text on standard output: coloured by depth on a terminal, exactly the text anywhere else."""

    def __init__(self) -> None:
        self._console = open_console()
        self.is_coloured = self._console.is_terminal and self._console.color_system is not None

    def show(self, piece: TextPiece) -> None:
        if self.is_coloured:
            self._console.print(Text(piece.text, depth_style(piece.depth)), end="", soft_wrap=True)
        else:
            sys.stdout.write(piece.text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the last line."""
        print(flush=True)


def legend(max_depth: int) -> Text:
    """What the colours mean."""
    depths = [(f" {depth}", depth_style(depth)) for depth in range(1, max_depth + 1)]
    return Text.assemble("the target's own tokens; accepted drafts of depth", *depths)


def summary_table(runs: Sequence[Run]) -> Table:
    """Totals and speed, a column for each run."""
    table = Table("", *(f"K = {run.depth}" if run.depth else "plain" for run in runs), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, value in _SUMMARY.items():
        table.add_row(label, *(value(run) for run in runs))
    return table


def _milliseconds(part: str) -> Callable[[Run], str]:
    return lambda run: f"{run.milliseconds_per_token[part]:.1f}"


_SUMMARY: dict[str, Callable[[Run], str]] = {
    "tokens": lambda run: str(len(run.token_ids)),
    "ended by": lambda run: run.finish_reason,
    "drafts": lambda run: str(run.stats.speculation.num_drafts),
    "drafted tokens": lambda run: str(run.stats.speculation.num_drafted_tokens),
    "accepted tokens": lambda run: str(run.stats.speculation.num_accepted_tokens),
    "mean acceptance length": lambda run: f"{run.stats.speculation.mean_acceptance_length:.2f}",
    "module rows rebuilt": lambda run: str(run.stats.speculation.num_rebuilt_rows),
    "tokens/s, prefill included": lambda run: f"{run.tokens_per_second:.1f}",
    "ms/token": lambda run: f"{sum(run.milliseconds_per_token.values()):.1f}",
    "  target": _milliseconds("target"),
    "  drafting": _milliseconds("drafting"),
    "  verification": _milliseconds("verification"),
    "  host": _milliseconds("host"),
}


def depth_table(stats: SpeculationStats, box_style: box.Box = box.SIMPLE_HEAD) -> Table:
    """How drafts fared, a row for each depth.

    rate: accepted, as a share of all drafts; conditional rate: of those whose predecessor was accepted.
    """
    table = Table("depth", box=box_style)
    for name in ("drafted", "accepted", "rate", "conditional rate"):
        table.add_column(name, justify="right")
    rows = zip(stats.drafted_by_depth, stats.accepted_by_depth, stats.accepted_rates, stats.conditional_rates)
    for depth, (drafted, accepted, rate, conditional) in enumerate(rows, start=1):
        label = Text(str(depth), depth_style(depth))
        table.add_row(label, str(drafted), str(accepted), f"{rate:.3f}", f"{conditional:.3f}")
    return table
