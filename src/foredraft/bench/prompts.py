"""Prompt files: one JSON object a line, with the key `prompt`."""

from __future__ import annotations

import json
from pathlib import Path

from foredraft.errors import ConfigError

_FOLDERS = (
    Path("benchmarks/data"),  # in a clone, by the short name that help texts show
    Path(__file__).parents[1] / "data" / "prompts",  # where a wheel has them
    Path(__file__).parents[3] / "benchmarks" / "data",  # the clone, from elsewhere
)


def _shipped(name: str) -> Path:
    """The file of that name that comes with Foredraft."""
    return next((folder / name for folder in _FOLDERS if (folder / name).is_file()), _FOLDERS[0] / name)


DEFAULT_PROMPTS = _shipped("gsm8k_64.jsonl")
CHAT_PROMPTS = _shipped("mt_bench_40.jsonl")


def read_prompts(file: Path, count: int) -> list[str]:
    """The first `count` prompts of `file`. Raises ConfigError, naming file and line, if there are not as many."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {file} cannot be read: {error}; name another with --prompts") from error
    if len(lines) < count:
        raise ConfigError(f"{count} prompts asked for, but {file} has {len(lines)}")
    return [_prompt(line, f"{file}, line {number}") for number, line in enumerate(lines[:count], start=1)]


def _prompt(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f'{where}: not a JSON object with the key "prompt"') from error
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: prompt must be text, not {prompt!r}")
    return prompt
