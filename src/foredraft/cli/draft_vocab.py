"""`foredraft draft-vocab`: rank a model's tokens, for the head that drafts are chosen with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.options import usage_errors
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError


def draft_vocab(
    texts: Annotated[list[Path], typer.Argument(help="texts to count in (.txt, .jsonl): best the model's own answers")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write, for --draft-vocab; ends in .json")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="checkpoint directory; the built-in model if left out")
    ] = None,
) -> None:
    """Write the token ids that stand in texts, the most frequent first."""
    from foredraft.engine.token_ranking import rank_texts

    with usage_errors():
        config = EngineConfig(model=model)
        if output.suffix != ".json":
            raise ConfigError(f"output must end in .json, not {output.name!r}")
    ranking = rank_texts(config, texts)
    try:
        output.write_text(json.dumps(ranking, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output {output} cannot be written: {error}") from error
    print(f"{output}: {len(ranking):,} token ids")
