"""What a choice says, and why it ended."""

from __future__ import annotations

import pytest

from foredraft.server.spoken import SpokenChoice
from foredraft.server.tools.formats import TOOL_FORMATS
from foredraft.stopping import FinishReason

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def spoken(text: str, max_calls: int | None = None) -> SpokenChoice:
    choice = SpokenChoice(TOOL_FORMATS["hermes"].parser(), max_calls)
    choice.add(text)
    choice.finish()
    return choice


def test_text_is_text() -> None:
    choice = SpokenChoice(None)
    choice.add(CALL)
    assert choice.message().content == CALL
    assert choice.finish_reason(FinishReason.STOP) == "stop"


@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")])
def test_calls_are_the_reason_unless_the_tokens_ran_out(reason: FinishReason, expected: str) -> None:
    choice = spoken(f"Well: {CALL}")
    assert choice.finish_reason(reason) == expected
    message = choice.message()
    assert message.content == "Well: "
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}']


def test_a_call_that_a_stop_string_has_cut_is_no_call_to_make() -> None:
    assert spoken(CALL[:-20]).finish_reason(FinishReason.STOP) == "stop"


def test_no_more_calls_than_may_be() -> None:
    message = spoken(f"{CALL}\n{CALL} after", max_calls=1).message()
    assert message.tool_calls is not None
    assert len(message.tool_calls) == 1
    assert message.content is None
