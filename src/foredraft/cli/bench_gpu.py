"""Commands of `foredraft bench` that say how near a machine's limits the engine runs, and how others fare on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_options import Output, Prompts, integers, print_marks, tokenize, with_progress, write
from foredraft.cli.display import open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, described

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.bench.peers import Job, Peer, PeersResult
    from foredraft.models.loader import LoadedModel

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
        config = _with_room(config, tried, max(sizes))
    llm = load(config)
    settings = {"depths": tried, "batch_sizes": sizes, "context": context, "steps": steps, "repeats": repeats}
    settings |= _engine_settings(llm)
    keep = _keeper(output, "floor", llm, settings)
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
        config = _with_room(config, [depth], batch_size)
    llm = load(config)
    result = measure_trace(llm, batch_size, depth, context, steps, chrome)
    console = open_console()
    print_marks(llm.config.marks)
    for title, table in result.tables().items():
        console.print(f"{title}:", table)
    settings = {"depth": depth, "batch_size": batch_size, "context": context, "steps": steps} | _engine_settings(llm)
    write(output, "trace", llm, {"settings": settings, **result.to_dict()})


@engine_options
def peers(
    depths: Annotated[str, typer.Option(help="draft tokens a step of our engine, a list")] = "0,2,8",
    prompts: Prompts = DEFAULT_PROMPTS,
    random_tokens: Annotated[
        int, typer.Option(min=0, help="single prompts of so many random token ids instead, and random ids in all")
    ] = 0,
    num_single: Annotated[int, typer.Option(min=0, help="prompts that run one at a time")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens of each of those")] = 128,
    num_requests: Annotated[int, typer.Option(min=0, help="requests of mixed lengths that run together")] = 64,
    prompt_lengths: Annotated[str, typer.Option(help="tokens of their prompts, from and to")] = "100,1500",
    new_tokens: Annotated[str, typer.Option(help="new tokens of each, from and to")] = "32,256",
    rounds: Annotated[int, typer.Option(min=1, help="turns of each")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of the lengths, the pieces and random token ids")] = 0,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Our engine against transformers with the same weights: its generate, and its continuous batching.

    One request at a time: generate, generate with a compiled static cache, and generate with the MTP modules. Many at
    once, their prompts pieces of the prompts file: continuous batching. All are greedy, EOS is ignored, prefill is part
    of the time. What fails is reported with its reason. With --output the report grows with each turn. The weights are
    loaded twice, so on a GPU give --kv-cache-memory-bytes.
    """
    from foredraft.bench.peers import Job, measure_peers, mixed_jobs

    tried = list(dict.fromkeys(integers("--depths", depths, low=0) or [0]))
    lengths, new = _range("--prompt-lengths", prompt_lengths), _range("--new-tokens", new_tokens)
    with usage_errors():
        config = _with_room(config, tried, 1)
        texts = [] if random_tokens else read_prompts(prompts, max(1, num_single))
    llm = load(config)
    single, text = _material(llm, texts, num_single, random_tokens, lengths[1], seed)
    settings = {"depths": tried, "num_single": num_single, "max_tokens": max_tokens, "num_requests": num_requests}
    settings |= {"prompt_lengths": lengths, "new_tokens": new, "rounds": rounds, "seed": seed}
    settings |= {"random_tokens": random_tokens} if random_tokens else {"prompts": prompts.name}
    keep = _keeper(output, "peers", llm, settings | _engine_settings(llm))
    workloads: dict[str, tuple[list[Job], bool]] = {
        f"one at a time, {num_single} in all": ([Job(tuple(ids), max_tokens) for ids in single], True),
        f"together, {num_requests} requests": (mixed_jobs(text, num_requests, lengths, new, seed), False),
    }
    found: dict[str, PeersResult] = {}
    console = open_console()
    print_marks(llm.config.marks)
    others, notes = _load_others(llm)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)

    def on_turn(result: PeersResult) -> None:
        found[result.workload] = result
        workloads = [each.to_dict() for each in found.values()]
        keep({"marks": llm.config.marks, "notes": notes, "workloads": workloads})

    is_compared = llm.config.synthetic_rates is None
    for name, (jobs, is_single) in workloads.items():
        if not jobs:
            continue
        with ExitStack() as stack:
            taking_part = _peers(llm, others, tried, stack, is_single=is_single)
            bar = with_progress(range(rounds))
            result = measure_peers(name, taking_part, jobs, bar, is_compared=is_compared, on_turn=on_turn)
        console.print(result.table())
        for line in result.failures():
            console.print(f"Failed: {line}", soft_wrap=True, markup=False)


def _peers(
    llm: LLM, others: LoadedModel | None, depths: Sequence[int], stack: ExitStack, *, is_single: bool
) -> list[Peer]:
    """Those of one workload, ours first. stack: closes what has to be."""
    from foredraft.bench.peer_engines import OurEngine, TransformersBatching, TransformersGenerate

    found: list[Peer] = [OurEngine(llm, depth, 1 if is_single else None) for depth in depths]
    if others is None:
        return found
    target = others.target
    if not is_single:
        return [*found, stack.enter_context(TransformersBatching(target))]
    found.append(TransformersGenerate("transformers generate", target))
    found.append(TransformersGenerate("transformers generate, static cache", target, cache="static"))
    if others.mtp is not None and llm.config.synthetic_rates is None:
        name = f"transformers generate, {others.mtp.num_mtp_layers} MTP modules"
        found.append(TransformersGenerate(name, target, mtp=others.mtp))
    return found


def _load_others(llm: LLM) -> tuple[LoadedModel | None, list[str]]:
    """The same weights once more, with transformers' own attention (None if they cannot be had), and what is left out
    of the comparison and why. There are as many modules as our engine may use."""
    from foredraft.engine.llm import resolve_model
    from foredraft.models.loader import load_checkpoint

    path, mtp = resolve_model(llm.config)
    try:
        loaded = load_checkpoint(
            path,
            mtp,
            num_modules=min(llm.engine.limits.max_depth, llm.info.num_mtp_modules),
            dtype=llm.dtype,
            device=llm.device,
            attn_implementation="sdpa",
            load_format=llm.config.load_format,
        )
    except Exception as error:  # no memory for a second copy, for instance: ours can still be measured
        return None, [f"Left out: transformers, {described(error)}"]
    notes = []
    if loaded.mtp is not None and llm.config.synthetic_rates is not None:
        notes.append("Left out: transformers' generate with MTP modules, which cannot accept drafts by chance")
    if llm.config.quantization != "none":
        notes.append(f"transformers runs the weights as they are, not quantization={llm.config.quantization}")
    return loaded, notes


def _material(
    llm: LLM, texts: list[str], num_single: int, random_tokens: int, longest: int, seed: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts that run one at a time, and a text that the others are cut from."""
    from foredraft.bench.steady import random_prompts

    if random_tokens:
        return random_prompts(llm, num_single, random_tokens, seed), random_prompts(llm, 1, 4 * longest, seed + 1)[0]
    if llm.tokenizer is None:
        raise ConfigError("the prompts are text, and the checkpoint has no tokenizer: give --random-tokens")
    return tokenize(llm, texts)[:num_single], [token_id for text in texts for token_id in llm.token_ids(text)]


def _with_room(config: EngineConfig, depths: Sequence[int], batch_size: int) -> EngineConfig:
    """With room for the deepest of `depths`, if the settings say nothing. ConfigError if they have no room."""
    deepest = max(depths)
    if batch_size > config.max_num_seqs:
        raise ConfigError(f"{batch_size} requests are to run at once, but max_num_seqs={config.max_num_seqs}")
    if config.num_speculative_tokens is None:
        return replace(config, num_speculative_tokens=deepest)
    if deepest > config.num_speculative_tokens:
        raise ConfigError(f"depth {deepest} asked for, but num_speculative_tokens={config.num_speculative_tokens}")
    return config


def _range(name: str, text: str) -> tuple[int, int]:
    """Two numbers, the lower first."""
    numbers = integers(name, text)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise typer.BadParameter(f"{name} must be two numbers, the lower first, as in 100,1500, not {text!r}")
    return numbers[0], numbers[1]


def _engine_settings(llm: LLM) -> dict[str, Any]:
    config = llm.config
    return {
        "quantization": config.quantization,
        "draft_vocab_size": config.draft_vocab_size,
        "draft_head_bits": head.bits if (head := llm.engine.runner.draft_head) is not None else None,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "verification": llm.engine.limits.verification,
        "marks": config.marks,
    }


def _keeper(
    output: Path | None, benchmark: str, llm: LLM, settings: dict[str, Any]
) -> Callable[[dict[str, Any]], None]:
    """A function that writes a report anew, whole at any moment: a run that is ended early leaves what it has."""

    def keep(figures: dict[str, Any]) -> None:
        if output is not None:
            unfinished = output.with_name(f"{output.name}.new")
            write(unfinished, benchmark, llm, {"settings": settings, **figures})
            unfinished.replace(output)

    return keep
