"""What every request passes before it is read: keys, the size of its body, and an id to find it by."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.body_reader import BodyReader
from foredraft.server.protocol.errors import ApiError, server_failed

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
MAX_ID_LENGTH = 128


class Gate:
    """ASGI middleware: refuses what has no key (401) or too large a body (413), and passes on the body whole.

    api_keys: none of them needed if there are none. on_refused is told of what is refused here. Each answer carries
    x-request-id, the client's own if it sent one; so does the 500 for what nobody has foreseen, which is raised too.
    """

    def __init__(
        self, app: ASGIApp, api_keys: frozenset[str], bodies: BodyReader, on_refused: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._bodies = bodies
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, has_begun = _request_id(headers), False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                has_begun = True
            await send(message)

        try:
            await self._check(scope, headers, receive)
            body = await self._bodies.read(receive)
        except ApiError as error:
            self._on_refused(error)
            response = JSONResponse(error.body(), error.status, {**error.headers, "connection": "close"})
            await response(scope, receive, send_with_id)
            return
        if body is None:
            return
        try:
            await self._app(scope, _replay(body, receive), send_with_id)
        except Exception:
            if not has_begun:
                await JSONResponse(server_failed().body(), 500)(scope, receive, send_with_id)
            raise

    async def _check(self, scope: Scope, headers: Headers, receive: Receive) -> None:
        """What can be told before the body is read. Raises ApiError."""
        try:
            self._check_key(scope, headers)
            self._bodies.check_length(headers.get("content-length", "0"))
        except ApiError:
            if "expect" not in headers:  # who waits to be told to go on has sent nothing
                await self._bodies.discard(receive)
            raise

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
