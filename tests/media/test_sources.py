"""Hosts that may be asked for media, and all others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from foredraft.engine.media_limits import MediaLimits
from foredraft.engine.media_sources import MediaSources
from foredraft.errors import RequestError
from foredraft.media import MediaKind


class Host(BaseHTTPRequestHandler):
    """/redirect?URL sends on to URL; /size?N has N bytes; /slow never ends, nor does the head of /head; /ok says ok."""

    def do_GET(self) -> None:
        path, _, argument = self.path.partition("?")
        if path == "/head":
            self.send_response_only(200)
            self.flush_headers()
            with suppress(OSError):  # whoever asked has gone
                for number in range(1000):
                    self.wfile.write(b"x-%d: 1\r\n" % number)
                    time.sleep(0.02)
            return
        self.send_response({"/redirect": 302, "/ok": 200, "/size": 200, "/slow": 200}.get(path, 404))
        if path == "/redirect":
            self.send_header("Location", argument)
        self.end_headers()
        try:
            if path == "/size":
                self.wfile.write(bytes(int(argument)))
            elif path == "/ok":
                self.wfile.write(b"ok")
            while path == "/slow":
                self.wfile.write(b".")
                time.sleep(0.02)
        except OSError:
            pass  # whoever asked has gone

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def sources(port: int) -> MediaSources:
    limits = MediaLimits(max_bytes=1_000, fetch_seconds=0.5)
    return MediaSources(None, frozenset({f"127.0.0.1:{port}", "Example.com"}), limits)


def test_an_allowed_host_is_asked(sources: MediaSources, port: int) -> None:
    assert sources.content(f"http://127.0.0.1:{port}/ok", MediaKind.IMAGE) == b"ok"
    assert sources.content(f"http://127.0.0.1:{port}/redirect?/ok", MediaKind.IMAGE) == b"ok"
    assert len(sources.content(f"http://127.0.0.1:{port}/size?1000", MediaKind.AUDIO)) == 1000


def test_what_the_environment_says_of_proxies_is_not_followed(
    sources: MediaSources, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert sources.content(f"http://127.0.0.1:{port}/ok", MediaKind.IMAGE) == b"ok"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nothing", "cannot be fetched: its host answers 404"),
        ("/size?1001", "must have 1000 bytes at most"),
        ("/slow", "cannot be fetched within 0.5 s"),
        ("/redirect?http://localhost:{port}/ok", "must not be at 'localhost': of other hosts only"),
        ("/redirect?file:///etc/passwd", "must not be at ''"),
        ("/redirect?/redirect", "must not be at|cannot be fetched"),
        ("/redirect?/redirect?/redirect?/redirect?/redirect?/ok", "is redirected more than 3 times"),
    ],
)
def test_answers_that_are_refused(sources: MediaSources, port: int, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sources.content(f"http://127.0.0.1:{port}{path.format(port=port)}", MediaKind.IMAGE)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/ok",  # another port
        "http://localhost:{port}/ok",
        "http://user@127.0.0.1:{port}/ok",
        "http://example.com:8080/ok",
        "http://example.com.evil.org/ok",
        "http://evil.org/@example.com",
        "http://evil.org#@example.com",
        "http://example.com@evil.org/",
        "http://example.com\\@evil.org/",
        "http://exam\tple.com/",
    ],
)
def test_other_hosts_are_not_asked(sources: MediaSources, port: int, url: str) -> None:
    with pytest.raises(RequestError, match=r"must not be at .*\(allowed_media_hosts\)|cannot be fetched: InvalidURL"):
        sources.content(url.format(port=port), MediaKind.IMAGE)


def test_a_host_whose_head_does_not_end(sources: MediaSources, port: int) -> None:
    """Every line of it comes soon enough."""
    with pytest.raises(RequestError, match=r"cannot be fetched within 0\.5 s"):
        sources.content(f"http://127.0.0.1:{port}/head", MediaKind.IMAGE)


def test_a_host_by_its_name_in_ascii(port: int) -> None:
    limits = MediaLimits(fetch_seconds=0.5)
    sources = MediaSources(None, frozenset({"xn--bcher-kva.invalid"}), limits)
    with pytest.raises(RequestError, match="cannot be fetched"):
        sources.content("http://xn--bcher-kva.invalid/", MediaKind.IMAGE)
    with pytest.raises(RequestError, match=r"must not be at 'xn--bcher-kva\.example'"):
        sources.content("http://xn--bcher-kva.example/", MediaKind.IMAGE)


def test_a_host_that_does_not_answer() -> None:
    limits = MediaLimits(fetch_seconds=0.5)
    sources = MediaSources(None, frozenset({"127.0.0.1:9"}), limits)
    with pytest.raises(RequestError, match="cannot be fetched: ConnectError"):
        sources.content("http://127.0.0.1:9/", MediaKind.IMAGE)
