"""`foredraft train`: modules for a target that has none, from its own text; and modules of other projects."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from foredraft.bench.prompts import CHAT_PROMPTS, DEFAULT_PROMPTS
from foredraft.cli.display import open_console
from foredraft.cli.options import settings_options, usage_errors
from foredraft.errors import ConfigError
from foredraft.training.recipe import STAGES, Recipe, Stage

if TYPE_CHECKING:
    import torch

    from foredraft.training.evaluation import Evaluation, EvaluationSet
    from foredraft.training.metrics_file import StepReport

recipe_options = settings_options(Recipe, "recipe", "Recipe")

STOPPED = 3
"""Exit code of a stage that stopped where it can go on."""


@recipe_options
def train(
    target: Annotated[str, typer.Argument(help="checkpoint directory or hub id of the target, or builtin")],
    out: Annotated[Path, typer.Option("--out", "-o", help="directory for modules and all that is needed to go on")],
    recipe: Recipe,
    recipe_file: Annotated[
        Path | None, typer.Option("--recipe", help="recipe.json of another run, instead of the settings below")
    ] = None,
    stages: Annotated[str, typer.Option(help=f"which of {','.join(STAGES)} to run")] = ",".join(STAGES),
    max_seconds: Annotated[
        float | None,
        typer.Option(min=1, help="time of each stage, after which it stops where it can go on (exit code 3)"),
    ] = None,
    corpus: Annotated[Path | None, typer.Option(help="rows of text of another run (its training/corpus)")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that write text, on one device")] = 1,
    synthesis_mtp: Annotated[Path | None, typer.Option(help="modules that draft while text is written: faster")] = None,
    evaluate_on: Annotated[
        list[str] | None,
        typer.Option(help="FILE:TEMPERATURE to measure on; GSM8K at 0 and 1, MT-bench at 0 for a target that chats"),
    ] = None,
    compare: Annotated[list[str] | None, typer.Option(help="NAME=MODULES to measure on the same prompts")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="between two checkpoints")] = 60.0,
    report_every: Annotated[int, typer.Option(min=1, help="steps between two lines of metrics")] = 20,
    device: Annotated[str, typer.Option(help="torch device; auto is cuda where there is one")] = "auto",
    compiled: Annotated[bool | None, typer.Option(help="compile the passes; on a GPU if left out")] = None,
) -> None:
    """Add MTP modules to any target: its own text, training, acceptance, export.

    Every stage goes on where it was stopped: run the same command again. Under torchrun, processes share the work.
    """
    from foredraft.training.processes import started_processes
    from foredraft.training.run import RunOptions, TrainingRun
    from foredraft.training.trainer import TrainingOptions

    with usage_errors():
        chosen = _stages(stages)
        if recipe_file is not None:
            if recipe != Recipe():
                raise ConfigError("--recipe brings all settings of the recipe: give no others")
            recipe = Recipe.load(recipe_file)
        others = _named(compare or [])
    with started_processes() as processes, _interruption() as is_interrupted, _Bars(processes.is_first) as bars:
        torch_device = _device(device, processes.local_rank)
        options = RunOptions(
            device=torch_device,
            stages=chosen,
            corpus=corpus,
            max_seconds=max_seconds,
            workers=workers,
            synthesis_mtp=synthesis_mtp,
            evaluation_sets=_sets(evaluate_on, target),
            compare=others,
            training=TrainingOptions(
                checkpoint_seconds=checkpoint_seconds,
                report_every=report_every,
                is_compiled=torch_device.type == "cuda" if compiled is None else compiled,
            ),
            processes=processes,
        )
        is_done = TrainingRun(target, out, recipe, options, bars).run(is_interrupted)
    if not is_done:
        raise typer.Exit(STOPPED)


def import_speculators(
    source: Annotated[Path, typer.Argument(help="directory of a checkpoint that the speculators package wrote")],
    target: Annotated[
        str, typer.Option("--model", "-m", help="checkpoint directory or hub id of its target, or builtin")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="directory for mtp.safetensors")],
) -> None:
    """Convert a head of the speculators package, if it is an MTP module, to the layout of transformers' `MtpModel`."""
    from foredraft.training.run import target_path
    from foredraft.training.speculators import import_head

    file = import_head(source, target_path(target), out)
    print(f"{file}: run it with --mtp {out}")


def _stages(text: str) -> tuple[Stage, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in get_args(Stage)]
    if unknown or not names:
        raise ConfigError(f"stages must be some of {','.join(STAGES)}, not {text!r}")
    return tuple(stage for stage in STAGES if stage in names)


def _named(pairs: Sequence[str]) -> dict[str, Path]:
    named = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"compare must be NAME=MODULES, not {pair!r}")
        named[name] = Path(path)
    return named


def _sets(given: Sequence[str] | None, target: str) -> tuple[EvaluationSet, ...]:
    from foredraft.models.checkpoint_files import resolve_directory
    from foredraft.models.loader import load_tokenizer
    from foredraft.training.chat_frame import chat_frame
    from foredraft.training.evaluation import EvaluationSet
    from foredraft.training.run import target_path

    if given is not None:
        with usage_errors():
            return tuple(EvaluationSet.parse(text) for text in given)
    if chat_frame(load_tokenizer(resolve_directory(target_path(target)))) is None:
        return ()
    return EvaluationSet(DEFAULT_PROMPTS), EvaluationSet(DEFAULT_PROMPTS, 1.0), EvaluationSet(CHAT_PROMPTS)


def _device(name: str, local_rank: int) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for an end where the run can go on; a second one ends it at once."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, receive) for number in numbers]
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


class _Bars:
    """How a run looks: a bar for each stage, on standard error; off a terminal a line now and then."""

    def __init__(self, is_shown: bool) -> None:
        self._console: Console = open_console(stderr=True)
        self._is_shown = is_shown
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.fields[note]}"), console=self._console,
            disable=not (is_shown and self._console.is_terminal),
        )  # fmt: skip
        self._task: TaskID | None = None
        self._last_part = -1

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def stage(self, stage: Stage) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(stage, total=None, note="")
        self._last_part = -1
        self._say(f"{stage}:")

    def rows(self, done: int, total: int) -> None:
        self._advance(done, total, f"{done:,} of {total:,} rows")

    def step(self, report: StepReport) -> None:
        match = " ".join(f"{each:.3f}" for each in report.match)
        note = f"loss {report.loss[0]:.3f}, match {match}, {report.tokens_per_second:,.0f} tokens/s"
        if report.heldout_length is not None:
            note += f", held out {report.heldout_length:.3f} tokens a cycle"
        self._advance(report.step, report.num_steps, f"step {report.step}, {report.seconds:.0f} s: {note}", note)

    def evaluated(self, modules: str, evaluations: Sequence[Evaluation]) -> None:
        table = Table(modules, box=box.MARKDOWN)
        for heading in ("prompts", "tokens", "engine", "exact", "accepted by depth"):
            table.add_column(heading, justify="right")
        for each in evaluations:
            rates = " ".join(f"{rate:.3f}" for rate in each.engine.rates)
            lengths = (f"{each.engine.mean_length:.3f}", f"{each.exact.mean_length:.3f}")
            table.add_row(each.name, str(each.num_prompts), f"{each.num_tokens:,}", *lengths, rates)
        if self._is_shown:
            open_console().print(table)

    def _advance(self, done: int, total: int | None, line: str, note: str = "") -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)
        part = 20 * done // total if total else -1
        if part != self._last_part or not total:
            self._last_part = part
            self._say(line)

    def _say(self, line: str) -> None:
        if self._is_shown and not self._console.is_terminal:
            self._console.print(line, markup=False, soft_wrap=True)
