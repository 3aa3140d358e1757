"""`foredraft serve` as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

START_SECONDS = 120.0
END_SECONDS = 60.0


class ServerProcess:
    """Starts at once, with a free port; what it writes on standard error is kept in `lines`."""

    def __init__(self, checkpoint: Path, *options: str) -> None:
        args = [sys.executable, "-m", "foredraft", "serve", str(checkpoint), "--device", "cpu", *options]
        self._process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for line in errors:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a line in which a pattern is found."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        deadline = time.monotonic() + START_SECONDS
        with self._changed:
            while (match := found()) is None:
                assert self._process.poll() is None or self._reader.is_alive(), f"it ended: {self.lines}"
                assert time.monotonic() < deadline, f"no line has {pattern}: {self.lines}"
                self._changed.wait(0.1)
            return match

    @property
    def url(self) -> str:
        """Where it says that it listens, once it does."""
        return self.wait_for(r"Serving on (http://\S+)$").group(1)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for its end."""
        code = self._process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        return code

    def close(self) -> None:
        """End it if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self.exit_code()
