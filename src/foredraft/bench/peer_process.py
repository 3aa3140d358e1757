"""An engine in a process of its own, for `measure_peers`: with other packages than ours, stopped between its turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any, Self

from foredraft.bench.peers import Job
from foredraft.bench.variants import Generation
from foredraft.errors import ForedraftError, described, shown
from foredraft.statistics import SpeculationStats

LAST_WORDS = 300
"""So many characters of what a process last wrote to stderr are part of an error."""


class PeerProcess:
    """A command that generates for whoever writes to its stdin, in JSON, an object a line.

    Its first line says that it is ready, with anything else to know about it (`about`). Each request has one answer:

        {"ready": true, "version": "..."}
        {"prompts": [[ids], ...], "num_tokens": [n, ...], "together": false}    together: as one batch; else one by one
        {"outputs": [[ids], ...], "seconds": s, "speculation": {...}}           speculation may be left out
        {"error": "what went wrong"}                                            it can be asked again

    speculation has fields of `SpeculationStats`. It starts with the first turn, or with the next one after it failed.
    Its group is stopped except for its turns, so that nothing of it spins beside another's; it stays in our session, so
    that the kernel hangs up on it, stopped or not, however this process ends. deadline: seconds to get ready, and for
    each answer. grace: seconds that it has to end by itself when its stdin is closed.
    """

    def __init__(self, name: str, command: Sequence[str], deadline: float = 900.0, grace: float = 10.0) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._command = list(command)
        self._deadline = deadline
        self._grace = grace
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(self, jobs: Sequence[Job], *, is_together: bool) -> Generation:
        """Run the jobs, as one batch or one by one; the seconds are the process's own, without our exchange of them.

        Raises ForedraftError if it answers with an error, and if it ends, takes too long or answers what cannot be
        right, after which it is closed.
        """
        request = {
            "prompts": [job.prompt for job in jobs],
            "num_tokens": [job.num_tokens for job in jobs],
            "together": is_together,
        }
        try:
            if self._process is None:
                self._start()
            else:
                self._signal(signal.SIGCONT)
            started = time.perf_counter()
            answer = self._exchange(request)
            elapsed = time.perf_counter() - started
            generation = None if "error" in answer else _generation(answer, elapsed)
            self._stop()
        except BaseException:
            self.close()
            raise
        if generation is None:
            raise ForedraftError(str(answer["error"]).encode("utf-8", "replace").decode())
        return generation

    def close(self) -> None:
        """End the process and all of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            _signal_group(process, signal.SIGCONT)
            with suppress(BrokenPipeError):  # what it has not read of a request
                _pipe(process.stdin).close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._grace)
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
            _pipe(process.stdout).close()
            _pipe(self._stderr).close()

    def _start(self) -> None:
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                process_group=0,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            self._stderr.close()
            raise ForedraftError(f"it cannot be started: {error}") from error
        greeting = self._exchange(None)
        if greeting.pop("ready", None) is not True:
            raise ForedraftError(f"its first line does not say that it is ready: {shown(greeting)}")
        self.about = greeting

    def _exchange(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Write the request, if there is one, and read a line. At the deadline the group is killed, which ends both."""
        process = _running(self._process)
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _signal_group(process, signal.SIGKILL)

        watchdog = threading.Timer(self._deadline, end)
        watchdog.start()
        try:
            if request is not None:
                _pipe(process.stdin).write(json.dumps(request) + "\n")
                _pipe(process.stdin).flush()
            line = _pipe(process.stdout).readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if is_late.is_set():
            raise ForedraftError(f"it took longer than {self._deadline:g} s{self._last_words()}")
        if not line:
            raise ForedraftError(f"{self._ending()}{self._last_words()}")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ForedraftError(f"it answered {shown(line)}, which is no JSON object{self._last_words()}")
        return answer

    def _ending(self) -> str:
        """What became of a process that has closed its stdout."""
        try:
            return f"it ended with exit code {_running(self._process).wait(self._grace)}"
        except subprocess.TimeoutExpired:
            return "it closed its stdout"

    def _last_words(self) -> str:
        file = _pipe(self._stderr)
        file.seek(0)
        lines = [line.strip() for line in file.read().splitlines() if line.strip()]
        return f": {' / '.join(lines[-5:])[-LAST_WORDS:]}" if lines else ""

    def _stop(self) -> None:
        """Return when it has stopped, or ended: if we are killed, the kernel wakes what is stopped and nothing else."""
        self._signal(signal.SIGSTOP)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, _running(self._process).pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        _signal_group(_running(self._process), number)


def _generation(answer: dict[str, Any], elapsed: float) -> Generation:
    """What an answer says. ForedraftError if it cannot be right."""
    try:
        outputs = [tuple(int(token_id) for token_id in output) for output in answer["outputs"]]
        seconds = float(answer["seconds"])
        speculation = _speculation(answer.get("speculation"))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ForedraftError(f"its answer cannot be understood: {described(error)}") from error
    if not 0 < seconds <= elapsed:
        raise ForedraftError(f"it says that it took {seconds:g} s, and has answered after {elapsed:g} s")
    return Generation(outputs, seconds, speculation)


def _speculation(fields: dict[str, Any] | None) -> SpeculationStats | None:
    """Counts as a process gives them. ValueError or TypeError if they are none."""
    if fields is None:
        return None
    stats = SpeculationStats(**fields)
    lists = (stats.drafted_by_depth, stats.accepted_by_depth)
    if not all(isinstance(each, list) for each in lists) or len(lists[0]) != len(lists[1]):
        raise ValueError("drafted_by_depth and accepted_by_depth must be lists of one length")
    numbers = [value for value in asdict(stats).values() if not isinstance(value, list)] + lists[0] + lists[1]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"speculation must consist of counts, not {shown(fields)}")
    return stats


def _signal_group(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, number)


def _pipe(file: IO[str] | None) -> IO[str]:
    assert file is not None
    return file


def _running(process: subprocess.Popen[str] | None) -> subprocess.Popen[str]:
    assert process is not None
    return process
