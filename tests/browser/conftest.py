"""A headless Chromium, and pages in it that are watched: where they ask, and what they complain of.

`peer` is the server behind the page, as new for each test; `open_page` and `page` open the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playground_peer import Peer, running_peer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 10_000  # milliseconds


@dataclass
class Watch:
    """What pages did. `allow_failures`: a test that provokes failed requests, which the browser's console tells of."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    allow_failures: bool = False

    def page(self, page: Page) -> None:
        """Watch this page."""
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self.hear)

    def hear(self, message: ConsoleMessage) -> None:
        """Note a line of the console, unless it is idle talk."""
        if message.type not in {"error", "warning"}:
            return
        if self.allow_failures and message.text.startswith("Failed to load resource"):
            return
        self.complaints.append(message.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # For one module only: while it lives, its event loop keeps other tests from running one in this thread.
    sync_api = pytest.importorskip("playwright.sync_api", reason="browser tests need the package playwright")
    if not CHROMIUM.exists():
        pytest.skip(f"browser tests need Debian's chromium at {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


@pytest.fixture
def peer(running: Peer) -> Peer:
    running.reset()
    return running


@pytest.fixture
def server_url(peer: Peer) -> str:
    """The address of the server, without a slash at its end."""
    return peer.url


@pytest.fixture
def watch(server_url: str) -> Iterator[Watch]:
    """The watch over a test's pages: nothing may be asked of another server, and nothing may be complained of."""
    watch = Watch()
    yield watch
    assert watch.requests
    assert [address for address in watch.requests if not address.startswith(f"{server_url}/")] == []
    assert watch.complaints == []


@pytest.fixture
def open_page(browser: Browser, server_url: str, watch: Watch) -> Iterator[Callable[..., Page]]:
    """A function that opens the playground in a context of its own; it takes the options of `Browser.new_context`."""
    contexts = []

    def opened(**options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        watch.page(page)
        page.goto(f"{server_url}/")
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    """The playground, in a window of a desktop's size."""
    return open_page(viewport={"width": 1360, "height": 860})
