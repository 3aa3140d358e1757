"""Conversations may begin with turns that the user gives: a file of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.errors import ConfigError


def read_user_turns(
    file: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """The turns of a .txt file, one a line, or of a .jsonl file, objects with `prompt` or `token_ids`, as token ids.

    Those of more than max_tokens are left out. ConfigError names what cannot be read, and a file of which none is left.
    """
    turns = [turn for turn in _turns(file, tokenizer, vocab_size) if 0 < len(turn) <= max_tokens]
    if not turns:
        raise ConfigError(f"prompts={str(file)!r} has no turn of at most {max_tokens} tokens, half a row")
    return turns


def _turns(file: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Iterator[tuple[int, ...]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={str(file)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"prompts={str(file)!r}, line {number}"
        turn = line if file.suffix == ".txt" else _parsed(line, where)
        if isinstance(turn, list):
            if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in turn):
                raise ConfigError(f"{where}: token_ids must be integers from 0 to {vocab_size - 1}")
            yield tuple(turn)
        elif tokenizer is None:
            raise ConfigError(f"{where} is text, but the target has no tokenizer: give token_ids")
        else:
            yield tuple(int(token_id) for token_id in tokenizer(turn, add_special_tokens=False)["input_ids"])


def _parsed(line: str, where: str) -> str | list[Any]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    turn = value.get("token_ids", value.get("prompt")) if isinstance(value, dict) else None
    if not isinstance(turn, str | list):
        raise ConfigError(f"{where} must be an object with prompt, a text, or token_ids, a list")
    return turn
