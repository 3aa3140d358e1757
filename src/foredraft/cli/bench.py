"""`foredraft bench`: speed and the prefix cache, measured; and the commands of the other `bench_` files."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from foredraft.bench.prompts import CHAT_PROMPTS, DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_compare import acceptance, compare
from foredraft.cli.bench_families import stale_rows
from foredraft.cli.bench_gpu import floor, trace
from foredraft.cli.bench_options import (
    MaxTokens,
    NumPrompts,
    Output,
    Prompts,
    Raw,
    batches_of,
    integers,
    print_marks,
    tokenize,
    with_progress,
    write,
)
from foredraft.cli.bench_peers import peers
from foredraft.cli.bench_perplexity import perplexity
from foredraft.cli.bench_sampling import grammar, processors, structured, verification
from foredraft.cli.bench_serving import offline, overhead, serve
from foredraft.cli.display import open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig
from foredraft.sampling_params import SamplingParams

DEFAULT_DEPTHS = (1, 2, 3, 4, 5, 6, 8)

bench_app = typer.Typer(
    name="bench",
    help="Measure speed, acceptance, the prefix cache, servers, and how tokens are chosen.",
    no_args_is_help=True,
)


@bench_app.command()
@engine_options
def speed(
    prompts: Prompts = DEFAULT_PROMPTS,
    num_prompts: NumPrompts = 8,
    max_tokens: MaxTokens = 128,
    depths: Annotated[str, typer.Option(help="draft tokens a step to try; all useful ones if left out")] = "",
    peers: Annotated[str, typer.Option(help="transformers-dynamic,transformers-static: compare with these too")] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="prompts that run together")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each at every batch")] = 1,
    raw: Raw = False,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Tokens per second, greedily and with EOS ignored: plain decoding, every depth, transformers.

    All take turns on each batch of prompts in one process, after a warm-up on the first; figures are medians over the
    batches.
    """
    from foredraft.bench.speed import measure_speed
    from foredraft.bench.variants import ForedraftVariant, Variant, check_peers, load_peers

    wanted, peer_names = integers("--depths", depths), [name for name in peers.split(",") if name]
    if wanted and config.num_speculative_tokens is None:
        config = replace(config, num_speculative_tokens=max(wanted))
    with usage_errors():
        check_peers(peer_names)
        texts = read_prompts(prompts, num_prompts)
    llm = load(config)
    tried = wanted or [depth for depth in DEFAULT_DEPTHS if depth <= llm.engine.limits.max_depth]
    variants: list[Variant] = [ForedraftVariant(llm, depth) for depth in (0, *tried)]
    variants += load_peers(peer_names, llm)
    batches = batches_of(tokenize(llm, texts, is_raw=raw), batch_size) * rounds
    result = measure_speed(variants, with_progress(batches), max_tokens)
    console = open_console()
    print_marks(llm.config.marks)
    console.print(result.table())
    console.print(f"All outputs identical: {'yes' if result.is_identical else 'NO'}")
    settings = {"prompts": prompts.name, "max_tokens": max_tokens, "batch_size": batch_size, "rounds": rounds}
    write(output, "speed", llm, {"settings": settings, **result.to_dict()})


@bench_app.command()
@engine_options
def chats(
    prompts: Prompts = CHAT_PROMPTS,
    num_prompts: NumPrompts = 40,
    num_turns: Annotated[int, typer.Option(min=2, help="turns of each chat")] = 2,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of every request")] = 0,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Chats of several turns with the prefix cache and without: what it finds, and whether drafts fare the same."""
    from foredraft.bench.chats import measure_chats

    with usage_errors():
        texts = read_prompts(prompts, num_prompts)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    llm = load(config)
    result = measure_chats(llm, texts, num_turns, params)
    console = open_console()
    print_marks(llm.config.marks)
    console.print(result.table())
    console.print(f"All answers identical: {'yes' if result.is_identical else 'NO'}")
    settings = {"prompts": prompts.name, "num_prompts": num_prompts, "num_turns": num_turns, "max_tokens": max_tokens}
    settings |= {"temperature": temperature, "seed": seed, "num_speculative_tokens": llm.engine.limits.max_depth}
    write(output, "chats", llm, {"settings": settings, **result.to_dict()})


@bench_app.command()
@engine_options
def cache(
    prompts: Prompts = DEFAULT_PROMPTS,
    num_prompts: NumPrompts = 32,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="tokens that all prompts begin with")] = 2000,
    repeats: Annotated[int, typer.Option(min=2, help="trials of each kind, each with a prompt of its own")] = 5,
    index_blocks: Annotated[str, typer.Option(help="sizes of the prefix index to try")] = "1000,10000,100000",
    running: Annotated[str, typer.Option(help="how many requests the scheduler runs")] = "1,16,64,256",
    steps: Annotated[int, typer.Option(min=1, help="decode steps of the scheduler to time")] = 100,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """What the prefix cache saves and costs: time to first token, prefix index, scheduler.

    Prompts with a long common beginning, made of the text of the prompts file, take turns: with nothing cached, with
    the beginning cached and wholly cached, without drafts and with. Prefix index and scheduler run without a model.
    """
    from foredraft.bench import cache as bench

    index_sizes, numbers_running = integers("--index-blocks", index_blocks), integers("--running", running)
    with usage_errors():
        bench.check_prefix(prefix_tokens, config.block_size)
        texts = read_prompts(prompts, num_prompts)
    llm = load(config)
    text_token_ids = [token_id for text in texts for token_id in llm.token_ids(text)]
    trial_prompts = bench.shared_prefix_prompts(llm, text_token_ids, prefix_tokens, repeats)
    kinds_of_steps = [(number, depth) for number in numbers_running for depth in bench.STEP_DEPTHS]
    result = bench.CacheResult(
        len(trial_prompts[0]),
        bench.measure_first_token(llm, trial_prompts, prefix_tokens, with_progress(range(repeats))),
        tuple(bench.measure_index(size) for size in with_progress(index_sizes)),
        tuple(bench.measure_steps(number, depth, steps) for number, depth in with_progress(kinds_of_steps)),
    )
    console = open_console()
    print_marks(llm.config.marks)
    for title, table in result.tables().items():
        console.print(f"{title}:", table)
    settings = {"prompts": prompts.name, "num_prompts": num_prompts, "prefix_tokens": prefix_tokens}
    settings |= {"repeats": repeats, "steps": steps, "block_size": config.block_size}
    settings["max_num_batched_tokens"] = config.max_num_batched_tokens
    write(output, "cache", llm, {"settings": settings, **result.to_dict()})


for command in (
    acceptance,
    compare,
    verification,
    structured,
    processors,
    grammar,
    serve,
    offline,
    overhead,
    perplexity,
    floor,
    trace,
    peers,
    stale_rows,
):
    bench_app.command()(command)
