"""A `foredraft serve` of our own, started for a benchmark and ended with it."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx

from foredraft.errors import ForedraftError

START_SECONDS = 900.0
END_SECONDS = 60.0
KEPT_LINES = 20
_ADDRESS = re.compile(r"Serving on (https?://\S+)")


class ServerProcess:
    """Use it with `with`: inside it the server at `base_url` is ready. Raises ForedraftError if it does not start.

    arguments: of `foredraft serve`, besides host and port. command: what to run in its place.
    """

    def __init__(self, arguments: Sequence[str], *, command: Sequence[str] | None = None) -> None:
        serve = [sys.executable, "-m", "foredraft", "serve", "--host", "127.0.0.1", "--port", "0"]
        self._command = [*(serve if command is None else command), *arguments]
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._addresses: queue.Queue[str | None] = queue.Queue()
        self.base_url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready(time.monotonic() + START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ask the server to end, and end it if it does not."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _read(self) -> None:
        """Read what the server says to its end, so that it never waits for a reader."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip()[:500])
            if found := _ADDRESS.search(line):
                self._addresses.put(found[1].rstrip("/"))
        self._addresses.put(None)

    def _wait_until_ready(self, deadline: float) -> None:
        try:
            address = self._addresses.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise self._error(f"did not say within {START_SECONDS:.0f} s where it listens") from None
        if address is None:
            raise self._error("ended before it listened")
        self.base_url = address
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._error("ended before it was ready")
            try:
                if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not yet
            time.sleep(0.1)
        raise self._error(f"was not ready within {START_SECONDS:.0f} s")

    def _error(self, what: str) -> ForedraftError:
        if self._process.poll() is not None:
            self._reader.join()
        said = "\n".join(self._lines) or "(nothing)"
        return ForedraftError(f"the server {what}; it said:\n{said}")
