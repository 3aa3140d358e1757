"""A run in a directory: its stages one after the other, each of which goes on where it was stopped.

DIR/                 what is exported: mtp.safetensors, config.json, README.md, recipe.json
DIR/training/        what is needed to go on: corpus/, checkpoint.pt, metrics.jsonl, evaluation.json, plots
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.config import EngineConfig
from foredraft.engine.llm import resolve_model
from foredraft.errors import ConfigError
from foredraft.models.builtin import BUILTIN_NAME
from foredraft.models.checkpoint_files import resolve_directory
from foredraft.models.fingerprint import fingerprint
from foredraft.models.loader import inspect_checkpoint
from foredraft.training.card import CardFacts, card
from foredraft.training.checkpoint import Checkpoint, load_weights
from foredraft.training.corpus import Corpus, CorpusDirectory
from foredraft.training.evaluation import Evaluation, EvaluationSet, EvaluationSettings, evaluate_modules
from foredraft.training.export import DRAFT_VOCAB_NAME, write_config, write_draft_vocab, write_modules
from foredraft.training.files import write_text
from foredraft.training.frozen_target import FrozenTarget, precision_dtype
from foredraft.training.metrics_file import StepReport, read_metrics
from foredraft.training.plots import plot_metrics
from foredraft.training.processes import Processes
from foredraft.training.recipe import STAGES, Recipe, Stage
from foredraft.training.synthesis import Worker
from foredraft.training.synthesis_workers import SynthesisJob, run_worker, write_corpus
from foredraft.training.trainer import (
    BEST_NAME,
    CHECKPOINT_NAME,
    LAST_NAME,
    METRICS_NAME,
    Trainer,
    TrainingOptions,
    draft_tokens,
)

_WORK, _CORPUS, _MODULES, _EVALUATION, _RECIPE, _CARD = (
    "training", "corpus", "modules", "evaluation.json", "recipe.json", "README.md",
)  # fmt: skip


class Reporter(Protocol):
    """Who is told how a run goes."""

    def stage(self, stage: Stage) -> None:
        """A stage begins."""

    def rows(self, done: int, total: int) -> None:
        """So many rows of text are written."""

    def step(self, report: StepReport) -> None:
        """Training has come to a step."""

    def evaluated(self, modules: str, evaluations: Sequence[Evaluation]) -> None:
        """Modules were measured."""


@dataclass(frozen=True)
class RunOptions:
    """How a run goes, which decides nothing of what comes out but how far it gets.

    corpus: of another run, instead of one of its own. max_seconds: of each stage, which then stops where it can go on.
    workers: processes that write text; synthesis_mtp: modules that draft for them. evaluation_sets; compare: other
    modules that are measured on the same prompts, by name.
    """

    device: torch.device
    stages: Sequence[Stage] = STAGES
    corpus: Path | None = None
    max_seconds: float | None = None
    workers: int = 1
    synthesis_mtp: Path | None = None
    evaluation_sets: Sequence[EvaluationSet] = ()
    compare: Mapping[str, Path] = field(default_factory=dict)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    processes: Processes = field(default_factory=Processes)


class TrainingRun:
    """One target, one recipe, one directory."""

    def __init__(self, target: str | Path, out: Path, recipe: Recipe, options: RunOptions, reporter: Reporter) -> None:
        self.target = resolve_directory(target_path(target))
        self.name = BUILTIN_NAME if target == "builtin" else self.target.name
        self._out, self._recipe, self._options, self._reporter = out, recipe, options, reporter
        self._work = out / _WORK
        self._corpus = CorpusDirectory(options.corpus or self._work / _CORPUS)
        self._dtype = precision_dtype(recipe.precision, options.device)
        info = inspect_checkpoint(self.target, num_modules=0)
        if recipe.row_length > info.max_position_embeddings:
            raise ConfigError(
                f"row_length={recipe.row_length} is more than the target's {info.max_position_embeddings} positions"
            )

    def run(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Run the stages that were asked for; False if one stopped before its end, for lack of time or interrupted."""
        stages: dict[Stage, Callable[[Callable[[], bool]], bool]] = {
            "synthesise": self._synthesise,
            "train": self._train,
            "evaluate": self._evaluate,
            "export": self._export,
        }
        for name, stage in stages.items():
            if name not in self._options.stages:
                continue
            if self._options.processes.is_first:
                self._reporter.stage(name)
            is_done = stage(is_interrupted)
            self._options.processes.wait()
            if not is_done:
                return False
        return True

    def _synthesise(self, is_interrupted: Callable[[], bool]) -> bool:
        options, recipe = self._options, self._recipe
        made_with = {**recipe.of_stage("synthesise"), "target": self.name}
        if options.processes.is_first:
            self._corpus.open(made_with, except_for=("num_rows",))
        options.processes.wait()
        job = SynthesisJob(
            target=self.target, corpus=self._corpus.path, recipe=recipe, device=str(options.device),
            dtype=str(self._dtype).removeprefix("torch."), mtp=options.synthesis_mtp, seconds=options.max_seconds,
        )  # fmt: skip
        if options.processes.count == 1 and options.workers > 1:
            return write_corpus(job, options.workers, self._reporter.rows, is_interrupted)
        written = 0

        def progress(num_rows: int) -> None:
            nonlocal written
            written += num_rows
            self._reporter.rows(written, recipe.num_rows)
            if is_interrupted():
                raise KeyboardInterrupt

        run_worker(job, Worker(options.processes.rank, options.processes.count), progress)
        options.processes.wait()
        return self._corpus.num_rows() >= recipe.num_rows

    def _train(self, is_interrupted: Callable[[], bool]) -> bool:
        options, recipe = self._options, self._recipe
        corpus = self._read_corpus()
        target = FrozenTarget.load(self.target, recipe.depths, options.device, self._dtype)
        made_with = {
            **recipe.of_stage("train"),
            "target": fingerprint(target.model),
            "rows": len(corpus),
            "tokens": int(corpus.token_ids.long().sum()),
        }
        deadline = None if options.max_seconds is None else time.monotonic() + options.max_seconds
        training = TrainingOptions(
            deadline, options.training.checkpoint_seconds, options.training.report_every, options.training.is_compiled
        )
        trainer = Trainer(self._work, target, corpus, recipe, made_with, options.processes, training)
        is_done = trainer.fit(self._reporter.step, is_interrupted)
        if options.processes.is_first:
            plot_metrics(read_metrics(self._work / METRICS_NAME), self._work)
        return is_done

    def _evaluate(self, is_interrupted: Callable[[], bool]) -> bool:
        if not self._options.processes.is_first or not self._options.evaluation_sets:
            return True
        modules = self._work / _MODULES
        write_modules(modules, self._weights(), self._recipe.storage)
        vocabulary = self._draft_tokens()
        if vocabulary is not None:
            write_draft_vocab(modules, vocabulary)
        results: dict[str, list[dict[str, Any]]] = {}
        for name, directory in {self._out.name: modules, **self._options.compare}.items():
            is_own = directory == modules
            settings = EvaluationSettings(
                device=self._options.device,
                dtype=self._dtype,
                max_tokens=self._recipe.evaluation_tokens,
                max_prompts=self._recipe.evaluation_prompts,
                draft_vocab=modules / DRAFT_VOCAB_NAME if is_own and vocabulary is not None else None,
                draft_vocab_size=len(vocabulary) if is_own and vocabulary is not None else None,
            )
            evaluations = evaluate_modules(self.target, directory, self._options.evaluation_sets, settings)
            self._reporter.evaluated(name, evaluations)
            results[name] = [each.to_dict() for each in evaluations]
            write_text(self._work / _EVALUATION, json.dumps(results, indent=2) + "\n")
            if is_interrupted():
                return False
        return True

    def _export(self, is_interrupted: Callable[[], bool]) -> bool:
        if not self._options.processes.is_first:
            return True
        weights = self._weights()
        file = write_modules(self._out, weights, self._recipe.storage)
        device = torch.device("cpu")
        target = FrozenTarget.load(self.target, self._recipe.depths, device, torch.float32)
        write_config(self._out, target.model.config, self._recipe.depths, self._recipe.block_width)
        vocabulary = self._draft_tokens(target)
        if vocabulary is not None:
            write_draft_vocab(self._out, vocabulary)
        self._recipe.save(self._out / _RECIPE)
        facts = self._facts(file, weights, fingerprint(target.model))
        write_text(self._out / _CARD, card(facts, self._recipe))
        return True

    def _facts(self, file: Path, weights: Mapping[str, Tensor], target_fingerprint: str) -> CardFacts:
        corpus = self._read_corpus()
        state = Checkpoint.load(self._work / CHECKPOINT_NAME, torch.device("cpu"))
        reports = read_metrics(self._work / METRICS_NAME)
        evaluation = self._work / _EVALUATION
        is_cuda = self._options.device.type == "cuda"
        return CardFacts(
            target=self.name,
            target_fingerprint=target_fingerprint,
            device=torch.cuda.get_device_name(self._options.device) if is_cuda else "a CPU",
            num_parameters=sum(weight.numel() for weight in weights.values()),
            num_bytes=file.stat().st_size,
            num_rows=len(corpus),
            num_tokens=corpus.token_ids.numel(),
            spoken_share=float(corpus.is_spoken.float().mean()),
            num_steps=state.step,
            seconds=state.seconds,
            is_done=state.is_done,
            last=reports[-1] if reports else None,
            evaluations=json.loads(evaluation.read_text(encoding="utf-8")) if evaluation.is_file() else {},
        )

    def _weights(self) -> dict[str, Tensor]:
        """Of the last step; where training ended early, those that were best; where it has not ended, of now."""
        cpu = torch.device("cpu")
        state_file = self._work / CHECKPOINT_NAME
        if not state_file.is_file():
            raise ConfigError(f"{self._work} has no modules yet: run the stage train")
        state = Checkpoint.load(state_file, cpu)
        for name in (LAST_NAME, BEST_NAME):
            if state.is_done and (self._work / name).is_file():
                return load_weights(self._work / name, cpu)
        return {**state.weights, **state.averages}

    def _draft_tokens(self, target: FrozenTarget | None = None) -> list[int] | None:
        if self._recipe.draft_vocab_size is None:
            return None
        cpu = torch.device("cpu")
        frozen = target or FrozenTarget.load(self.target, self._recipe.depths, cpu, torch.float32)
        return draft_tokens(frozen, self._read_corpus(), self._recipe)

    def _read_corpus(self) -> Corpus:
        corpus = self._corpus.read(self._recipe.num_rows)
        if corpus.row_length != self._recipe.row_length:
            raise ConfigError(
                f"{self._corpus.path} has rows of {corpus.row_length} tokens, not {self._recipe.row_length}"
            )
        return corpus


def target_path(target: str | Path) -> str | Path:
    """A checkpoint's directory or hub id; `builtin` is the built-in model."""
    return resolve_model(EngineConfig())[0] if target == "builtin" else target
