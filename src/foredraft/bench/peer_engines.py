"""What `measure_peers` compares: our engine at one depth, transformers in its ways to generate, and other processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.modeling_layers import MtpModel

from foredraft import LLM, SamplingParams
from foredraft.bench.offline import check, run_closed_loop, speculation_of
from foredraft.bench.peer_process import PeerProcess
from foredraft.bench.peers import Job
from foredraft.bench.serving.figures import duration_of
from foredraft.bench.steady import synchronize
from foredraft.bench.variants import Generation
from foredraft.errors import ForedraftError

PAGE_SIZE = 256
"""Rows in a page of transformers' paged cache: its own default."""


class OurEngine:
    """Foredraft with `depth` draft tokens a step, at most `concurrency` jobs at once (None: as many as fit)."""

    def __init__(self, llm: LLM, depth: int, concurrency: int | None = None) -> None:
        self.name = f"foredraft K={depth}"
        self._llm = llm
        self._depth = depth
        self._concurrency = concurrency
        self._salts = (f"{self.name}, turn {number}" for number in itertools.count())

    def generate(self, jobs: Sequence[Job]) -> Generation:
        """See `Peer`."""
        salt = next(self._salts)  # nothing is found that was cached in another turn
        params = [
            SamplingParams(
                max_tokens=job.num_tokens, ignore_eos=True, num_speculative_tokens=self._depth, cache_salt=salt
            )
            for job in jobs
        ]
        figures = run_closed_loop(self._llm, [job.prompt for job in jobs], params, self._concurrency)
        check(figures)
        outputs = [each.token_ids or () for each in figures]
        return Generation(outputs, duration_of(figures), speculation_of(figures))


class ExternalEngine:
    """An engine in a process of its own, which other workloads may share: all jobs as one batch, or one at a time."""

    def __init__(self, process: PeerProcess, *, is_together: bool) -> None:
        self.name = process.name
        self._process = process
        self._is_together = is_together

    def generate(self, jobs: Sequence[Job]) -> Generation:
        """See `Peer`."""
        return self._process.generate(jobs, is_together=self._is_together)


class TransformersGenerate:
    """transformers' `generate`, one job at a time.

    model: a decoder of its own attention, which is left as it is but for its generation settings. cache "static" is
    compiled by transformers where there is a GPU. mtp: modules to draft with (`use_mtp`), of the same model; they are
    handed over as they are, where transformers would read them from the checkpoint anew for each prompt.
    """

    def __init__(self, name: str, model: Any, cache: str | None = None, mtp: MtpModel | None = None) -> None:
        self.name = name
        self._model = model
        self._cache = cache
        self._mtp = mtp
        forget_stops(model)

    def generate(self, jobs: Sequence[Job]) -> Generation:
        """See `Peer`."""
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        if self._cache is not None:
            options["cache_implementation"] = self._cache
        if self._mtp is not None:
            options["use_mtp"] = True
        outputs: list[tuple[int, ...]] = []
        started = time.perf_counter()
        with _modules_at_hand(self._mtp):
            for job in jobs:
                token_ids = torch.tensor([job.prompt], device=self._model.device)
                whole = self._model.generate(
                    token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=job.num_tokens, **options
                )
                outputs.append(tuple(whole[0, len(job.prompt) :].tolist()))
        synchronize(self._model.device)
        return Generation(outputs, time.perf_counter() - started)


class TransformersBatching:
    """transformers' continuous batching over a paged cache; the manager and its graphs are kept between turns.

    model: as for `TransformersGenerate`; transformers may change its attention. Blocks are not shared, so that no turn
    finds what another has cached, and there are as many as all jobs together need. Close it at the end.
    """

    name = "transformers continuous batching"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._manager: Any = None
        forget_stops(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(self, jobs: Sequence[Job]) -> Generation:
        """See `Peer`."""
        manager = self._manager or self._start(jobs)
        started = time.perf_counter()
        names = [manager.add_request(list(job.prompt), max_new_tokens=job.num_tokens) for job in jobs]
        outputs: dict[str, tuple[int, ...]] = {}
        while len(outputs) < len(jobs):
            found = manager.get_result(timeout=1)
            if found is None:
                if not manager.is_running() or manager.background_thread_status.fatal_error is not None:
                    raise ForedraftError(f"its thread ended: {manager.background_thread_status.fatal_error}")
            elif found.error is not None:
                raise ForedraftError(f"a request failed: {found.error}")
            elif found.is_finished():
                outputs[found.request_id] = tuple(found.generated_tokens)
        seconds = time.perf_counter() - started
        return Generation([outputs[name] for name in names], seconds)

    def close(self) -> None:
        """End the thread, and give its memory back."""
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10, hard_stop=True)
            self._manager.destroy()
            self._manager = None

    @torch.no_grad()
    def _start(self, jobs: Sequence[Job]) -> Any:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        hints = WorkloadHints(
            max_prompt_length=max(len(job.prompt) for job in jobs),
            max_generated_length=max(job.num_tokens for job in jobs),
            num_requests=len(jobs),
        )
        num_pages = sum(2 + (len(job.prompt) + job.num_tokens) // PAGE_SIZE for job in jobs)
        settings = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=num_pages, allow_block_sharing=False)
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        self._manager = self._model.init_continuous_batching(
            generation_config=greedy,
            continuous_batching_config=settings,
            workload_hints=hints,
        )
        self._manager.warmup()
        self._manager.start()
        return self._manager


def forget_stops(model: Any) -> None:
    """Nothing but the number of tokens ends a text, and nothing but the largest logit chooses."""
    settings = model.generation_config
    settings.eos_token_id = settings.temperature = settings.top_k = settings.top_p = None


@contextmanager
def _modules_at_hand(mtp: MtpModel | None) -> Iterator[None]:
    """While it is open, transformers gets `mtp` where it would read modules from a checkpoint."""
    if mtp is None:
        yield
        return
    with patch.object(MtpModel, "from_pretrained", lambda *args, **kwargs: mtp):
        yield
