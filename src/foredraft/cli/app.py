"""The command `foredraft`: its subcommands, and what its errors look like.

Exit codes: 0; 1 for an error; 2 for wrong usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from foredraft import __version__
from foredraft.cli.bench import bench_app
from foredraft.cli.draft_vocab import draft_vocab
from foredraft.cli.generate import generate
from foredraft.cli.info import info
from foredraft.cli.serve import serve
from foredraft.cli.train import import_speculators, train
from foredraft.errors import ForedraftError

app = typer.Typer(
    name="foredraft",
    help="Lossless inference for language models that carry multi-token-prediction (MTP) modules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(info)
app.command()(draft_vocab)
app.command()(serve)
app.command()(train)
app.command()(import_speculators)
app.add_typer(bench_app)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Errors that Foredraft raises on purpose are one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        # typer turns Ctrl-C into code 130 and ends quietly when whoever read the output has gone.
        code: Any = app(args, prog_name="foredraft", standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except ForedraftError as error:
        _fail(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    if message:  # there is none where the help was printed instead
        print(f"foredraft: error: {message}", file=sys.stderr)
    sys.exit(code)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass
