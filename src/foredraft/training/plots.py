"""Plots of a run: loss, greedy match and overlap by depth over the steps, and what held-out rows gave."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.training.metrics_file import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
_STEM = "training"


def plot_metrics(reports: Sequence[StepReport], directory: Path) -> list[Path]:
    """Draw all reports of a run; the files, none where matplotlib is missing or there is nothing to draw."""
    if find_spec("matplotlib") is None or not reports:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    grid = figure.subplots(2, 2)
    _draw(grid[0, 0], reports, "loss", "Loss, nats")
    _draw(grid[0, 1], reports, "match", "Greedy draft is the target's token")
    _draw(grid[1, 0], reports, "overlap", "A sampled draft is accepted")
    measured = [each for each in reports if each.heldout_length is not None]
    lengths = [each.heldout_length or 0.0 for each in measured]
    grid[1, 1].plot([each.step for each in measured], lengths, marker="o")
    grid[1, 1].set(title="Tokens a cycle on held-out rows", xlabel="step")
    grid[1, 1].grid(visible=True, alpha=0.3)
    files = [directory / f"{_STEM}{suffix}" for suffix in SUFFIXES]
    for file in files:
        figure.savefig(file, dpi=120)
    return files


def _draw(axes: Axes, reports: Sequence[StepReport], name: str, title: str) -> None:
    depths = max(len(each.loss) for each in reports)
    for depth in range(depths):
        points = [(each.step, getattr(each, name)[depth]) for each in reports if len(each.loss) > depth]
        axes.plot(
            [step for step, _ in points], [value for _, value in points], label=f"depth {depth + 1}", color=f"C{depth}"
        )
    axes.set(title=title, xlabel="step")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
