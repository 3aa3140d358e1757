"""Plots of a comparison: drafts accepted by depth, and tokens per second against concurrency."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.bench.compare import CompareResult
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
_STEM = "compare"


def plot_files(path: Path) -> list[Path]:
    """What a plot is written to: the file itself, if its name ends in .svg or .png, else both kinds in a directory.

    Raises ConfigError for another kind of file, and where matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed: pip install 'foredraft[plots]'")
    if path.suffix in FORMATS and not path.is_dir():
        return [path]
    if path.suffix and not path.is_dir():
        raise ConfigError(f"a plot is written to a directory, or to a file that ends in .svg or .png, not {path}")
    return [path / f"{_STEM}{suffix}" for suffix in FORMATS]


def plot_compare(result: CompareResult, files: list[Path], title: str) -> None:
    """Draw both plots side by side into every file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    acceptance, throughput = figure.subplots(1, 2)
    _draw_acceptance(acceptance, result)
    _draw_throughput(throughput, result)
    figure.suptitle("\n".join([title, *result.marks]))
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)


def _draw_acceptance(axes: Axes, result: CompareResult) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, name in enumerate(result.variants):
        rates = result.speculation_of(name).accepted_rates
        if rates:
            axes.plot(range(1, len(rates) + 1), rates, marker="o", color=f"C{index}", label=name)
    axes.set(title="Drafts accepted", xlabel="depth", ylabel="share of the cycles with drafts", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes)


def _draw_throughput(axes: Axes, result: CompareResult) -> None:
    for index, name in enumerate(result.variants):  # the same colour in both plots
        cells = sorted((cell for cell in result.cells if cell.name == name), key=lambda cell: cell.concurrency)
        speeds = [cell.tokens_per_second for cell in cells]
        axes.plot([c.concurrency for c in cells], speeds, marker="o", color=f"C{index}", label=name)
    concurrencies = sorted({cell.concurrency for cell in result.cells})
    axes.set(title="Throughput", xlabel="concurrency", ylabel="tokens/s", xscale="log")
    axes.set_xticks(concurrencies, [str(concurrency) for concurrency in concurrencies])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
