"""The bytes of bodies: bounded in size and in time, and given up when the server ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Message, Receive

from foredraft.server.protocol.errors import ApiError

BODY_SECONDS = 120.0
"""How long a body may take to come."""

DISCARD_SECONDS, SILENT_SECONDS = 10.0, 0.5
"""How long a body that is refused is read on, in all and while nothing comes."""


class BodyReader:
    """Reads the bodies of a server's requests."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_closed = False

    async def read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone before it was sent.

        Raises ApiError if it is too large, takes too long, or the server ends meanwhile.
        """
        deadline = asyncio.timeout(0 if self._is_closed else BODY_SECONDS)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                return await self._read(receive)
        except TimeoutError:
            if self._is_closed:
                raise ApiError(503, "the server shuts down", code="engine_unavailable") from None
            raise ApiError(408, f"the body has not come within {BODY_SECONDS:.0f} s") from None
        finally:
            self._deadlines.discard(deadline)

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
            if len(body) > self._max_bytes:
                if not is_whole:
                    await self.discard(receive)
                raise self._too_large()
            if is_whole:
                return bytes(body)

    def check_length(self, length: str) -> None:
        """Raise ApiError if the header Content-Length says that the body is too large."""
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body may have {self._max_bytes} bytes at most", code="request_too_large")

    async def discard(self, receive: Receive) -> None:
        """Read what is left of a body, for a while. A connection that is closed on a client that still sends is reset,
        and the client never sees the answer."""
        deadline = asyncio.timeout(DISCARD_SECONDS)
        with suppress(TimeoutError):
            async with deadline:
                self._deadlines.add(deadline)
                message: Message = {"type": "http.request", "more_body": True}
                while message["type"] == "http.request" and message.get("more_body", False):
                    message = await asyncio.wait_for(receive(), SILENT_SECONDS)
        self._deadlines.discard(deadline)

    def close(self) -> None:
        """Give up the bodies that have not come yet."""
        self._is_closed = True
        for deadline in self._deadlines:
            with suppress(RuntimeError):  # it expires already
                deadline.reschedule(asyncio.get_running_loop().time())
