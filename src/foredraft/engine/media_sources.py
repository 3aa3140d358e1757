"""Where the bytes of images and sound come from: data URLs, and what is allowed of files and other hosts."""

from __future__ import annotations

import asyncio
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from foredraft.engine.media_limits import MediaLimits
from foredraft.errors import RequestError, described, shown
from foredraft.media import MediaKind

MAX_REDIRECTS = 3
DEFAULT_PORTS = {"http": 80, "https": 443}


class MediaSources:
    """Reads URLs. Errors are RequestErrors whose message goes on after the name of a field.

    allowed_local_path: the directory whose files may be read by `file://`; None: none may. allowed_hosts: those that
    may be asked by http and https, `host` at its usual port or `host:port`.
    """

    def __init__(self, allowed_local_path: Path | None, allowed_hosts: frozenset[str], limits: MediaLimits) -> None:
        self._directory = None if allowed_local_path is None else allowed_local_path.resolve()
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._limits = limits

    def content(self, url: str, kind: MediaKind) -> bytes:
        """The bytes behind a URL. kind: what a data URL must say that it holds."""
        scheme = url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                return self._data(url, kind)
            case "file":
                return self._allowed_file(url)
            case "http" | "https":
                return self._fetched(url)
        raise RequestError("must be a URL that begins with data:, file:, http: or https:")

    def base64(self, text: str) -> bytes:
        """The bytes that a text stands for."""
        if len(text) // 4 * 3 > self._limits.max_bytes + 2:
            raise RequestError(f"must have {self._limits.max_bytes} bytes at most")
        try:
            content = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        except ValueError as error:
            raise RequestError(f"must be base64: {described(error)}") from None
        return self._bounded(content)

    def file(self, path: Path) -> bytes:
        """The bytes of a file, wherever it is."""
        try:
            # Without waiting: what is no regular file, such as a pipe, must not hold anybody up.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                content = file.read(self._limits.max_bytes + 1) if is_file else b""
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot be read: {_reason(error)}") from None
        if not is_file:
            raise RequestError("must be a file")
        return self._bounded(content)

    def _data(self, url: str, kind: MediaKind) -> bytes:
        head, comma, text = url.partition(",")
        media_type, *parameters = head[5:].lower().split(";")
        if not comma or "base64" not in parameters:
            raise RequestError("must be a data URL in base64: data:TYPE;base64,...")
        if not media_type.startswith(f"{kind.value}/"):
            raise RequestError(f"must be of a type {kind.value}/..., not {shown(media_type)}")
        return self.base64(text)

    def _allowed_file(self, url: str) -> bytes:
        if self._directory is None:
            raise RequestError("must not be a file:// URL: no directory is allowed (allowed_local_media_path)")
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict"))
            is_whole = parts.netloc in ("", "localhost") and path.is_absolute()
            path = path.resolve()  # links are followed before it is looked at
        except (OSError, ValueError, RuntimeError):  # a NUL, links in a circle
            is_whole = False
        if not is_whole:
            raise RequestError("must be like file:///directory/file")
        if not path.is_relative_to(self._directory):
            raise RequestError("must be inside the directory that allowed_local_media_path names")
        return self.file(path)

    def _fetched(self, url: str) -> bytes:
        try:
            return asyncio.run(self._fetched_in_time(url))
        except TimeoutError:
            raise RequestError(f"cannot be fetched within {self._limits.fetch_seconds:g} s") from None
        except RequestError:
            raise
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise RequestError(f"cannot be fetched: {described(error)}") from None

    async def _fetched_in_time(self, url: str) -> bytes:
        """One deadline over all that a host does: a head that trickles is in time for each timeout of httpx."""
        # No proxies and no credentials that happen to stand in the environment.
        options = {"timeout": None, "trust_env": False, "follow_redirects": False}
        async with asyncio.timeout(self._limits.fetch_seconds):
            async with httpx.AsyncClient(**options, headers={"accept-encoding": "identity"}) as client:  # type: ignore[arg-type]
                asked = httpx.URL(url)
                for _ in range(MAX_REDIRECTS + 1):
                    self._check_host(asked)
                    async with client.stream("GET", asked) as answer:
                        if not answer.has_redirect_location:
                            return await self._body(answer)
                        asked = asked.join(answer.headers["location"])
        raise RequestError(f"cannot be fetched: it is redirected more than {MAX_REDIRECTS} times")

    async def _body(self, answer: httpx.Response) -> bytes:
        if answer.status_code != 200:
            raise RequestError(f"cannot be fetched: its host answers {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_raw():
            content += piece
            self._bounded(content)
        return bytes(content)

    def _check_host(self, url: httpx.URL) -> None:
        usual = DEFAULT_PORTS.get(url.scheme)
        port = url.port or usual
        host = url.raw_host.decode()  # as it is asked for: other letters than ASCII are written in those
        names = {f"{host}:{port}"} | ({host} if port == usual else set())
        if usual is None or url.userinfo or not names & self._hosts:
            allowed = f"only {', '.join(sorted(self._hosts))}" if self._hosts else "none"
            rule = f"of other hosts {allowed} may be asked (allowed_media_hosts)"
            raise RequestError(f"must not be at {shown(host)}: {rule}")

    def _bounded(self, content: bytes | bytearray) -> bytes:
        if len(content) > self._limits.max_bytes:
            raise RequestError(f"must have {self._limits.max_bytes} bytes at most")
        return content  # type: ignore[return-value]


def _reason(error: OSError | ValueError) -> str:
    """Without the path, which may be more than whoever asks should see."""
    return error.strerror or "it cannot be opened" if isinstance(error, OSError) else "its name is not one of a file"
