"""A client that can go away at any moment, which a whole HTTP client does not do."""

from __future__ import annotations

import json
import socket
import struct
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

WAIT_SECONDS = 60.0


class OpenConnection:
    """Sends a request, and reads as much of the answer as it is asked to."""

    def __init__(self, url: str, path: str, body: dict[str, Any] | bytes, *, head: str = "") -> None:
        """head: further lines of it. The body as bytes is sent as it is, without its length."""
        address = urlsplit(url)
        lines = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n{head}"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        if not isinstance(body, bytes):
            lines += f"Content-Length: {len(content)}\r\n"
        self._socket = socket.create_connection((str(address.hostname), int(address.port or 80)), WAIT_SECONDS)
        self._socket.sendall(f"{lines}Connection: close\r\n\r\n".encode() + content)
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def read_until(self, part: bytes) -> bytes:
        """Read until `part` has come; returns all that was read so far."""
        while part not in self._read:
            more = self._socket.recv(65_536)
            assert more, f"the answer ended before {part!r}: {self._read[-300:]!r}"
            self._read += more
        return self._read

    def read_all(self) -> bytes:
        """Read to the end, and close; returns the whole answer, with its head."""
        with self._socket:
            while more := self._socket.recv(65_536):
                self._read += more
        return self._read

    def body(self) -> bytes:
        """The body of the whole answer."""
        head, _, body = self.read_all().partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return body
        parts: list[bytes] = []
        while True:
            size, _, body = body.partition(b"\r\n")
            if not (length := int(size, 16)):
                return b"".join(parts)
            parts.append(body[:length])
            body = body[length + 2 :]

    def json(self) -> dict[str, Any]:
        """The body of the whole answer, if it is a JSON object."""
        found: dict[str, Any] = json.loads(self.body())
        return found

    def go_away(self, *, is_abrupt: bool = False) -> None:
        """Close the connection; abruptly: with a reset."""
        if is_abrupt:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
