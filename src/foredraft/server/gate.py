"""What every request passes before it is read: keys, the size of its body, and an id to find it by."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.protocol.errors import ApiError

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
MAX_ID_LENGTH = 128
DISCARD_SECONDS, SILENT_SECONDS = 10.0, 0.5
"""How long a body that is refused is read on, in all and while nothing comes."""


class Gate:
    """ASGI middleware: refuses what has no key (401) or too large a body (413), and passes on the body whole.

    api_keys: none of them needed if there are none. Each answer carries x-request-id, the client's own if it sent one.
    """

    def __init__(self, app: ASGIApp, api_keys: frozenset[str], max_body_bytes: int) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._check(scope, headers, receive)
            body = await self._read_body(receive)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, error.headers)
            response.headers["connection"] = "close"
            await response(scope, receive, send_with_id)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send_with_id)

    async def _check(self, scope: Scope, headers: Headers, receive: Receive) -> None:
        """What can be told before the body is read. Raises ApiError."""
        try:
            self._check_key(scope, headers)
            length = headers.get("content-length", "0")
            if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._max_body_bytes):
                raise self._too_large()
        except ApiError:
            if "expect" not in headers:  # who waits to be told to go on has sent nothing
                await _discard(receive)
            raise

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body may have {self._max_body_bytes} bytes at most", code="request_too_large")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        is_open = not self._api_keys or not path.startswith(PROTECTED) or scope["method"] == "OPTIONS"
        if is_open:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode() if scheme.lower() == "bearer" else b""
        # Each is compared in constant time, and all of them, so that the time tells nothing of any.
        matches = [hmac.compare_digest(key, known) for known in self._api_keys]
        if not any(matches):
            message = "the Authorization header must be `Bearer KEY` with a key that the server knows"
            raise ApiError(401, message, code="invalid_api_key")

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone before it was sent. Raises ApiError if it is too large."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                if not is_whole:
                    await _discard(receive)
                raise self._too_large()
            if is_whole:
                return bytes(body)


async def _discard(receive: Receive) -> None:
    """Read what is left of a body, for a while. A connection that is closed on a client that still sends is reset, and
    the client never sees the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            message: Message = {"type": "http.request", "more_body": True}
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await asyncio.wait_for(receive(), SILENT_SECONDS)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, and then whatever else comes (that the client has gone)."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    is_usable = 0 < len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable()
    return given if is_usable else secrets.token_hex(16)
