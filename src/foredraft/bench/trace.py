"""What a device does in steady decoding: how long it is busy, with what, and how often the host waits for it."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from foredraft import LLM
from foredraft.bench.steady import Span, random_prompts, steady_batch, synchronize
from foredraft.errors import ConfigError, ForedraftError

_STEPS = "foredraft: steps"
NUM_UNSEEN_STEPS = 4

WAITS = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cuda(Memcpy|Memset)(2D)?(_v\d+)?")
"""Calls in which the host waits for the device, by their whole names."""

PARTS: tuple[tuple[str, str], ...] = (
    ("copies", r"memcpy|memset"),
    ("attention", r"attention|attend|combine_kernel|flash|fmha"),
    ("head", r"argmax_head|head_kernel|best_of"),
    ("norms", r"norm"),
    ("rotary and activation", r"rotate|rotary|rope|silu|gelu|swiglu"),
    ("matmuls", r"gemm|gemv|matmul|linear|gated|addmm|nvjet|cutlass|cublas|splitk|xmma|\bb?mm\b|dot_kernel"),
    ("sampling", r"argmax|argmin|topk|sort|softmax|multinomial|cumsum|cumprod|scan|random|philox|isfinite"),
    ("copies", r"copy|index|gather|scatter|\bcat\b|catarray|fill|embedding|arange|where|\bto\b|clone|repeat"),
)
"""Parts of a step by what the names of kernels and operations contain; the first that fits is the one."""

OTHER = "other"


class Activity(NamedTuple):
    """A kernel, a copy or an operation: its name, and when it ran, in seconds of the trace."""

    name: str
    start: float
    end: float


class Share(NamedTuple):
    """What bears one name, or belongs to one part: how often it ran, and for how long in all."""

    name: str
    number: int
    seconds: float


@dataclass(frozen=True)
class TraceResult:
    """A span of steps under the profiler, and one without it.

    unit: what `activities` are, kernels or operations; num_requests decode, at `depth` drafts a step. waits: calls in
    which the host waited for the device. host_seconds: in `Engine.step`, a step, without the profiler; the waits, as
    the profiler saw them, are part of it.
    """

    unit: str
    num_requests: int
    depth: int
    num_steps: int
    host_seconds: float
    span: Span
    activities: tuple[Activity, ...]
    waits: tuple[Activity, ...]
    marks: tuple[str, ...] = ()

    @property
    def span_seconds(self) -> float:
        """From the start of the first activity to the end of the last."""
        return max(each.end for each in self.activities) - min(each.start for each in self.activities)

    @property
    def busy_share(self) -> float:
        """The share of that time in which at least one of them ran."""
        return busy_seconds(self.activities) / self.span_seconds

    @property
    def waiting_seconds(self) -> float:
        """Of a step, in which the host waited."""
        return sum(each.end - each.start for each in self.waits) / self.num_steps

    @property
    def names(self) -> list[Share]:
        """By name, the longest first."""
        return shares((each.name, each) for each in self.activities)

    @property
    def parts(self) -> list[Share]:
        """By part of a step, the longest first."""
        return shares((part_of(each.name), each) for each in self.activities)

    @property
    def waits_by_name(self) -> list[Share]:
        return shares((each.name, each) for each in self.waits)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Times in seconds, of all steps together where nothing else is said."""
        return {
            "marks": list(self.marks),
            "unit": self.unit,
            "num_requests": self.num_requests,
            "depth": self.depth,
            "num_steps": self.num_steps,
            "span_seconds": self.span_seconds,
            "busy_share": self.busy_share,
            "idle_share": 1 - self.busy_share,
            "activities_per_step": len(self.activities) / self.num_steps,
            "waits_per_step": len(self.waits) / self.num_steps,
            "seconds_per_step_without_profiler": self.span.seconds / self.span.num_steps,
            "host_seconds_per_step_without_profiler": self.host_seconds,
            "waiting_seconds_per_step": self.waiting_seconds,
            "waits": [share._asdict() for share in self.waits_by_name],
            "parts": [share._asdict() for share in self.parts],
            "names": [share._asdict() for share in self.names],
        }

    def tables(self, num_names: int = 20) -> dict[str, Table]:
        """Tables that are Markdown as well, by title. num_names: how many of the longest are listed by name."""
        return {
            "Steady steps": self._summary(),
            "Where the host waits for the device": self._table("call", self.waits_by_name, len(self.waits)),
            f"{self.unit.capitalize()}, part by part": self._table("part", self.parts),
            f"The longest {self.unit}": self._table(self.unit, self.names[:num_names]),
        }

    def _summary(self) -> Table:
        table = Table("requests", box=box.MARKDOWN)
        headings = ("depth", "ms a step", "host us a step", "waits a step", "us waiting", "busy", "idle")
        for heading in (*headings, f"{self.unit} a step"):
            table.add_column(heading, justify="right")
        table.add_row(
            str(self.num_requests),
            str(self.depth),
            f"{1000 * self.span.seconds / self.span.num_steps:.3f}",
            f"{1e6 * self.host_seconds:.0f}",
            f"{len(self.waits) / self.num_steps:.2f}",
            f"{1e6 * self.waiting_seconds:.0f}",
            f"{100 * self.busy_share:.1f} %",
            f"{100 * (1 - self.busy_share):.1f} %",
            f"{len(self.activities) / self.num_steps:.1f}",
        )
        return table

    def _table(self, kind: str, rows: Sequence[Share], count: int | None = None) -> Table:
        """count None: shares are those of the time of all activities."""
        table = Table(kind, box=box.MARKDOWN)
        for heading in ("a step", "us a step", "share of time" if count is None else "share of calls"):
            table.add_column(heading, justify="right")
        whole = sum(each.end - each.start for each in self.activities)
        for row in rows:
            share = row.seconds / whole if count is None else row.number / count
            table.add_row(
                _short(row.name),
                f"{row.number / self.num_steps:.2f}",
                f"{1e6 * row.seconds / self.num_steps:.1f}",
                f"{100 * share:.1f} %",
            )
        return table


def measure_trace(
    llm: LLM, batch_size: int, depth: int, context: int, num_steps: int, chrome: Path | None = None
) -> TraceResult:
    """Run steady steps without the profiler and then as many with it.

    Prompts are `context` random token ids. chrome: where to write the trace, gzipped if the name ends in .gz. On a
    machine without a GPU the activities are torch's outermost operations. Raises ConfigError or ForedraftError, as
    `steady_batch` does.
    """
    with steady_batch(llm, random_prompts(llm, batch_size, context), depth, "trace") as batch:
        timed = batch.run(num_steps)
        host_seconds = _host_seconds(llm, num_steps)
        is_cuda = llm.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(NUM_UNSEEN_STEPS):  # the profiler slows the first launches down
                llm.engine.step()
            synchronize(llm.device)
            with record_function(_STEPS):
                for _ in range(num_steps):
                    llm.engine.step()
            synchronize(llm.device)
    if chrome is not None:
        chrome.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(chrome))
    ran, waits = read_events(profiler.events() or (), is_cuda=is_cuda)
    if not ran:
        raise ForedraftError("the profiler saw nothing: is another one running?")
    unit = "kernels" if is_cuda else "operations"
    return TraceResult(
        unit, batch_size, depth, num_steps, host_seconds, timed, tuple(ran), tuple(waits), llm.config.marks
    )


def check_chrome_file(file: Path | None) -> None:
    """Raise ConfigError for a name that viewers of such traces would not open."""
    if file is not None and not file.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"a trace is a file that ends in .json or .json.gz, not {file.name}")


def _host_seconds(llm: LLM, num_steps: int) -> float:
    """Within `Engine.step`, a step: the device may still be at work when it returns."""
    total = 0.0
    for _ in range(num_steps):
        started = time.perf_counter()
        llm.engine.step()
        total += time.perf_counter() - started
    return total / num_steps


def read_events(events: Iterable[Any], *, is_cuda: bool) -> tuple[list[Activity], list[Activity]]:
    """What ran, and where the host waited, in the steps that `measure_trace` marks.

    What ran are kernels and copies of the device, or on a CPU the operations that are part of no other one.
    """
    known = list(events)
    marked = next((each for each in known if each.name == _STEPS and each.device_type.name == "CPU"), None)
    if marked is None:
        return [], []
    start, end = marked.time_range.start, marked.time_range.end
    ran: list[Activity] = []
    waits: list[Activity] = []
    for each in known:
        if each.time_range.start < start or each is marked or each.name == _STEPS:
            continue
        activity = Activity(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6)
        if each.device_type.name == "CPU":
            if WAITS.fullmatch(each.name) and each.time_range.start < end:
                waits.append(activity)
            elif not is_cuda and each.cpu_parent is marked:
                ran.append(activity)
        elif is_cuda and not getattr(each, "is_user_annotation", False):
            ran.append(activity)
    return ran, waits


def busy_seconds(activities: Iterable[Activity]) -> float:
    """How long at least one of them ran."""
    total, until = 0.0, float("-inf")
    for each in sorted(activities, key=lambda activity: activity.start):
        total += max(0.0, each.end - max(each.start, until))
        until = max(until, each.end)
    return total


def part_of(name: str) -> str:
    """The part of a step that a kernel or an operation belongs to, by its name."""
    lowered = name.lower()
    return next((part for part, pattern in PARTS if re.search(pattern, lowered)), OTHER)


def shares(named: Iterable[tuple[str, Activity]]) -> list[Share]:
    """How often and how long, by name, the longest first."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for name, activity in named:
        counts[name] += 1
        seconds[name] += activity.end - activity.start
    found = [Share(name, count, seconds[name]) for name, count in counts.items()]
    return sorted(found, key=lambda share: share.seconds, reverse=True)


def _short(name: str, length: int = 90) -> str:
    """Names of templates fill pages."""
    plain = name.replace("|", "/")
    return plain if len(plain) <= length else f"{plain[: length - 3]}..."
