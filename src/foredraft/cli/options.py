"""What several commands share: engine settings as options, and the way from them to a model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

import foredraft
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, RequestError
from foredraft.server.settings import ServerSettings

if TYPE_CHECKING:
    from foredraft import LLM, MediaPrompt

_SHORT_FLAGS = {"model": "-m", "num_speculative_tokens": "-k"}


Command = Callable[..., None]


def settings_options(kind: type[Any], parameter: str, panel: str) -> Callable[[Command], Command]:
    """A decorator that replaces one parameter of a command by one option for each field of a settings dataclass.

    Name, type, default and help come from the field, so that the command line has whatever the class has.
    """
    hints = get_type_hints(kind)
    options = [_option(field, hints[field.name], panel) for field in fields(kind)]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.name != parameter]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in [*own, *options]]

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in options}
            with usage_errors():
                settings = kind(**given)
            command(**{parameter: settings}, **values)

        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_options

    return decorate


def _option(field: Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    kinds = set(get_args(hint)) or {hint}
    kind: Any = next((kind for kind in (bool, int, float) if kind in kinds), str)
    name = field.name.replace("_", "-")
    long_flag = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    flags = [long_flag, *filter(None, [_SHORT_FLAGS.get(field.name)])]
    option = typer.Option(*flags, help=field.metadata["help"], rich_help_panel=panel)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[kind | None if NoneType in kinds else kind, option],
    )


engine_options = settings_options(EngineConfig, "config", "Engine")
server_options = settings_options(ServerSettings, "settings", "Server")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report a setting that is refused before anything is loaded as wrong usage."""
    try:
        yield
    except (ConfigError, RequestError) as error:
        raise typer.BadParameter(str(error)) from error


def load(config: EngineConfig, *, is_quiet: bool = False) -> LLM:
    """Load the model that `config` describes, and say on standard error, unless `is_quiet`, what its cache holds."""
    from transformers import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    llm = foredraft.LLM(**{field.name: getattr(config, field.name) for field in fields(config)})
    if not is_quiet:
        print(*llm.cache_size.lines(), sep="\n", file=sys.stderr, flush=True)
        if (captured := llm.engine.runner.captured) is not None and captured.num_graphs:
            print(captured.line(), file=sys.stderr, flush=True)
    return llm


def build_prompt(
    llm: LLM,
    text: str,
    *,
    is_raw: bool,
    system: str | None = None,
    images: Sequence[Path] = (),
    audio: Sequence[Path] = (),
) -> MediaPrompt:
    """The prompt for `text`: a conversation where the tokenizer has a chat template, unless it `is_raw`.

    In a conversation what is shown comes before the text; a raw text has a placeholder for each.
    """
    if is_raw or (system is None and not getattr(llm.tokenizer, "chat_template", None)):
        return llm.read_prompt({"prompt": text, "images": images, "audio": audio})
    shown = [{"type": "image", "image": path} for path in images] + [{"type": "audio", "audio": path} for path in audio]
    content = [*shown, {"type": "text", "text": text}] if shown else text
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.read_conversation(messages)
