"""The formats that are known, and which of them a chat template speaks."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.server.tools import deepseek, hermes, llama, mistral, pythonic, xml_call
from foredraft.server.tools.tool_format import ToolFormat

_ALL = (
    hermes.HERMES,
    hermes.LONGCAT,
    hermes.GRANITE,
    llama.LLAMA3_JSON,
    mistral.MISTRAL,
    mistral.MISTRAL_ARGS,
    pythonic.PYTHONIC,
    xml_call.QWEN3_CODER,
    xml_call.MINIMAX_M2,
    xml_call.GLM45,
    deepseek.DEEPSEEK_V3,
    deepseek.DEEPSEEK_V31,
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _ALL}

# What a template of a format has in it, all of it; the first that fits is it.
_SIGNS = (
    ((deepseek.CALLS_BEGIN, "```json"), deepseek.DEEPSEEK_V3),
    ((deepseek.CALLS_BEGIN,), deepseek.DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]"), mistral.MISTRAL_ARGS),
    (("[TOOL_CALLS]",), mistral.MISTRAL),
    (("<minimax:tool_call>",), xml_call.MINIMAX_M2),
    (("minimax:tool_call", "<invoke name="), xml_call.MINIMAX_M2),
    (("<longcat_tool_call>",), hermes.LONGCAT),
    (("<function=", "<parameter="), xml_call.QWEN3_CODER),
    (("<arg_key>", "<arg_value>"), xml_call.GLM45),
    (("<|tool_call|>",), hermes.GRANITE),
    (("<tool_call>",), hermes.HERMES),
    (("<|python_start|>",), pythonic.PYTHONIC),
    (("[func_name1(",), pythonic.PYTHONIC),
    (("<|python_tag|>",), llama.LLAMA3_JSON),
    (('"parameters": dictionary of argument',), llama.LLAMA3_JSON),
)


def detect_format(chat_template: str | None) -> str | None:
    """The name of the format that a chat template asks a model to use, by its markers; None if it speaks of none."""
    template = chat_template or ""
    return next((each.name for signs, each in _SIGNS if all(sign in template for sign in signs)), None)
