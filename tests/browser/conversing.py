"""Talking to a model through the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground_peer import EVERY_DEPTH

if TYPE_CHECKING:
    from playwright.sync_api import Page

ANSWER = "".join(text for text, _ in EVERY_DEPTH)


def ask(page: Page, question: str) -> None:
    """Send a message and wait until the page is ready for the next."""
    from playwright.sync_api import expect

    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#message").fill(question)
    page.locator("#message").press("Enter")
    expect(page.locator("#log article.model[aria-busy]")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()


def answer(page: Page) -> str:
    """The text of the last answer."""
    return str(page.locator("article.model .text").last.text_content())
