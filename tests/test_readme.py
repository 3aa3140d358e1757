"""The README does what it says: its commands and its Python are run, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
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


COMMANDS = [
    line.removeprefix("$ ")
    for block in blocks("console")
    for line in re.sub(r"\\\n *", "", block).splitlines()  # a command may go on after a backslash
]
SERVER_COMMANDS = [command for command in COMMANDS if "foredraft serve" in command or command.startswith("curl ")]


def run(command: str) -> str:
    """What a command prints, as a reader would run it."""
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
    return found.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if "foredraft " in c and c not in SERVER_COMMANDS])
def test_a_command_runs(command: str) -> None:
    assert run(command).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_server_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serve, ask = (command.replace("8000", port) for command in SERVER_COMMANDS)
    server = subprocess.Popen([SCRIPTS / "foredraft", *shlex.split(serve)[1:]], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        run(f"curl -sf --retry 120 --retry-delay 1 --retry-all-errors http://127.0.0.1:{port}/health")
        assert "Paris" in json.loads(run(ask))["choices"][0]["message"]["content"]
    finally:
        server.terminate()
    assert server.wait(60) == 0


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
