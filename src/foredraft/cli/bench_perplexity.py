"""`foredraft bench perplexity`: what a format of the weights costs in quality."""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_options import NumPrompts, Output, Prompts, print_marks, with_progress, write
from foredraft.cli.display import open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig

TEXTS = DEFAULT_PROMPTS.with_name("summarization_20.jsonl")


@engine_options
def perplexity(
    prompts: Prompts = TEXTS,
    num_prompts: NumPrompts = 20,
    formats: Annotated[str, typer.Option(help="which to compare, the first with the others")] = "float32,bfloat16,int8",
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """How well the target predicts texts with its weights in each format: perplexity, and how often the best token is
    the same.

    The prompts are the texts, without the chat template; their first tokens are not counted. Nothing is drafted.
    """
    from foredraft.bench.perplexity import FormatResult, PerplexityResult, format_config, score_texts

    with usage_errors():
        configs = {name: format_config(config, name) for name in formats.split(",")}
        texts = read_prompts(prompts, num_prompts)
    results: list[FormatResult] = []
    for name, each in configs.items():  # one after the other, so that one model at a time is in memory
        llm = load(each, is_quiet=bool(results))
        results.append(score_texts(name, llm, [llm.token_ids(text) for text in with_progress(texts)]))
    result = PerplexityResult(results)
    print_marks(config.marks)
    open_console().print(result.table())
    settings = {"prompts": prompts.name, "num_prompts": num_prompts, "formats": list(configs)}
    write(output, "perplexity", llm, {"settings": settings, **result.to_dict()})
