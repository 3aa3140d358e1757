"""`foredraft serve`: the OpenAI-compatible server."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Annotated

import typer

from foredraft.cli.options import engine_options, load, server_options, usage_errors
from foredraft.config import EngineConfig
from foredraft.server.settings import ServerSettings


@engine_options
@server_options
def serve(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="checkpoint directory; the built-in model if left out")
    ] = None,
    *,
    config: EngineConfig,
    settings: ServerSettings,
) -> None:
    """Serve the model over HTTP, as OpenAI's API does, until SIGTERM or Ctrl-C.

    GET / is a page to try it, /docs the reference of the API, /metrics is for Prometheus.
    """
    if checkpoint is not None and config.model is not None:
        raise typer.BadParameter("MODEL and --model name the same thing: give one of them")
    if checkpoint is not None:
        config = replace(config, model=checkpoint)
    from foredraft.engine.llm import model_name
    from foredraft.server.serve import serve as run

    with usage_errors():
        settings.read_api_keys()
    try:
        run(lambda: load(config), settings, model_name(config))
    finally:  # the interpreter would put back the defaults, and takes a moment to end
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, signal.SIG_IGN)
