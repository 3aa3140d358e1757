"""What several commands share: engine settings as options, and the way from them to a model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

import foredraft
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from foredraft import LLM

_SHORT_FLAGS = {"model": "-m", "num_speculative_tokens": "-k"}


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `config` of a command by one option for each field of EngineConfig.

    Name, type, default and help come from the field, so that the command line has whatever the class has.
    """
    hints = get_type_hints(EngineConfig)
    options = [_option(field, hints[field.name]) for field in fields(EngineConfig)]
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "config"]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *options]]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        settings = {option.name: values.pop(option.name) for option in options}
        with usage_errors():
            config = EngineConfig(**settings)
        command(config=config, **values)

    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _option(field: Field[Any], hint: Any) -> inspect.Parameter:
    kinds = set(get_args(hint)) or {hint}
    kind: Any = next((kind for kind in (bool, int, float) if kind in kinds), str)
    name = field.name.replace("_", "-")
    long_flag = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    flags = [long_flag, *filter(None, [_SHORT_FLAGS.get(field.name)])]
    option = typer.Option(*flags, help=field.metadata["help"], rich_help_panel="Engine")
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[kind | None if NoneType in kinds else kind, option],
    )


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
    return llm


def build_prompt(llm: LLM, text: str, *, is_raw: bool, system: str | None = None) -> list[int]:
    """Token ids for `text`: a conversation where the tokenizer has a chat template, unless it `is_raw`."""
    if is_raw or (system is None and not getattr(llm.tokenizer, "chat_template", None)):
        return llm.token_ids(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat_prompt(messages)
