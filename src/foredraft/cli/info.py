"""`foredraft info`: what a checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from foredraft.cli.display import open_console
from foredraft.config import EngineConfig

if TYPE_CHECKING:
    from foredraft.models.loader import CheckpointInfo


def info(
    model: Annotated[str | None, typer.Argument(help="checkpoint directory; the built-in model if left out")] = None,
    mtp: Annotated[str | None, typer.Option(help="directory or file with MTP modules, if they are elsewhere")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one line of JSON")] = False,
) -> None:
    """Say what is in a checkpoint, without loading it."""
    from foredraft.engine.llm import describe_model

    found = describe_model(EngineConfig(model=model, mtp=mtp))
    if as_json:
        print(json.dumps(asdict(found), default=str))
        return
    table = Table(box=box.SIMPLE, show_header=False)
    for label, value in _rows(found).items():
        table.add_row(label, value)
    open_console().print(table)


def _rows(found: CheckpointInfo) -> dict[str, Any]:
    rows = {
        "path": str(found.path),
        "architecture": f"{found.architecture} ({found.model_type})",
        "parameters": f"{found.num_parameters / 1e6:,.1f} M in {found.dtype}",
        "layers": str(found.num_hidden_layers),
        "hidden size": str(found.hidden_size),
        "vocabulary": f"{found.vocab_size}{', head tied to embedding' if found.tie_word_embeddings else ''}",
        "positions": str(found.max_position_embeddings),
        "MTP modules": str(found.num_mtp_modules),
    }
    if found.num_mtp_modules:
        rows["MTP modules"] += (
            f", {found.num_mtp_parameters / 1e6:,.1f} M parameters, {found.mtp_layout} the checkpoint"
        )
        rows["MTP path"] = str(found.mtp_path)
    return rows
