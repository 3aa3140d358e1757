"""The other end of `foredraft bench peers --external`: what an engine's process says and hears, an object a line.

Only the standard library is needed here: the scripts beside this file run in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Batch = list[tuple[list[int], int]]
"""Prompts that run together, each with how many tokens are to follow it."""


class Connection:
    """Make it before anything else is imported: from then on whatever prints writes to stderr."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), encoding="utf-8")
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def serve(
        self,
        generate: Callable[[Batch], list[list[int]]],
        speculation: Callable[[], dict[str, Any]] | None = None,
        **about: Any,
    ) -> None:
        """Answer until the other side hangs up.

        generate: the new tokens of each prompt of a batch, greedy, whatever EOS says, exactly as many as asked for. A
        batch that it cannot run is an exception. speculation: counts of the drafts of a turn, asked for after it, by
        the names of `foredraft.statistics.SpeculationStats`. about: what the report says about this engine.
        """
        self._write({"ready": True, "python": sys.version.split()[0], **about})
        for line in self._requests:
            try:
                answer = self._run(generate, json.loads(line))
                if speculation is not None:
                    answer["speculation"] = speculation()
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._write(answer)

    def _run(self, generate: Callable[[Batch], list[list[int]]], request: dict[str, Any]) -> dict[str, Any]:
        jobs: Batch = list(zip(request["prompts"], request["num_tokens"]))
        batches = [jobs] if request["together"] else [[job] for job in jobs]
        started = time.perf_counter()
        outputs = [token_ids for batch in batches for token_ids in generate(batch)]
        return {"outputs": outputs, "seconds": time.perf_counter() - started}

    def _write(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
