"""LiteLLM in a process of its own, which calls what it is told to: it leaves loops and sockets open where it has run.

A line of JSON on standard input is a call, a line on standard output what came of it:
{"calls": [options, ...], "kind": "completion" | "text_completion" | "together" | "stream"} to {"answers": [...]}, and
for a stream {"chunks": [...], "answers": [what LiteLLM puts together from them]}; {"error": {...}} if it failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

# Or it asks the network for a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm


async def together(calls: list[dict[str, Any]]) -> list[Any]:
    """The answers to calls that are made at once."""
    return list(await asyncio.gather(*(litellm.acompletion(**options) for options in calls)))


def call(kind: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the calls."""
    if kind == "stream":
        chunks: Any = list(litellm.completion(**calls[0], stream=True))
        whole: Any = litellm.stream_chunk_builder(chunks, messages=calls[0]["messages"])
        return {"chunks": [chunk.model_dump() for chunk in chunks], "answers": [whole.model_dump()]}
    if kind == "together":
        answers: list[Any] = asyncio.run(together(calls))
    else:
        answers = [getattr(litellm, kind)(**options) for options in calls]
    return {"answers": [answer.model_dump() for answer in answers]}


def main() -> None:
    """Serve until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever it prints is no answer
    litellm.suppress_debug_info = True
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = call(request["kind"], request["calls"])
        except Exception as error:
            result = {"error": told(error)}
        print(json.dumps(result), file=answers, flush=True)


def told(error: Exception) -> dict[str, Any]:
    """What an exception says."""
    return {"kind": type(error).__name__, "status": getattr(error, "status_code", None), "message": str(error)}


if __name__ == "__main__":
    main()
