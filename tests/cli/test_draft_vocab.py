"""`foredraft draft-vocab`: texts to a file, and the file to drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import tiny_llama
from typer.testing import CliRunner

from foredraft.cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model"), num_modules=2, tokenizer=True))


def test_a_ranking_is_written_and_used(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w7 w3 w7 w5 w7")
    (tmp_path / "b.jsonl").write_text('{"text": "w3 w3 w9"}\n')
    output = tmp_path / "ranking.json"
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    outcome = CliRunner().invoke(app, ["draft-vocab", *texts, "--output", str(output), "--model", model])
    assert outcome.exit_code == 0
    assert outcome.output.endswith("ranking.json: 4 token ids\n")
    assert json.loads(output.read_text()) == [3, 7, 5, 9]

    draft = ["--draft-vocab", str(output), "--draft-vocab-size", "4", "--draft-head-bits", "8", "--num-blocks", "64"]
    outcome = CliRunner().invoke(app, ["generate", "w3 w1", "--model", model, "--max-tokens", "8", "--json", *draft])
    assert outcome.exit_code == 0, outcome.output


def test_what_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w7")
    command = ["draft-vocab", str(tmp_path / "a.txt"), "--model", model]
    assert CliRunner().invoke(app, [*command, "--output", str(tmp_path / "ranking.txt")]).exit_code == 2
    outcome = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "none" / "ranking.json")])
    assert "ranking.json cannot be written" in str(outcome.exception)
