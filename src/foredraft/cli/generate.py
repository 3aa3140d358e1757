"""`foredraft generate`: continue one prompt, and say how the drafts fared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from foredraft.cli.display import TextDisplay, depth_table, legend, open_console, summary_table
from foredraft.cli.options import build_prompt, engine_options, load, usage_errors
from foredraft.cli.runs import INTERRUPTED, Run, run_prompt
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.outputs import TextPiece
from foredraft.sampling_params import SamplingParams
from foredraft.structured_output import StructuredOutput

if TYPE_CHECKING:
    from foredraft import LLM, MediaPrompt

WARM_UP_TOKENS = 16


def _sampling(help_text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel="Sampling")


@engine_options
def generate(
    prompt: Annotated[str | None, typer.Argument(help="the text; `-` or nothing reads standard input")] = None,
    system: Annotated[str | None, typer.Option(help="a system message before it")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="a file to show before the text; repeatable")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="a file of sound to play before it; repeatable")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it is, without the chat template")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="run without drafts too, and compare tokens and speed")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one line of JSON instead of text and statistics")
    ] = False,
    max_tokens: Annotated[int, _sampling("most new tokens")] = 256,
    temperature: Annotated[float, _sampling("0 is greedy")] = 0.0,
    top_k: Annotated[int, _sampling("sample among the k likeliest tokens; 0 is all")] = 0,
    top_p: Annotated[float, _sampling("sample among the likeliest tokens that make up this probability")] = 1.0,
    seed: Annotated[int | None, _sampling("the same seed gives the same tokens")] = None,
    min_p: Annotated[float, _sampling("drop tokens below this share of the likeliest one's probability")] = 0.0,
    typical_p: Annotated[float, _sampling("sample among the most typical tokens that make up this probability")] = 1.0,
    repetition_penalty: Annotated[float, _sampling("above 1 makes tokens of prompt and text less likely")] = 1.0,
    presence_penalty: Annotated[float, _sampling("taken from the logits of tokens that the text has")] = 0.0,
    frequency_penalty: Annotated[float, _sampling("taken from them for each time that the text has them")] = 0.0,
    bad_word: Annotated[list[str] | None, _sampling("a text that must not appear; repeatable")] = None,
    min_tokens: Annotated[int, _sampling("nothing ends the text before so many tokens")] = 0,
    stop: Annotated[list[str] | None, _sampling("a text that ends the output and is left out; repeatable")] = None,
    json_schema: Annotated[str | None, _sampling("the output is JSON that this schema allows: a file, or JSON")] = None,
    regex: Annotated[str | None, _sampling("the output matches this regular expression")] = None,
    grammar: Annotated[Path | None, _sampling("the output follows the Lark or GBNF grammar in this file")] = None,
    choice: Annotated[list[str] | None, _sampling("the output is one of the choices; repeatable")] = None,
    stop_token_id: Annotated[list[int] | None, _sampling("a token that ends the text, besides EOS; repeatable")] = None,
    ignore_eos: Annotated[bool, _sampling("go on after EOS", "--ignore-eos")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Continue a prompt: the text on standard output, statistics on standard error.

    On a terminal the colour of the text tells how each token came: the target's own, or accepted at a depth.
    """
    text = _read_prompt(prompt)
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    with usage_errors():
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            bad_words=tuple(bad_word or ()),
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            structured_output=_structured_output(json_schema, regex, grammar, choice),
            seed=seed,
            stop_token_ids=tuple(stop_token_id or ()),
            ignore_eos=ignore_eos,
        )
    llm = load(config, is_quiet=as_json)
    with llm:
        built = build_prompt(llm, text, is_raw=raw, system=system, images=image or (), audio=audio or ())
        runs = _run(llm, built, params, is_comparing=compare, is_quiet=as_json)
    if as_json:
        print(json.dumps(_comparison(runs, params) if compare else runs[0].to_dict()))
    else:
        _print_statistics(runs, params)
    if runs[-1].finish_reason == INTERRUPTED:
        raise typer.Exit(130)


def _structured_output(
    json_schema: str | None, regex: str | None, grammar: Path | None, choice: list[str] | None
) -> StructuredOutput | None:
    if json_schema is None and regex is None and grammar is None and not choice:
        return None
    if json_schema is not None and not json_schema.lstrip().startswith(("{", "true")):
        json_schema = _read_text("--json-schema", Path(json_schema))
    lark = _read_text("--grammar", grammar) if grammar is not None else None
    return StructuredOutput(json_schema=json_schema, regex=regex, grammar=lark, choice=choice or None)


def _read_text(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{flag} cannot be read: {error}") from error


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a PROMPT, or pipe one into standard input")
    try:
        text = sys.stdin.read().rstrip("\n") if prompt is None or prompt == "-" else prompt
        text.encode()  # bytes that are no UTF-8 may have come through as lone surrogates
    except UnicodeError as error:
        raise typer.BadParameter("the prompt is not UTF-8 text") from error
    if not text:
        raise typer.BadParameter("the prompt is empty")
    return text


def _run(llm: LLM, prompt: MediaPrompt, params: SamplingParams, *, is_comparing: bool, is_quiet: bool) -> list[Run]:
    """The run with drafts, and before it, for a comparison, one without. Text goes out unless `is_quiet`."""
    depth = llm.engine.limits.max_depth
    runs = []
    if is_comparing:
        if not depth:
            raise ConfigError("--compare needs drafts: a checkpoint with MTP modules and --num-speculative-tokens > 0")
        params = replace(params, cache_salt="speculative")  # neither run is to find what others have computed
        runs.append(_run_plain(llm, prompt, params, is_quiet=is_quiet))
        if runs[0].finish_reason == INTERRUPTED:
            return runs
    if is_quiet:
        return [*runs, run_prompt(llm, prompt, params, depth, _ignore)]
    display = TextDisplay()
    if display.is_coloured and depth:
        open_console(stderr=True).print(legend(depth))
    runs.append(run_prompt(llm, prompt, params, depth, display.show))
    display.end()
    return runs


def _run_plain(llm: LLM, prompt: MediaPrompt, params: SamplingParams, *, is_quiet: bool) -> Run:
    """Warm up with and without drafts, then run without. Standard output is for the other run: it has one text."""
    for depth in (None, 0):
        llm.generate(
            [prompt],
            replace(params, max_tokens=WARM_UP_TOKENS, num_speculative_tokens=depth, cache_salt=f"warm-up {depth}"),
        )
    notes = open_console(stderr=True)
    show = _dim(notes) if notes.is_terminal and not is_quiet else _ignore
    plain = replace(params, num_speculative_tokens=0, cache_salt="plain")
    run = run_prompt(llm, prompt, plain, 0, show)
    show(TextPiece("\n\n", 0))
    return run


def _dim(console: Console) -> Callable[[TextPiece], None]:
    return lambda piece: console.print(Text(piece.text, "dim"), end="", soft_wrap=True)


def _ignore(piece: TextPiece) -> None:
    pass


def _print_statistics(runs: list[Run], params: SamplingParams) -> None:
    notes = open_console(stderr=True)
    notes.print(summary_table(runs))
    if runs[-1].stats.speculation.num_drafts:
        notes.print(depth_table(runs[-1].stats.speculation))
    found = _comparison(runs, params)
    if "ratio" in found:
        same = {True: "identical", False: "NOT identical", None: "sampled, so not comparable"}[found["is_identical"]]
        notes.print(f"tokens with and without drafts: {same}; {found['ratio']:.2f} times as fast with drafts")


def _comparison(runs: list[Run], params: SamplingParams) -> dict[str, Any]:
    """Both runs and, if they ended by themselves, how they compare; for JSON.

    Sampled tokens differ with and without drafts (their distribution does not), so that there is nothing to compare.
    """
    found: dict[str, Any] = {name: run.to_dict() for name, run in zip(("plain", "speculative"), runs)}
    if len(runs) == 2 and runs[1].finish_reason != INTERRUPTED:
        found["ratio"] = runs[1].tokens_per_second / runs[0].tokens_per_second
        found["is_identical"] = None if params.temperature else runs[1].token_ids == runs[0].token_ids
    return found
