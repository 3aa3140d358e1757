"""Commands of `foredraft bench` that say how near a machine's limits the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.bench_options import (
    Output,
    engine_settings,
    integers,
    keeper,
    print_marks,
    with_progress,
    with_room,
    write,
)
from foredraft.cli.display import open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig

if TYPE_CHECKING:
    pass

Context = Annotated[int, typer.Option(min=1, help="random token ids that each request begins with")]
Steps = Annotated[int, typer.Option(min=1, help="decode steps to time as a whole")]


@engine_options
def floor(
    depths: Annotated[str, typer.Option(help="draft tokens a step, a list; 0 is plain decoding")] = "0,1,2,4,8",
    batch_sizes: Annotated[str, typer.Option(help="requests that decode together, a list")] = "1,8,64",
    context: Context = 1000,
    steps: Steps = 60,
    repeats: Annotated[int, typer.Option(min=1, help="spans of each depth and batch size")] = 3,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Steady decoding against the time that reading its weights and its cache takes.

    The floor of a step is what it must read (weights of the target, its head, the modules and the heads that choose
    drafts, keys and values of all requests) at the bandwidth of a large copy, measured in the same run. A cycle is a
    verification with the passes that follow it. Depths take turns; figures are medians over the repeats. With --output
    what has been measured is written after each span.
    """
    from foredraft.bench.floor import measure_floor

    tried, sizes = integers("--depths", depths, low=0) or [0], integers("--batch-sizes", batch_sizes) or [1]
    tried, sizes = list(dict.fromkeys(tried)), list(dict.fromkeys(sizes))
    with usage_errors():
        config = with_room(config, tried, max(sizes))
    llm = load(config)
    settings = {"depths": tried, "batch_sizes": sizes, "context": context, "steps": steps, "repeats": repeats}
    settings |= engine_settings(llm)
    keep = keeper(output, "floor", llm, settings)
    result = measure_floor(
        llm, tried, sizes, context, steps, with_progress(range(repeats)), on_span=lambda found: keep(found.to_dict())
    )
    console = open_console()
    print_marks(llm.config.marks)
    console.print(result.table())
    console.print(result.caption(), soft_wrap=True)


@engine_options
def trace(
    depth: Annotated[int, typer.Option(min=0, help="draft tokens a step")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="requests that decode together")] = 1,
    context: Context = 1000,
    steps: Steps = 20,
    chrome: Annotated[Path | None, typer.Option(help="write the trace here: .json, or .json.gz to gzip it")] = None,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """What the GPU does in steady decoding, under torch's profiler: busy or idle, kernel by kernel, and who waits.

    Milliseconds and the host's microseconds a step are measured before, without the profiler. Idle is what no kernel
    covers between the first one and the last. On a CPU torch's operations take the place of kernels.
    """
    from foredraft.bench.trace import check_chrome_file, measure_trace

    with usage_errors():
        check_chrome_file(chrome)
        config = with_room(config, [depth], batch_size)
    llm = load(config)
    result = measure_trace(llm, batch_size, depth, context, steps, chrome)
    console = open_console()
    print_marks(llm.config.marks)
    for title, table in result.tables().items():
        console.print(f"{title}:", table)
    settings = {"depth": depth, "batch_size": batch_size, "context": context, "steps": steps} | engine_settings(llm)
    write(output, "trace", llm, {"settings": settings, **result.to_dict()})
