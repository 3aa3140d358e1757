"""Prompt files are read as they are meant, or refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "data").glob("*.jsonl")), ids=lambda file: file.stem)
def test_our_files_hold_as_many_prompts_as_their_names_say(file: Path) -> None:
    count = int(file.stem.rpartition("_")[2])
    assert len(read_prompts(file, count)) == count
    with pytest.raises(ConfigError, match=f"{count + 1} prompts asked for, but .* has {count}"):
        read_prompts(file, count + 1)


def test_the_default_is_one_of_them() -> None:
    assert (ROOT / DEFAULT_PROMPTS).is_file()


def test_the_first_prompts_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "zwei\n", "three")) + "\n\n")
    assert read_prompts(file, 2) == ["one", "zwei\n"]


@pytest.mark.parametrize("line", ['{"text": "one"}', "one", '["prompt"]', '{"prompt": 1}', '{"prompt": ""}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "one"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2: "):
        read_prompts(file, 2)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no/such/file.*name another with --prompts"):
        read_prompts(Path("no/such/file"), 1)
