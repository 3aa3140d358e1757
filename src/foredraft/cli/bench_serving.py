"""Commands of `foredraft bench` that measure requests: of a server, in process, and of one against the other."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_options import NumPrompts, Output, Prompts, Raw, print_marks, tokenize, with_progress, write
from foredraft.cli.display import open_console
from foredraft.cli.options import build_prompt, engine_options, load, usage_errors
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, shown
from foredraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.bench.serving.datasets import Dataset, WorkItem
    from foredraft.bench.serving.metrics import SpeculationFigures
    from foredraft.bench.serving.summary import Summary

_DATA, _LOAD, _REQUEST = "Dataset", "Load", "Requests"


def _in(panel: str, help_text: str, *flags: str, low: int | None = None) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=panel, min=low)


DatasetName = Annotated[str, _in(_DATA, "prompts, random, jsonl or shared-prefix")]
NumRequests = Annotated[int, _in(_DATA, "how many requests", low=1)]
PromptsFile = Annotated[
    Path | None,
    _in(_DATA, "of prompts and jsonl: one JSON object a line, with prompt (jsonl: or messages, and output_tokens)"),
]
NewTokens = Annotated[int | None, _in(_DATA, "of prompts and jsonl: most new tokens; 128 if left out")]
InputLen = Annotated[int | None, _in(_DATA, "of random: tokens of a prompt; 512 if left out")]
OutputLen = Annotated[int | None, _in(_DATA, "of random and shared-prefix: new tokens; 128 if left out")]
RangeRatio = Annotated[float | None, _in(_DATA, "of random: lengths vary by this share, up and down; 0 if left out")]
PrefixLen = Annotated[int | None, _in(_DATA, "of shared-prefix: tokens of each beginning; 512 if left out")]
NumPrefixes = Annotated[int | None, _in(_DATA, "of shared-prefix: how many beginnings; 4 if left out")]
SuffixLen = Annotated[int | None, _in(_DATA, "of shared-prefix: tokens after the beginning; 128 if left out")]
VocabSize = Annotated[
    int | None,
    _in(_DATA, "of random and shared-prefix: ids are drawn below it; 1000, or the model's where it is known"),
]
Seed = Annotated[int, _in(_REQUEST, "of dataset and arrivals, and of the first request at temperature > 0", low=0)]
Temperature = Annotated[float, _in(_REQUEST, "0 is greedy")]
IgnoreEos = Annotated[bool, _in(_REQUEST, "go on after EOS", "--ignore-eos")]
Percentiles = Annotated[str, typer.Option(help="which to report, of each time")]
Goodput = Annotated[
    list[str] | None, typer.Option(help="count requests within limits in ms, as in 'ttft:500 tpot:50'; e2el too")
]
BaseUrl = Annotated[str, typer.Option(help="where the server is")]
ApiKey = Annotated[str | None, typer.Option(help="sent as a bearer token")]
WarmUp = Annotated[int, typer.Option(min=0, help="requests, or repeats of a batch, before the measurement")]


def serve(
    base_url: BaseUrl = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="completions or chat")] = "completions",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="the first that the server has, if left out")
    ] = None,
    api_key: ApiKey = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds without a byte that fail a request")] = 600.0,
    warm_up: WarmUp = 1,
    percentiles: Percentiles = "50,90,99",
    goodput: Goodput = None,
    output: Output = None,
    request_rate: Annotated[float, _in(_LOAD, "arrivals a second; inf is all at once")] = float("inf"),
    burstiness: Annotated[float, _in(_LOAD, "1 is a Poisson process, less comes in bursts")] = 1.0,
    max_concurrency: Annotated[int | None, _in(_LOAD, "most requests open at once", low=1)] = None,
    dataset: DatasetName = "prompts",
    num_prompts: NumRequests = 64,
    prompts: PromptsFile = None,
    max_tokens: NewTokens = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = None,
    prefix_len: PrefixLen = None,
    num_prefixes: NumPrefixes = None,
    suffix_len: SuffixLen = None,
    vocab_size: VocabSize = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    num_speculative_tokens: Annotated[
        int | None,
        _in(_REQUEST, "draft tokens a step, a field of Foredraft's server", "--num-speculative-tokens", "-k", low=0),
    ] = None,
    extra_body: Annotated[str | None, _in(_REQUEST, "more fields of every request, as a JSON object")] = None,
) -> None:
    """Throughput and times of any OpenAI-compatible server, over HTTP with streams.

    Requests arrive at a rate, or as many at once as may be open. The exit code is 1 if any request failed.
    """
    import asyncio

    from foredraft.bench.serving.client import ServingClient
    from foredraft.bench.serving.load import Load
    from foredraft.bench.serving.request_body import RequestOptions
    from foredraft.bench.serving.run import ServingRun, run_serving
    from foredraft.bench.serving.summary import Summary, parse_goodput, parse_percentiles

    with usage_errors():
        data = _dataset(locals())
        options = RequestOptions(
            endpoint,  # type: ignore[arg-type]  # checked there
            temperature,
            seed,
            ignore_eos,
            num_speculative_tokens,
            _json_object(extra_body),
        )
        arrivals = Load(request_rate, burstiness, max_concurrency, seed)
        wanted, limits = parse_percentiles(percentiles), parse_goodput(goodput or ())
        items = data.items()
        options.check(items)
        client = ServingClient(base_url, api_key=api_key, timeout=timeout)

    async def run(on_end: Callable[[], None]) -> ServingRun:
        async with client:
            return await run_serving(client, items, options, arrivals, model=model, num_warm_up=warm_up, on_end=on_end)

    with _counted(len(items)) as on_end:
        result = asyncio.run(run(on_end))
    summary = Summary.of(result.figures, result.duration, wanted, limits)
    print_marks(result.marks)
    _show(summary, result.speculation, result.no_speculation)
    if output is not None:
        from foredraft.bench.report import write_server_report

        settings = data.settings() | {"endpoint": endpoint, "temperature": temperature, "ignore_eos": ignore_eos}
        settings |= {"num_speculative_tokens": num_speculative_tokens, "extra_body": dict(options.extra_body)}
        settings |= {"request_rate": "inf" if request_rate == float("inf") else request_rate, "burstiness": burstiness}
        settings |= {"max_concurrency": max_concurrency, "warm_up": warm_up, "goodput_ms": limits}
        speculation = result.speculation and result.speculation.to_dict()
        results = {"settings": settings, **summary.to_dict(), "speculation": speculation}
        write_server_report(
            output, "serve", {"base_url": base_url, "model": result.model, "marks": result.marks}, results
        )
    if summary.failed:
        raise typer.Exit(1)


@engine_options
def offline(
    mode: Annotated[
        str, typer.Option(help="throughput (a closed loop), or latency (one batch, repeated)")
    ] = "throughput",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="of throughput: most requests in the engine; all if left out")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="of latency: how often; 5 if left out")] = None,
    warm_up: WarmUp = 1,
    percentiles: Percentiles = "50,90,99",
    goodput: Goodput = None,
    raw: Raw = False,
    output: Output = None,
    dataset: DatasetName = "prompts",
    num_prompts: NumRequests = 64,
    prompts: PromptsFile = None,
    max_tokens: NewTokens = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    range_ratio: RangeRatio = None,
    prefix_len: PrefixLen = None,
    num_prefixes: NumPrefixes = None,
    suffix_len: SuffixLen = None,
    vocab_size: VocabSize = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    *,
    config: EngineConfig,
) -> None:
    """Throughput and latency in process, without a server: the same requests and figures as of `bench serve`.

    The warm-up runs other prompts of the same kind. The exit code is 1 if any request failed.
    """
    from foredraft.bench import offline as bench
    from foredraft.bench.serving.datasets import warm_up_items
    from foredraft.bench.serving.figures import duration_of
    from foredraft.bench.serving.metrics import SpeculationFigures
    from foredraft.bench.serving.summary import Summary, parse_goodput, parse_percentiles

    with usage_errors():
        data = _dataset(locals())
        _check_mode(mode, concurrency, repeats)
        if raw and data.has_token_ids:
            raise ConfigError(f"raw has no effect with dataset={data.kind}: its prompts are token ids")
        wanted, limits = parse_percentiles(percentiles), parse_goodput(goodput or ())
        settings = data.settings() | {"mode": mode, "temperature": temperature, "ignore_eos": ignore_eos}
        _ = SamplingParams(temperature=temperature, seed=seed)
        if raw and any(item.messages is not None for item in data.items()):
            raise ConfigError("messages need the chat template, which raw leaves out")
    llm = load(config)
    items = data.items(llm.engine.limits.vocab_size)
    token_ids = [_token_ids(llm, item, is_raw=raw) for item in items]
    params = [
        SamplingParams(
            max_tokens=item.max_tokens,
            temperature=temperature,
            seed=min(seed + index, 2**63 - 1),
            ignore_eos=ignore_eos,
        )
        for index, item in enumerate(items)
    ]
    latency = None
    if mode == "latency":
        bench.measure_latency(llm, token_ids, params, range(-warm_up, 0), wanted)
        latency = bench.measure_latency(llm, token_ids, params, with_progress(range(repeats or 5)), wanted)
        figures, duration = latency.figures, sum(latency.seconds)
        settings |= {"repeats": len(latency.repeats)}
    else:
        altered = [_token_ids(llm, item, is_raw=raw) for item in warm_up_items(items, warm_up)]
        bench.warm_up(llm, altered, params[0], concurrency)
        with _counted(len(items)) as on_end:
            figures = bench.run_closed_loop(llm, token_ids, params, concurrency, on_end=on_end)
        duration = duration_of(figures)
        settings |= {"concurrency": concurrency}
    summary = Summary.of(figures, duration, wanted, limits)
    speculation = SpeculationFigures.of_stats(bench.speculation_of(figures))
    print_marks(llm.config.marks)
    if latency is not None:
        open_console().print(latency.table())
    _show(summary, speculation if speculation.num_drafts else None, "no drafts were made")
    settings |= {"num_speculative_tokens": llm.engine.limits.max_depth, "warm_up": warm_up, "goodput_ms": limits}
    settings["marks"] = llm.config.marks
    results = {"settings": settings, **(latency.to_dict() if latency else {}), **summary.to_dict()}
    write(output, "offline", llm, results | {"speculation": speculation.to_dict()})
    if summary.failed:
        raise typer.Exit(1)


@engine_options
def overhead(
    prompts: Prompts = DEFAULT_PROMPTS,
    num_prompts: NumPrompts = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens for each prompt")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each side")] = 3,
    base_url: Annotated[
        str | None, typer.Option(help="a server with the same model and settings; one is started if left out")
    ] = None,
    api_key: ApiKey = None,
    raw: Raw = False,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """What HTTP costs: the same prompts in process and through `foredraft serve`, in turn, greedily, EOS ignored.

    Both engines are in memory at once, so on a GPU give --kv-cache-memory-bytes.
    """
    from foredraft.bench.serving.overhead import OfflineSide, ServerSide, measure_overhead
    from foredraft.bench.serving.server_process import ServerProcess

    with usage_errors():
        if api_key is not None and base_url is None:
            raise ConfigError("api_key has no effect without base_url: the server that is started has none")
        texts = read_prompts(prompts, num_prompts)
    llm = load(config)
    token_ids = tokenize(llm, texts, is_raw=raw)
    started = ServerProcess(engine_arguments(config)) if base_url is None else nullcontext()
    with _ending_on_sigterm(), started as process:
        url = base_url if process is None else process.base_url
        assert url is not None
        result = measure_overhead(
            OfflineSide(llm, token_ids, max_tokens, concurrency),
            ServerSide(url, token_ids, max_tokens, concurrency, api_key=api_key),
            with_progress(range(rounds)),
            max_tokens,
        )
    console = open_console()
    print_marks(llm.config.marks)
    console.print(result.table())
    console.print(f"All outputs identical: {'yes' if result.is_identical else 'NO'}")
    settings = {"prompts": prompts.name, "num_prompts": num_prompts, "max_tokens": max_tokens}
    settings |= {"concurrency": concurrency, "rounds": rounds, "num_speculative_tokens": llm.engine.limits.max_depth}
    settings["marks"] = llm.config.marks
    write(output, "overhead", llm, {"settings": settings, **result.to_dict()})


def engine_arguments(config: EngineConfig) -> list[str]:
    """The settings that are not the defaults, as options of a command that takes those of the engine."""
    arguments: list[str] = []
    for field in fields(config):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)]
    return arguments


def _dataset(values: dict[str, Any]) -> Dataset:
    from foredraft.bench.serving.datasets import Dataset

    named = {field.name: values[field.name] for field in fields(Dataset) if field.name != "kind"}
    return Dataset(kind=values["dataset"], **named)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"extra_body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"extra_body must be a JSON object, not {shown(value)}")
    return value


def _check_mode(mode: str, concurrency: int | None, repeats: int | None) -> None:
    if mode not in ("throughput", "latency"):
        raise ConfigError(f"mode must be throughput or latency, not {shown(mode)}")
    if mode == "latency" and concurrency is not None:
        raise ConfigError("concurrency has no effect with mode=latency: all prompts are one batch")
    if mode == "throughput" and repeats is not None:
        raise ConfigError("repeats has no effect with mode=throughput")


def _token_ids(llm: LLM, item: WorkItem, *, is_raw: bool) -> list[int]:
    if item.messages is not None:
        return llm.chat_prompt(item.messages)
    prompt = build_prompt(llm, item.prompt, is_raw=is_raw).token_ids if isinstance(item.prompt, str) else item.prompt
    return list(prompt)


@contextmanager
def _counted(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal, and what to call for each request that has ended."""
    notes = open_console(stderr=True)
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("Measuring", total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block like an error, so that a server that was started in it ends too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(summary: Summary, speculation: SpeculationFigures | None, no_speculation: str) -> None:
    console = open_console()
    for table in summary.tables():
        console.print(table)
    if speculation is not None:
        console.print(speculation.table())
    notes: Sequence[str] = summary.notes()
    if speculation is None:
        notes = [f"Speculation: {no_speculation}", *notes]
    for note in notes:
        console.print(note, markup=False)
