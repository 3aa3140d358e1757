"""How the playground looks: depths, contrast, themes, phones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from browser.conversing import ask
from playground_peer import EVERY_DEPTH, NUM_DEPTHS, Refusal

try:
    from playwright.sync_api import expect
except ImportError:
    pytest.skip("browser tests need the package playwright", allow_module_level=True)

if TYPE_CHECKING:
    from browser.conftest import Watch
    from playground_peer import Peer
    from playwright.sync_api import Page

# For each element with text of its own that can be seen: its text, and its contrast with what is behind it.
CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(colour).slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      const alpha = channels(colour)[3] ?? 1;
      if (alpha === 1) return colour;
      if (alpha > 0) throw new Error(`a translucent background: ${colour}`);
    }
    throw new Error("no background");
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (!own || node.tagName === "OPTION" || node.closest(".unseen")) continue;
    if (!node.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(node);
    const front = luminance(node instanceof SVGElement ? style.fill : style.color);
    const [low, high] = [front, luminance(behind(node))].sort((a, b) => a - b);
    found.push([node.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_depth_has_its_own_look(open_page: Callable[..., Page], scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    ask(page, "Hello")
    tokens = page.locator("#log .token")
    depths = [int(str(token.get_attribute("data-depth"))) for token in tokens.all()]
    assert depths == [depth for _, depth in EVERY_DEPTH]
    looks = tokens.evaluate_all("nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)")
    assert len(set(looks)) == NUM_DEPTHS + 1
    for one, other in pairwise(looks[1 : NUM_DEPTHS + 1]):
        assert math.dist(channels(one), channels(other)) > 20, f"{one} and {other} are nearly alike"
    # Without any sense of hue the order can still be seen: lightness goes one way with depth.
    greys = [weighted_grey(look) for look in looks[1 : NUM_DEPTHS + 1]]
    assert greys == sorted(greys, reverse=scheme == "light")
    lines = "nodes => nodes.map((node) => getComputedStyle(node).textDecorationStyle)"
    assert len(set(tokens.evaluate_all(lines))) == 4
    legend = page.locator("#legend .token").evaluate_all(
        "nodes => nodes.map((n) => getComputedStyle(n).backgroundColor)"
    )
    assert legend == looks[: NUM_DEPTHS + 1]
    page.get_by_label("Colours").uncheck()
    assert set(tokens.evaluate_all("nodes => nodes.map((n) => getComputedStyle(n).backgroundColor)")) == {looks[0]}


def channels(colour: str) -> list[int]:
    """Red, green and blue of a colour, 0 to 255."""
    return [int(channel) for channel in re.findall(r"\d+", colour)[:3]]


def weighted_grey(colour: str) -> float:
    red, green, blue = channels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_chart_of_an_answer_stands_in_the_row(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport={"width": 1280, "height": 800})
    ask(page, "Hello")
    figures, chart = (page.locator(f".summary > {name}").bounding_box() for name in ("dl", "figure"))
    assert figures is not None
    assert chart is not None
    assert chart["x"] >= figures["x"] + figures["width"]
    assert chart["y"] < figures["y"] + figures["height"]
    assert figures["y"] < chart["y"] + chart["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(
    open_page: Callable[..., Page], peer: Peer, watch: Watch, scheme: str
) -> None:
    watch.allow_failures = True
    page = open_page(color_scheme=scheme, viewport={"width": 1360, "height": 860})
    expect(page.locator("#live-time")).to_be_visible()
    page.get_by_text("More", exact=True).click()
    ask(page, "Hello")
    peer.refusal = Refusal(400, "no", "seed")
    ask(page, "Hello")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 70
    assert [(text, ratio) for text, ratio in found if ratio < 4.5] == []


def test_the_theme_can_be_chosen_and_is_kept(open_page: Callable[..., Page]) -> None:
    page = open_page(color_scheme="light")
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.get_by_label("Theme").select_option("Dark")
    dark = page.evaluate(back)
    assert weighted_grey(dark) < 60 < 200 < weighted_grey(light)
    page.reload()
    assert page.evaluate(back) == dark
    expect(page.get_by_label("Theme")).to_have_value("dark")


def test_a_phone(open_page: Callable[..., Page], peer: Peer) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    peer.pieces = (("word" * 40, 0), *((f" {'long' * depth}", depth) for depth in range(1, 9)), ("x" * 300, 0))
    ask(page, "y" * 300)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == 360
    expect(page.locator("#send")).to_be_in_viewport()
    expect(page.locator("#temperature")).to_be_hidden()
    for panel in ("#settings-panel", "#live-panel"):
        page.locator(f"{panel} > summary").tap()
        for shown in ("#message", "#send"):
            expect(page.locator(shown)).to_be_in_viewport(ratio=1)
        heights = "nodes => nodes.reduce((sum, node) => sum + node.getBoundingClientRect().height, 0)"
        assert page.locator("details.panel[open]").evaluate_all(heights) <= 740 / 2 + 1
    sizes = "nodes => nodes.map((node) => parseFloat(getComputedStyle(node).fontSize))"
    assert min(page.locator("input:not([type=checkbox]), select, textarea").evaluate_all(sizes)) >= 16
    page.get_by_text("More", exact=True).tap()
    expect(page.locator("#live-time")).to_be_visible()
    expect(page.locator("#seed")).to_be_visible()
    assert page.evaluate(width) == 360


def test_a_phone_on_its_side(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport={"width": 740, "height": 360}, is_mobile=True, has_touch=True)
    page.locator("#settings-panel > summary").tap()
    expect(page.locator("#model")).to_be_visible()
    for shown in ("#message", "#send"):
        expect(page.locator(shown)).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(("preference", "name"), [("no-preference", "pulse"), ("reduce", "none")])
def test_reduced_motion_is_kept_to(
    open_page: Callable[..., Page], peer: Peer, watch: Watch, preference: str, name: str
) -> None:
    watch.allow_failures = True
    peer.state = "loading"
    page = open_page(reduced_motion=preference)
    expect(page.locator("#state")).to_have_attribute("data-kind", "waiting")
    assert page.evaluate("getComputedStyle(document.getElementById('state'), '::before').animationName") == name
