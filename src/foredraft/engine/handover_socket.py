"""Handovers over a socket of this machine: a Unix one, by its path, or TCP on the loopback interface."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from foredraft.engine.handover import Handover
from foredraft.engine.handover_bytes import write_bytes
from foredraft.errors import HandoverError

Address = str | os.PathLike[str] | tuple[str, int]
"""The path of a Unix socket, or host and port."""

RECEIVED = b"\x06"
"""What the receiver answers when it has all bytes, and they are whole."""
DEFAULT_SECONDS = 60.0


class _Line:
    """A connected socket with a deadline: nothing on it takes longer, whatever the other side does."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._deadline = deadline

    def send(self, data: memoryview | bytes) -> None:
        """Send all of it."""
        self._limit()
        self._socket.sendall(data)

    def fill(self, memory: memoryview) -> None:
        """Receive until `memory` is full."""
        while memory:
            self._limit()
            count = self._socket.recv_into(memory)
            if not count:
                raise HandoverError("the other side has closed the connection before the end")
            memory = memory[count:]

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def send_handover(handover: Handover, address: Address, timeout: float = DEFAULT_SECONDS) -> None:
    """Connect to a `HandoverListener`, send all, and wait until it says that it has it whole.

    HandoverError if that has not happened within `timeout` seconds, or cannot; the handover is as good as before.
    """
    deadline = time.monotonic() + timeout
    family, place = _resolved(address)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connected:
            connected.settimeout(timeout)
            connected.connect(place)
            line = _Line(connected, deadline)
            write_bytes(handover.header(), handover.tensors, line.send)
            answer = bytearray(len(RECEIVED))
            line.fill(memoryview(answer))
    except TimeoutError as error:
        raise HandoverError(f"{_shown(address)} has not taken the handover within {timeout} s") from error
    except OSError as error:
        raise HandoverError(f"{_shown(address)} cannot take the handover: {error}") from error
    if answer != RECEIVED:
        raise HandoverError(f"{_shown(address)} answers as no listener does: {bytes(answer)!r}")


class HandoverListener:
    """Waits at an address for handovers, and receives one after the other. It needs no engine: any thread may run it.

    A path must not exist yet; what is there is readable by this user only, and gone after `close`. Port 0 finds a free
    one, see `address`. Raises HandoverError if the address cannot be had.
    """

    def __init__(self, address: Address, timeout: float = DEFAULT_SECONDS) -> None:
        family, place = _resolved(address)
        self._timeout = timeout
        self._path = Path(place) if isinstance(place, str) else None
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
            if self._path is not None:
                self._path.chmod(0o600)  # nobody can connect before `listen`
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise HandoverError(f"{_shown(address)} cannot be listened at: {error}") from error

    @property
    def address(self) -> Address:
        """Where senders connect to."""
        if self._path is not None:
            return self._path
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def receive(self, wait: float | None = None) -> Handover | None:
        """The next handover; None if nobody connects within `wait` seconds (None: however long that takes).

        HandoverError if what comes is not whole, or not all there within the listener's `timeout`; the listener can go
        on, and the sender knows that it was not taken.
        """
        self._socket.settimeout(wait)
        try:
            connected, _ = self._socket.accept()
        except (TimeoutError, BlockingIOError):
            return None
        with connected:
            line = _Line(connected, time.monotonic() + self._timeout)
            try:
                handover = Handover.from_source(line.fill)
                line.send(RECEIVED)
            except TimeoutError as error:
                raise HandoverError(f"the handover has not come within {self._timeout} s") from error
            except OSError as error:
                raise HandoverError(f"the connection broke off: {error}") from error
        return handover

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            self._path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _resolved(address: Address) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """HandoverError for what is not on this machine: rows and tokens travel as they are."""
    if not isinstance(address, tuple):
        return socket.AF_UNIX, os.fspath(address)
    host, port = address
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_local = ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise HandoverError(f"{_shown(address)} is not on the loopback interface: use 127.0.0.1, ::1 or a path")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else os.fspath(address)
