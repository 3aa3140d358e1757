"""Commands of `foredraft bench` about families of models."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from foredraft.cli.bench_options import MaxTokens, NumPrompts, Output, write
from foredraft.cli.display import open_console


def stale_rows(
    num_prompts: NumPrompts = 64,
    max_tokens: MaxTokens = 64,
    target_steps: Annotated[int, typer.Option(min=1, help="steps of training of the target")] = 500,
    module_steps: Annotated[int, typer.Option(min=1, help="of the first module alone")] = 150,
    chain_steps: Annotated[int, typer.Option(min=1, help="of all modules together")] = 100,
    seed: Annotated[int, typer.Option(help="of the training")] = 0,
    output: Output = None,
) -> None:
    """What drafts lose if rows of modules that read rejected drafts are not computed again.

    A tiny Inkling with eight modules is trained on a toy language, which takes about a minute, and then continues
    texts greedily: with the engine's own drafter, and with one that leaves such rows as they are. The tokens are the
    same, the share of drafts that are accepted is not.
    """
    from foredraft.bench.stale_rows import ToyLanguage, Training, load_trained, measure_stale_rows, train

    training, language = Training(target_steps, module_steps, chain_steps, seed=seed), ToyLanguage()
    with TemporaryDirectory() as directory:
        trained = train(Path(directory), language, training)
        llm = load_trained(Path(directory))
        result = measure_stale_rows(llm, trained, language.prompts(num_prompts), max_tokens)
        console = open_console()
        console.print(result.table())
        console.print(f"All outputs identical: {'yes' if result.is_identical else 'NO'}")
        settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "training": asdict(training)}
        write(output, "stale-rows", llm, {"settings": settings, **result.to_dict()})
