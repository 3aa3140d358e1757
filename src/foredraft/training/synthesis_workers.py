"""Several processes that write a corpus on one machine: an engine's host work fills a core, a small target no GPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from foredraft.errors import ForedraftError
from foredraft.training.corpus import CorpusDirectory
from foredraft.training.recipe import Recipe
from foredraft.training.synthesis import Synthesizer, Worker, num_shards, shard_size

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class SynthesisJob:
    """What each process is told. seconds: after which no further shard is begun (None: to the end)."""

    target: Path
    corpus: Path
    recipe: Recipe
    device: str
    dtype: str
    mtp: Path | None
    seconds: float | None


def write_corpus(
    job: SynthesisJob,
    num_workers: int,
    progress: Callable[[int, int], None],
    is_interrupted: Callable[[], bool],
) -> bool:
    """Write what is missing of a corpus with so many processes; whether it is whole. progress: called with the rows
    that are there and those that will be. ForedraftError if a process fails."""
    directory = CorpusDirectory(job.corpus)
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = [
        context.Process(target=run_worker, args=(job, Worker(index, num_workers)), daemon=True)
        for index in range(num_workers)
    ]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            progress(rows_written(directory, job.recipe), job.recipe.num_rows)
            if is_interrupted():
                break
            if any(worker.exitcode for worker in workers):
                raise ForedraftError("a process that writes text has failed; its message is above")
            time.sleep(_POLL_SECONDS)
        if any(worker.exitcode for worker in workers):
            raise ForedraftError("a process that writes text has failed; its message is above")
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
            if worker.pid is not None:
                worker.join()
    progress(rows_written(directory, job.recipe), job.recipe.num_rows)
    return rows_written(directory, job.recipe) >= job.recipe.num_rows


def run_worker(job: SynthesisJob, worker: Worker, progress: Callable[[int], None] = lambda num_rows: None) -> None:
    """The work of one process."""
    deadline = None if job.seconds is None else time.monotonic() + job.seconds
    dtype: torch.dtype = getattr(torch, job.dtype)
    synthesizer = Synthesizer(job.target, job.recipe, torch.device(job.device), dtype, job.mtp)
    try:
        synthesizer.write(CorpusDirectory(job.corpus), worker, deadline, progress)
    finally:
        synthesizer.close()


def rows_written(directory: CorpusDirectory, recipe: Recipe) -> int:
    """Rows of the shards that are there."""
    return sum(shard_size(recipe, shard) for shard in range(num_shards(recipe)) if directory.has(shard))
