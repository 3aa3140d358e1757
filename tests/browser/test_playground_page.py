"""The playground in a real browser, against a peer that answers by a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from playground_peer import EVERY_DEPTH, NUM_DEPTHS, Peer, Refusal, running_peer

try:
    from playwright.sync_api import Error, expect
except ImportError:
    pytest.skip("browser tests need the package playwright", allow_module_level=True)

if TYPE_CHECKING:
    from browser.conftest import Watch
    from playwright.sync_api import Page

ANSWER = "".join(text for text, _ in EVERY_DEPTH)
TAG = "漢字🙂 <img src=x onerror=alert(1)><script>alert(2)</script>"
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
    return peer.url


def ask(page: Page, question: str) -> None:
    """Send a message and wait until the page is ready for the next."""
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#message").fill(question)
    page.locator("#message").press("Enter")
    expect(page.locator("#log article.model[aria-busy]")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()


def answer(page: Page) -> str:
    """The text of the last answer."""
    return str(page.locator("article.model .text").last.text_content())


def test_a_conversation_by_keyboard_alone(page: Page, peer: Peer) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    expect(page.locator("#announcer")).to_have_text(f"The answer is complete. {ANSWER}")
    assert answer(page) == ANSWER
    expect(page.locator("#message")).to_be_focused()
    expect(page.locator("#message")).to_have_value("")
    page.keyboard.type("More")
    page.keyboard.press("Tab")
    expect(page.locator("#send")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("article.model")).to_have_count(2)
    expect(page.locator("article.model[aria-busy]")).to_have_count(0)
    expect(page.locator("#message")).to_be_focused()
    said = [("user", "One\nTwo"), ("assistant", ANSWER), ("user", "More")]
    assert peer.bodies[1]["messages"] == [{"role": role, "content": content} for role, content in said]


def test_the_whole_page_is_reached_by_tab_with_a_visible_focus(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator(".skip").focus()
    assert page.locator(".skip").evaluate("node => node.getBoundingClientRect().top >= 0")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "() => { const node = document.activeElement;"
            " if (node === document.body) return ['', ''];"
            " return [node.id || node.textContent.trim(), getComputedStyle(node).outlineStyle]; }"
        )
        if not name:
            break  # round the end, back to the document
        assert outline != "none", f"{name} shows no focus"
        seen.append(name)
    wanted = {"theme", "new-chat", "Settings", "model", "system", "temperature", "More", "colours", "log", "message"}
    assert wanted <= set(seen)
    page.locator(".skip").press("Enter")
    expect(page.locator("#message")).to_be_focused()


def test_the_controls_make_the_request(page: Page, peer: Peer) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Draft tokens a step").select_option("3")
    page.get_by_text("More", exact=True).click()
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 64, "seed": 7}
    values |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 2}
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.get_by_label("Answer in JSON").check()
    ask(page, "Hello")
    assert peer.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_speculation": True,
            "num_speculative_tokens": 3,
            "response_format": {"type": "json_object"},
            **values,
        }
    ]


def test_an_untouched_control_sends_nothing(page: Page, peer: Peer) -> None:
    ask(page, "Hello")
    assert set(peer.bodies[0]) == {"model", "messages", "stream", "stream_options", "return_speculation"}
    offered = page.locator("#num-drafts option").evaluate_all("options => options.map((option) => option.value)")
    assert offered == ["", *(str(count) for count in range(NUM_DEPTHS + 1))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_depth_has_its_own_look(open_page: Callable[..., Page], scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    ask(page, "Hello")
    tokens = page.locator("#log .token")
    depths = [int(str(token.get_attribute("data-depth"))) for token in tokens.all()]
    assert depths == [depth for _, depth in EVERY_DEPTH]
    looks = tokens.evaluate_all("nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)")
    assert len(set(looks)) == NUM_DEPTHS + 1
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


def weighted_grey(colour: str) -> float:
    red, green, blue = (int(channel) for channel in re.findall(r"\d+", colour)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_an_answer_is_summed_up(page: Page) -> None:
    ask(page, "Hello")
    pairs = "nodes => nodes.map((node) => [node.querySelector('dt').textContent, node.querySelector('dd').textContent])"
    figures = dict(page.locator(".summary dl > div").evaluate_all(pairs))
    assert figures["tokens"] == str(NUM_DEPTHS + 2)
    assert figures["prompt tokens"] == "7"
    assert figures["tokens a step"] == "5.00"  # two of the target's own, eight accepted
    assert re.fullmatch(r"\d+ ms|\d+\.\d\d s", figures["to first token"])
    assert float(figures["tokens/s"]) > 0
    bars = page.locator(".summary svg")
    assert "depth 1 50 %, depth 2 50 %" in str(bars.get_attribute("aria-label"))
    expect(bars.locator("rect.bar")).to_have_count(NUM_DEPTHS)
    expect(page.locator(".summary tbody tr")).to_have_count(NUM_DEPTHS)


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_ends_the_request_at_the_server(page: Page, peer: Peer, way: str) -> None:
    peer.ending = "never"
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#message").fill("Go on")
    page.locator("#message").press("Enter")
    expect(page.locator("article.model .text")).to_contain_text("on and on")
    assert not peer.disconnected.is_set()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    assert peer.disconnected.wait(10)
    assert "on and on" in answer(page)  # what came stays, and is part of the conversation
    peer.ending = "whole"
    ask(page, "Again")
    assert [message["role"] for message in peer.bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_new_chat_forgets_and_stops(page: Page, peer: Peer) -> None:
    peer.ending = "never"
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#message").fill("Go on")
    page.locator("#message").press("Enter")
    expect(page.locator("article.model .text")).to_contain_text("on and on")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    assert peer.disconnected.wait(10)
    peer.ending = "whole"
    ask(page, "Anew")
    assert peer.bodies[1]["messages"] == [{"role": "user", "content": "Anew"}]


def test_try_again_and_edit_replace_the_last_turn(page: Page, peer: Peer) -> None:
    ask(page, "First")
    ask(page, "Second")
    page.locator(".last-only:visible", has_text="Try again").click()
    expect(page.locator("article.model[aria-busy]")).to_have_count(0)
    expect(page.locator("article.user")).to_have_count(2)
    assert peer.bodies[2] == peer.bodies[1]
    page.locator(".last-only:visible", has_text="Edit").click()
    expect(page.locator("#message")).to_have_value("Second")
    expect(page.locator("article.user")).to_have_count(1)


def test_an_answer_can_be_copied(open_page: Callable[..., Page]) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Hello")
    page.get_by_role("button", name="Copy the answer").click()
    expect(page.locator(".tools button", has_text="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


REFUSALS = [
    (
        Refusal(400, "temperature must be between 0 and 2, not 9", "temperature"),
        "temperature must be between 0 and 2, not 9.",
    ),
    (Refusal(400, "must be between 0 and 1", "top_p"), "top_p: must be between 0 and 1."),
    (Refusal(400, "must be above 0", "repetition_penalty"), "repetition_penalty: must be above 0."),
    (Refusal(401, "the API key is wrong"), "the API key is wrong. Enter the server's API key under Settings."),
    (
        Refusal(429, "the queue is full", retry_after=3),
        "The server is busy: the queue is full. Try again in 3 seconds.",
    ),
    (Refusal(503, "it is stopping", retry_after=1), "The server is not ready: it is stopping. Try again in 1 second."),
    (Refusal(500, "a fault"), "a fault."),
]


def test_a_refusal_is_told_in_words_and_the_text_is_kept(page: Page, peer: Peer, watch: Watch) -> None:
    watch.allow_failures = True
    page.locator("#message").fill("Keep this")
    for refusal, words in REFUSALS:
        peer.refusal = refusal
        ask(page, "Keep this")
        expect(page.get_by_role("alert")).to_have_text(words)
        expect(page.locator("#message")).to_have_value("Keep this")
        expect(page.locator("article")).to_have_count(0)
        marked = page.locator("[aria-invalid]").evaluate_all("nodes => nodes.map((node) => node.name)")
        assert marked == ([refusal.param] if refusal.param else [])
        if refusal.param:
            expect(page.locator("[aria-invalid]")).to_be_visible()  # also where it was folded away
    peer.refusal = None
    page.locator("#message").press("Enter")
    expect(page.locator("article.model .text")).to_have_text(ANSWER)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_lost_network_is_told(page: Page, watch: Watch) -> None:
    watch.allow_failures = True
    expect(page.locator("#state")).to_have_text("Ready")
    page.context.set_offline(True)
    ask(page, "Keep this")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    expect(page.locator("#message")).to_have_value("Keep this")
    expect(page.locator("#live-state")).to_have_text("No figures from the server. Trying again.")
    page.context.set_offline(False)
    expect(page.locator("#live-state")).to_be_hidden()


@pytest.mark.parametrize(("ending", "words"), [("cut", "The answer was cut off"), ("error", "the engine failed.")])
def test_a_broken_stream_is_told_and_what_came_is_kept(
    page: Page, peer: Peer, watch: Watch, ending: str, words: str
) -> None:
    watch.allow_failures = True
    peer.ending = ending
    ask(page, "Keep this")
    for place in (page.get_by_role("alert"), page.locator(".note")):
        expect(place).to_contain_text(words)
    assert ANSWER.startswith(answer(page))
    assert answer(page)
    expect(page.locator("article.user .text")).to_have_text("Keep this")


def test_a_number_that_is_none_is_told_without_a_request(page: Page, peer: Peer) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#temperature").press_sequentially("1e")
    ask(page, "Keep this")
    expect(page.get_by_role("alert")).to_have_text("temperature: not a number.")
    expect(page.locator("#message")).to_have_value("Keep this")
    assert peer.bodies == []


def test_text_of_anyone_stays_text(page: Page, peer: Peer) -> None:
    peer.pieces = ((TAG, 0), (TAG, 1))
    ask(page, TAG)
    assert answer(page) == TAG * 2
    expect(page.locator("article.user .text")).to_have_text(TAG)
    expect(page.locator("#log img, #log script")).to_have_count(0)


def test_a_stream_can_be_torn_anywhere(page: Page, peer: Peer) -> None:
    peer.pieces = tuple(("漢字🙂é\r\n\n", depth % 3) for depth in range(12))
    peer.torn = True
    ask(page, "Hello")
    assert answer(page) == "漢字🙂é\r\n\n" * 12
    expect(page.get_by_role("alert")).to_be_hidden()


def test_no_string_can_become_markup(page: Page, watch: Watch) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.getElementById('log').innerHTML = '<b>no</b>'")
    assert [complaint for complaint in watch.complaints if "TrustedHTML" in complaint]  # the watch sees violations
    watch.complaints.clear()


def test_the_page_waits_for_a_server_that_loads(open_page: Callable[..., Page], peer: Peer, watch: Watch) -> None:
    watch.allow_failures = True
    peer.loading = True
    page = open_page()
    expect(page.locator("#state")).to_contain_text("Waiting for the server.")
    expect(page.locator("#state")).to_contain_text("the model is loading")
    peer.loading = False
    ask(page, "Hello")
    assert answer(page) == ANSWER


def test_a_server_with_a_key(open_page: Callable[..., Page], peer: Peer, watch: Watch) -> None:
    watch.allow_failures = True
    peer.api_key = "secret"
    page = open_page()
    expect(page.locator("#state")).to_contain_text("Enter the server's API key under Settings.")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    ask(page, "Hello")
    assert answer(page) == ANSWER
    kept: dict[str, Any] = page.evaluate("({...localStorage, ...sessionStorage})")
    assert "secret" not in str(kept)


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
    page.get_by_text("More", exact=True).tap()
    expect(page.locator("#live-time")).to_be_visible()
    expect(page.locator("#seed")).to_be_visible()
    assert page.evaluate(width) == 360


@pytest.mark.parametrize(("preference", "name"), [("no-preference", "pulse"), ("reduce", "none")])
def test_reduced_motion_is_kept_to(
    open_page: Callable[..., Page], peer: Peer, watch: Watch, preference: str, name: str
) -> None:
    watch.allow_failures = True
    peer.loading = True
    page = open_page(reduced_motion=preference)
    expect(page.locator("#state")).to_have_attribute("data-kind", "waiting")
    assert page.evaluate("getComputedStyle(document.getElementById('state'), '::before').animationName") == name
