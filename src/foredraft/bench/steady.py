"""Requests that all decode, and spans of steps in which nothing else happens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError, ForedraftError

WARM_STEPS = 8


@dataclass(frozen=True)
class Span:
    """Steps that ran one after another: `seconds` by the clock on the wall, the device idle at both ends.

    num_cycles: verifications of all requests together, num_tokens what they gave. mean_context: tokens of a request,
    its prompt included, in the middle of the span.
    """

    num_requests: int
    num_steps: int
    seconds: float
    num_cycles: int
    num_tokens: int
    mean_context: float

    @property
    def seconds_per_cycle(self) -> float:
        """Of a verification and the passes that follow it, of all requests at once."""
        return self.seconds * self.num_requests / self.num_cycles

    @property
    def tokens_per_cycle(self) -> float:
        """That one request gets from a cycle."""
        return self.num_tokens / self.num_cycles

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class SteadyBatch:
    """Requests in an engine that has no others, every one of them past its prompt."""

    def __init__(
        self, llm: LLM, request_ids: Sequence[str], prompts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        self._llm = llm
        self._requests = [
            llm.engine.add_request(request_id, prompt, replace(params, seed=index))  # else all would draw alike
            for index, (request_id, prompt) in enumerate(zip(request_ids, prompts))
        ]
        while any(request.num_tokens == len(request.prompt_token_ids) for request in self._requests):
            self._step()
        for _ in range(WARM_STEPS):
            self._step()

    def run(self, num_steps: int) -> Span:
        """Run steps and time them as a whole. Raises ForedraftError if a request ends, might end, or has to wait."""
        self._check_room(num_steps)
        synchronize(self._llm.device)
        before, cycles_before = self._num_tokens, self._num_cycles
        started = time.perf_counter()
        for _ in range(num_steps):
            self._llm.engine.step()
        synchronize(self._llm.device)
        seconds = time.perf_counter() - started
        self._check_none_ended()
        after, num_cycles = self._num_tokens, self._num_cycles - cycles_before
        count = len(self._requests)
        if num_cycles < count * num_steps:
            raise ForedraftError(
                f"{count} requests in {num_steps} steps had {num_cycles} cycles, not {count * num_steps}: "
                f"some had to wait; is the cache too small?"
            )
        return Span(count, num_steps, seconds, num_cycles, after - before, (before + after) / 2 / count)

    @property
    def _num_tokens(self) -> int:
        return sum(request.num_tokens for request in self._requests)

    @property
    def _num_cycles(self) -> int:
        return self._llm.stats.speculation.num_cycles

    def _step(self) -> None:
        self._llm.engine.step()
        self._check_none_ended()

    def _check_room(self, num_steps: int) -> None:
        room = min(request.max_total_tokens - request.num_tokens for request in self._requests)
        wanted = num_steps * (self._requests[0].depth + 1)
        if room <= wanted:
            raise ForedraftError(
                f"{num_steps} steps may give {wanted} tokens, but max_model_len has room for {room} more: "
                f"run fewer steps or a shorter context"
            )

    def _check_none_ended(self) -> None:
        for request in self._requests:
            if request.finish_reason is not None:
                reason = request.error or f"it has {request.num_tokens} tokens, and max_model_len allows no more"
                raise ForedraftError(f"a request ended while steps were run: {reason}")


@contextmanager
def steady_batch(llm: LLM, prompts: Sequence[list[int]], depth: int, salt: str) -> Iterator[SteadyBatch]:
    """Run one request for each prompt up to where all of them decode, greedily; they are aborted at the end.

    depth: draft tokens a step of each. salt: nothing is found that was cached under another. Raises ConfigError for
    more requests than may run at once, ForedraftError if one ends or the engine has others.
    """
    if len(prompts) > llm.config.max_num_seqs:
        raise ConfigError(f"{len(prompts)} requests are to run at once, but max_num_seqs={llm.config.max_num_seqs}")
    if llm.engine.has_unfinished:
        raise ForedraftError("a steady batch needs an engine without other requests")
    params = SamplingParams(max_tokens=None, ignore_eos=True, num_speculative_tokens=depth, cache_salt=salt)
    request_ids = [f"steady-{index}" for index in range(len(prompts))]
    try:
        yield SteadyBatch(llm, request_ids, prompts, params)
    finally:
        for request_id in request_ids:
            llm.engine.abort(request_id)


def random_prompts(llm: LLM, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` different prompts of `length` random token ids, the same for the same seed."""
    draw, vocab_size = random.Random(seed), llm.engine.limits.vocab_size
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; a CPU has always."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
