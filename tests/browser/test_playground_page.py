"""The playground in a real browser, against a peer that answers by a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from browser.conversing import ANSWER, answer, ask
from playground_peer import NUM_DEPTHS, Refusal

try:
    from playwright.sync_api import Error, expect
except ImportError:
    pytest.skip("browser tests need the package playwright", allow_module_level=True)

if TYPE_CHECKING:
    from browser.conftest import Watch
    from playground_peer import Peer
    from playwright.sync_api import Page

TAG = "漢字🙂 <img src=x onerror=alert(1)><script>alert(2)</script>"


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


def test_an_empty_field_sends_nothing_and_three_are_filled(page: Page, peer: Peer) -> None:
    ask(page, "Hello")
    always = {"model", "messages", "stream", "stream_options", "return_speculation"}
    filled = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}
    assert {name: value for name, value in peer.bodies[0].items() if name not in always} == filled
    for name, default in (("temperature", "server: 1"), ("top_p", "server: 1"), ("max_tokens", "server: none")):
        field = page.locator(f"[name={name}]")
        expect(field).to_have_value(str(filled[name]))
        expect(field).to_have_attribute("placeholder", default)
        field.fill("")
    ask(page, "Hello")
    assert set(peer.bodies[1]) == always
    offered = page.locator("#num-drafts option").evaluate_all("options => options.map((option) => option.value)")
    assert offered == ["", *(str(count) for count in range(NUM_DEPTHS + 1))]


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
    figures = page.locator(".summary dl > div").all_text_contents()
    (per_step,) = (float(text.removeprefix("tokens a step≈")) for text in figures if text.startswith("tokens a step"))
    assert 2.0 <= per_step <= 5.0  # pairs follow two steps of five
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
    (Refusal(401, "the API key is wrong"), "The API key is wrong. Enter the server's API key under Settings."),
    (
        Refusal(429, "the queue is full", retry_after=3),
        "The server is busy: the queue is full. Try again in 3 seconds.",
    ),
    (Refusal(503, "it is stopping", retry_after=1), "The server is not ready: it is stopping. Try again in 1 second."),
    (Refusal(500, "a fault"), "A fault."),
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


@pytest.mark.parametrize(("ending", "words"), [("cut", "The answer was cut off"), ("error", "The engine failed.")])
def test_a_broken_stream_is_told_and_what_came_is_kept(
    page: Page, peer: Peer, watch: Watch, ending: str, words: str
) -> None:
    watch.allow_failures = True
    peer.ending = ending
    ask(page, "Keep this")
    for place in (page.get_by_role("alert"), page.locator(".note")):
        expect(place).to_contain_text(words)
    expect(page.locator(".note.fault")).to_have_text(re.compile("^⚠ Error: [A-Z]"))
    shown = "getComputedStyle(document.querySelector('.note.fault')).color"
    plain = "getComputedStyle(document.querySelector('dt')).color"
    assert page.evaluate(shown) != page.evaluate(plain)
    assert ANSWER.startswith(answer(page))
    assert answer(page)
    expect(page.locator("article.user .text")).to_have_text("Keep this")


def test_a_number_that_is_none_is_told_without_a_request(page: Page, peer: Peer) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#temperature").fill("")
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


CODE = (
    ("Look:\n``", 0),
    ("`py\nfor", 1),
    (" x:\n\n", 2),
    ("    `y`\n```\nThen `a", 0),
    ("```b` inline", 1),
    ("\n  ```", 0),
    ("\nopen <b>", 1),
)


@pytest.mark.parametrize("torn", [False, True])
def test_fenced_code_is_a_block_and_each_token_keeps_its_mark(page: Page, peer: Peer, torn: bool) -> None:
    peer.pieces, peer.torn = CODE, torn
    ask(page, "Hello")
    assert answer(page) == "".join(text for text, _ in CODE)
    fences = page.locator("article.model code.fence")
    assert fences.all_text_contents() == ["```py\nfor x:\n\n    `y`\n```\n", "  ```\nopen <b>"]
    assert fences.first.evaluate("node => getComputedStyle(node).fontFamily").endswith("monospace")
    parts = page.locator("#log .token").evaluate_all("nodes => nodes.map((n) => [n.textContent, +n.dataset.depth])")
    marked = [depth for text, depth in parts for _ in text]
    assert marked == [depth for text, depth in CODE for _ in text]


def test_settings_outlast_a_reload(page: Page, peer: Peer) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Draft tokens a step").select_option("3")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Max tokens").fill("")
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Answer in JSON").check()
    page.reload()
    ask(page, "Hello")
    (body,) = peer.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["num_speculative_tokens"], body["temperature"], body["top_p"]) == (3, 0.7, 0.9)
    assert "max_tokens" not in body
    assert body["response_format"] == {"type": "json_object"}
