"""Commands of `foredraft bench` that measure how tokens are chosen: verification, grammars, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from foredraft.bench.json_tasks import MAX_TASKS, json_tasks
from foredraft.bench.prompts import CHAT_PROMPTS, DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_options import (
    Depths,
    MaxTokens,
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
from foredraft.cli.display import open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.sampling_params import SamplingParams


@engine_options
def verification(
    prompts: Prompts = CHAT_PROMPTS,
    num_prompts: Annotated[int, typer.Option(min=2, help="how many of them, from the first")] = 40,
    num_seeds: Annotated[int, typer.Option(min=1, help="answers to each prompt")] = 1,
    max_tokens: MaxTokens = 128,
    methods: Annotated[str, typer.Option(help="which to compare, the first with the others")] = "rejection,block",
    temperature: Annotated[float, typer.Option(min=0.01, help="of every request")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="the first answer's; each next one has the next")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts that run together, with all of their seeds")] = 1,
    raw: Raw = False,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """How many drafts each verification method accepts: the same prompts and seeds, side by side.

    Each method has an engine of its own, so on a GPU give --kv-cache-memory-bytes. Means are over prompts, with their
    standard errors; the differences are taken prompt by prompt.
    """
    from foredraft.bench.verification import measure_verification, method_config

    with usage_errors():
        names = list(dict.fromkeys(methods.split(",")))
        configs = {name: method_config(config, name) for name in names}
        texts = read_prompts(prompts, num_prompts)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    llms = {name: load(each, is_quiet=name != names[0]) for name, each in configs.items()}
    print_marks(config.marks)
    llm = llms[names[0]]
    batches = batches_of(tokenize(llm, texts, is_raw=raw), batch_size)
    result = measure_verification(llms, with_progress(batches), params, num_seeds)
    open_console().print(result.table())
    settings = {"prompts": prompts.name, "num_prompts": num_prompts, "num_seeds": num_seeds, "max_tokens": max_tokens}
    settings |= {"temperature": temperature, "seed": seed, "batch_size": batch_size}
    settings["num_speculative_tokens"] = llm.engine.limits.max_depth
    write(output, "verification", llm, {"settings": settings, **result.to_dict()})


@engine_options
def structured(
    num_prompts: Annotated[int, typer.Option(min=1, max=MAX_TASKS, help="how many prompts")] = 20,
    max_tokens: MaxTokens = 400,
    depths: Depths = "0,3,8",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of every request")] = 0,
    batch_size: Annotated[int, typer.Option(min=2, help="requests of a batch whose steps are timed")] = 8,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Answers under a JSON schema: whether they fit it, and their speed and drafts next to those of free text.

    Prompts and schemas are built in. Every answer is followed by as many tokens of free text for the same prompt. Then
    steps of a batch are timed in which half of the requests are structured, and of one in which none is.
    """
    from foredraft.bench.structured import SchemaCheck, measure_structured

    tried = integers("--depths", depths, low=0) or [0]
    with usage_errors():
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        SchemaCheck()
        config = _with_depths(config, tried)
    llm = load(config)
    print_marks(config.marks)
    tasks = json_tasks(num_prompts)
    prompted = list(zip(tasks, tokenize(llm, [task.prompt for task in tasks])))
    result = measure_structured(llm, prompted, params, tried, batch_size, with_progress(range(len(tasks))))
    console = open_console()
    for title, table in result.tables().items():
        console.print(f"{title}:", table)
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    write(output, "structured", llm, {"settings": settings | {"batch_size": batch_size}, **result.to_dict()})


@engine_options
def processors(
    prompts: Prompts = DEFAULT_PROMPTS,
    batch_size: Annotated[int, typer.Option(min=1, help="requests that run together")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="decode steps of each turn")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="turns of each set of options")] = 3,
    depths: Depths = "0",
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """What sampling options cost: decode steps with each of them alone, with all at once, and with none.

    All take turns in one process; figures are medians over the steps. Each option comes with temperature 1.
    """
    from foredraft.bench.processors import measure_processors, num_tokens_of, sets_of_options

    tried = integers("--depths", depths, low=0) or [0]
    with usage_errors():
        texts = read_prompts(prompts, batch_size)
        config = _with_depths(config, tried)
    llm = load(config)
    print_marks(config.marks)
    token_ids = tokenize(llm, texts)
    options = sets_of_options(llm.engine.limits.vocab_size, token_ids[0], num_tokens_of(steps, max(tried)))
    result = measure_processors(llm, token_ids, options, tried, steps, with_progress(range(repeats)))
    open_console().print(result.table())
    settings = {"prompts": prompts.name, "batch_size": batch_size, "steps": steps, "repeats": repeats}
    write(output, "processors", llm, {"settings": settings, **result.to_dict()})


@engine_options
def grammar(
    repeats: Annotated[int, typer.Option(min=1, help="how often each sample is compiled and followed")] = 20,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """What masks of allowed tokens cost: llguidance and, where it is installed, xgrammar, on the same texts.

    Microseconds, median / 99th percentile; nothing of the model but its tokenizer is used.
    """
    from foredraft.bench.grammar import load_libraries, measure_grammar

    llm = load(config, is_quiet=True)
    print_marks(config.marks)
    if llm.tokenizer is None:
        raise ConfigError("grammars need a tokenizer, and the checkpoint has none")
    limits = llm.engine.limits
    libraries = load_libraries(llm.tokenizer, limits.vocab_size, limits.eos_token_ids)
    result = measure_grammar(libraries, llm.tokenizer, with_progress(range(repeats)))
    open_console().print(result.table())
    write(output, "grammar", llm, {"settings": {"repeats": repeats}, **result.to_dict()})


def _with_depths(config: EngineConfig, depths: list[int]) -> EngineConfig:
    """With room for the deepest one, if the settings say nothing."""
    if config.num_speculative_tokens is not None:
        return config
    return replace(config, num_speculative_tokens=max(depths))
