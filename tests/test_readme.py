"""The README does what it says: its commands and its Python are run, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    """The fenced blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "foredraft " in command])
def test_a_command_runs(command: str) -> None:
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'PATH="{SCRIPTS}:$PATH"; {command}'],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()


def test_make_has_the_commands() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    assert named
    assert named <= set(targets)


def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert "Paris" in capsys.readouterr().out
    outputs = names["outputs"]
    assert isinstance(outputs, list)
    assert all(output.text for output in outputs)


def test_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 120
