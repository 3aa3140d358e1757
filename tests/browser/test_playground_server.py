"""What the playground shows of its server: state, models, key, figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from browser.conversing import ANSWER, answer, ask
from playground_peer import NUM_DEPTHS

try:
    from playwright.sync_api import expect
except ImportError:
    pytest.skip("browser tests need the package playwright", allow_module_level=True)

if TYPE_CHECKING:
    from browser.conftest import Watch
    from playground_peer import Peer
    from playwright.sync_api import Page


def test_the_page_waits_for_a_server_that_loads(open_page: Callable[..., Page], peer: Peer, watch: Watch) -> None:
    watch.allow_failures = True
    peer.state = "loading"
    page = open_page()
    expect(page.locator("#state")).to_have_text("Loading the model…")
    peer.state = "ready"
    ask(page, "Hello")
    assert answer(page) == ANSWER


@pytest.mark.parametrize(
    ("state", "words", "kind"),
    [
        ("draining", "Draining: no new requests", "waiting"),
        ("failed", "Failed: see the server's log", "fault"),
        ("closed", "Stopped", "fault"),
    ],
)
def test_the_state_follows_the_server(page: Page, peer: Peer, watch: Watch, state: str, words: str, kind: str) -> None:
    watch.allow_failures = True
    colour = "getComputedStyle(document.getElementById('state')).color"
    expect(page.locator("#state")).to_have_text("Ready")
    green = page.evaluate(colour)
    peer.state = state
    expect(page.locator("#state")).to_have_text(words)
    expect(page.locator("#state")).to_have_attribute("data-kind", kind)
    assert page.evaluate(colour) != green
    peer.state = "ready"
    expect(page.locator("#state")).to_have_text("Ready")


def test_a_server_with_a_key(open_page: Callable[..., Page], peer: Peer, watch: Watch) -> None:
    watch.allow_failures = True
    peer.api_key = "secret"
    page = open_page()
    expect(page.locator("#state")).to_have_text("API key needed")
    expect(page.locator("#key-note")).to_have_text("This server needs an API key.")
    expect(page.get_by_label("API key")).to_be_focused()
    state, button = (page.locator(name).bounding_box() for name in ("#state", "#new-chat"))
    assert state is not None
    assert button is not None
    assert button["y"] < state["y"] + state["height"]  # still one row
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_have_text("The server does not take this API key.")
    expect(page.locator("#model option")).to_have_count(0)
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Tab")
    expect(page.locator("#model option")).to_have_count(1)
    expect(page.locator("#key-note")).to_be_hidden()
    ask(page, "Hello")
    assert answer(page) == ANSWER
    kept: dict[str, Any] = page.evaluate("({...localStorage, ...sessionStorage})")
    assert "secret" not in str(kept)
    page.get_by_label("System prompt").fill("Be brief.")
    kept = page.evaluate("({...localStorage, ...sessionStorage})")
    assert "Be brief." in str(kept)
    assert "secret" not in str(kept)


def test_a_lost_network_is_told(page: Page, watch: Watch) -> None:
    watch.allow_failures = True
    expect(page.locator("#state")).to_have_text("Ready")
    expect(page.locator("#live-time")).to_be_visible()
    page.context.set_offline(True)
    ask(page, "Keep this")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    expect(page.locator("#message")).to_have_value("Keep this")
    expect(page.locator("#state")).to_have_text("Unreachable: trying again")
    expect(page.locator("#state")).to_have_attribute("data-kind", "fault")
    expect(page.locator("#live-state")).to_contain_text("No figures from the server. Those below are from ")
    expect(page.locator("#live-batch output")).to_have_text("3 running, 2 waiting old")
    page.context.set_offline(False)
    expect(page.locator("#live-state")).to_be_hidden()
    expect(page.locator("#live-batch output")).to_have_text("3 running, 2 waiting")
    expect(page.locator("#state")).to_have_text("Ready")


def test_live_figures(page: Page, peer: Peer) -> None:
    acceptance = page.locator("#live-acceptance svg").first
    expect(acceptance).to_have_attribute("aria-label", re.compile("depth 1 50 %, depth 2 25 %.* depth 8 6 %"))
    expect(acceptance.locator("rect.bar")).to_have_count(NUM_DEPTHS)
    expect(page.locator("#live-speed svg")).to_have_attribute("aria-label", re.compile("now [1-9]"))
    expect(page.locator("#live-batch output")).to_have_text("3 running, 2 waiting")
    expect(page.locator("#live-cache output")).to_have_text("25 %")
    expect(page.locator("#live-prefix output")).to_have_text("75 % since start")
    time = page.locator("#live-time svg").first
    expect(time).to_have_attribute(
        "aria-label", "Time of a step: target 60 %, draft 20 %, verification 10 %, host 10 %"
    )
    expect(page.locator("#live-acceptance table tbody tr")).to_have_count(NUM_DEPTHS)
    page.locator("#live-panel > summary").click()  # closed figures are not read
    page.wait_for_timeout(200)
    read = peer.num_scrapes
    page.wait_for_timeout(1200)
    assert peer.num_scrapes == read


def test_the_links_lead_to_the_docs_and_the_metrics(page: Page, peer: Peer) -> None:
    links = page.locator("#live-panel .links a")
    expect(links).to_have_count(2)
    for link, path in zip(links.all(), ("docs", "metrics"), strict=True):
        expect(link).to_have_attribute("href", path)
        assert page.request.get(f"{peer.url}/{path}").ok
