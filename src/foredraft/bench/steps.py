"""Times of single decode steps of a batch whose requests are all of them running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError, ForedraftError
from foredraft.stopping import FinishReason


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and how many of them went into verification (options and sampling) and drafting."""

    seconds: float
    verification_seconds: float
    drafting_seconds: float


def time_decode_steps(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], num_steps: int
) -> list[StepTime]:
    """Run requests together, time steps in which all of them decode and none ends, and abort them.

    Returns `num_steps` times, fewer if a request ends before. Raises ConfigError for more requests than may run at
    once, ForedraftError if one fails or has to wait.
    """
    if len(prompts) > llm.config.max_num_seqs:
        raise ConfigError(f"{len(prompts)} requests are to run at once, but max_num_seqs={llm.config.max_num_seqs}")
    engine = llm.engine
    request_ids = [f"timed-{index}" for index in range(len(prompts))]
    times: list[StepTime] = []
    try:
        for request_id, prompt, one in zip(request_ids, prompts, params, strict=True):
            engine.add_request(request_id, prompt, one)
        decoding: set[str] = set()
        while len(times) < num_steps:
            is_steady = len(decoding) == len(prompts)
            stats = engine.stats
            verification, drafting = stats.verification_seconds, stats.drafting_seconds
            started = time.perf_counter()
            committed = engine.step()
            seconds = time.perf_counter() - started
            going_on = {update.request.request_id for update in committed if update.token_ids}
            reasons = [update.request.finish_reason for update in committed]
            if FinishReason.ERROR in reasons:
                raise ForedraftError("a request failed while its steps were timed")
            if any(reasons):
                break
            if is_steady:
                if len(going_on) < len(prompts):
                    raise ForedraftError(f"{len(going_on)} of {len(prompts)} requests decode: the cache is too small")
                times.append(
                    StepTime(seconds, stats.verification_seconds - verification, stats.drafting_seconds - drafting)
                )
            decoding |= going_on
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
    return times
