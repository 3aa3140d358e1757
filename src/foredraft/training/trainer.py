"""Training of modules: steps, checkpoints, measurements on held-out rows, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from foredraft.errors import ConfigError, ForedraftError
from foredraft.models.draft_vocab import frequent_tokens
from foredraft.training.acceptance import ChainAcceptance, accept_chances, chain_acceptance, spoken_spans
from foredraft.training.chain import TeacherForcedChain
from foredraft.training.checkpoint import Checkpoint, save_weights
from foredraft.training.corpus import Corpus
from foredraft.training.frozen_target import FrozenTarget, precision_dtype
from foredraft.training.initial import initial_modules, own_parts
from foredraft.training.metrics_file import MetricsFile, StepReport
from foredraft.training.objective import Losses, Objective
from foredraft.training.optimizer import Optimizers
from foredraft.training.processes import Processes
from foredraft.training.recipe import Recipe, require_equal
from foredraft.training.row_order import RowOrder, seed_of

CHECKPOINT_NAME, BEST_NAME, LAST_NAME, METRICS_NAME = "checkpoint.pt", "best.pt", "last.pt", "metrics.jsonl"
DEFAULT_STEPS = 4100
_TIMED_AFTER, _TIMED_UNTIL = 20, 100
"""Steps whose speed decides how many fit the given seconds; the first ones compile."""
_HELDOUT_BATCH = 8


@dataclass(frozen=True)
class TrainingOptions:
    """How a run goes, not what comes of it. deadline: of `time.monotonic`, at which it stops with a checkpoint.
    checkpoint_seconds between two checkpoints; report_every: steps between two reports."""

    deadline: float | None = None
    checkpoint_seconds: float = 60.0
    report_every: int = 20
    is_compiled: bool = False


class Trainer:
    """Trains the modules of one target on one corpus, in a directory that holds all of its state."""

    def __init__(
        self,
        directory: Path,
        target: FrozenTarget,
        corpus: Corpus,
        recipe: Recipe,
        made_with: dict[str, Any],
        processes: Processes = Processes(),  # noqa: B008 (frozen)
        options: TrainingOptions = TrainingOptions(),
    ) -> None:
        if recipe.batch_size % processes.count:
            raise ConfigError(f"batch_size={recipe.batch_size} does not divide by {processes.count} processes")
        self._directory, self._target, self._recipe = directory, target, recipe
        self._made_with, self._processes, self._options = made_with, processes, options
        self._corpus, self._heldout = corpus.split(min(recipe.heldout_rows, len(corpus) // 10), recipe.data_share)
        self._order = RowOrder(len(self._corpus), recipe.batch_size, recipe.seed)
        self._dtype = precision_dtype(recipe.precision, target.device)
        self.modules = initial_modules(target, recipe)
        self._own = own_parts(self.modules)
        self._parameters = [p for name, p in self.modules.named_parameters() if name in self._own]
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._chain = TeacherForcedChain(target, self.modules, is_checkpointed=recipe.gradient_checkpointing)
        self.draft_tokens = draft_tokens(target, corpus, recipe)
        self._objective = Objective(target, self._chain, recipe, self.draft_tokens, self._dtype)
        self._optimizers = Optimizers(self._parameters, recipe)
        self._averages = [p.detach().clone() for p in self._parameters] if recipe.ema_decay else []
        num_steps = recipe.num_steps or (None if recipe.train_seconds else DEFAULT_STEPS)
        self._state = Checkpoint(made_with, 0, num_steps, 0.0, {}, {}, [])
        self._resume()

    @property
    def state(self) -> Checkpoint:
        """Where it stands; the tensors in it are those of the last checkpoint."""
        return self._state

    def fit(
        self,
        report: Callable[[StepReport], None] = lambda report: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the end, or until the deadline or an interruption; whether it has come to the end. Where it stands
        is on disk when this returns. ForedraftError if the loss is no number any more."""
        state = self._state
        if state.is_done:
            return True
        if self._options.is_compiled:
            self._target.compile()
            self._chain.compile()
            self._objective.compile()
        run = _Run(self._target.device, state.seconds, self._recipe, self._processes)
        metrics = MetricsFile(self._directory / METRICS_NAME, state.step) if self._processes.is_first else None
        last_saved = time.monotonic()
        while not self._has_ended():
            losses, norm, rate = self._step()
            run.add(losses, norm, rate)
            state.step += 1
            state.seconds = run.seconds
            self._fix_num_steps(run)
            is_last = state.step == state.num_steps
            is_measured = state.step % self._recipe.heldout_every == 0 or is_last
            if is_measured or state.step % self._options.report_every == 0:
                line = run.report(state, self._measure() if is_measured and len(self._heldout) else None)
                if metrics is not None:
                    metrics.add(line)
                    report(line)
            if self._must_stop(is_interrupted()):
                break
            if time.monotonic() - last_saved > self._options.checkpoint_seconds:
                self._save()
                last_saved = time.monotonic()
        state.is_done = self._has_ended()
        self._save()
        self._processes.wait()
        return state.is_done

    def _step(self) -> tuple[Losses, Tensor, float]:
        """One step; solo steps train the first module alone, and the others begin as it is after them."""
        state, recipe, processes = self._state, self._recipe, self._processes
        if state.step == recipe.solo_steps > 0:
            self._copy_first()
        depths = 1 if state.step < recipe.solo_steps else recipe.depths
        rows = self._order.rows(state.step, processes.rank, processes.count)
        device = self._target.device
        token_ids = self._corpus.token_ids[rows].to(device, torch.int64, non_blocking=True)
        is_spoken = self._corpus.is_spoken[rows].to(device, non_blocking=True)
        seed = seed_of(recipe.seed, "draws", state.step, processes.rank)
        losses = self._objective(token_ids, is_spoken, depths, torch.Generator(device).manual_seed(seed))
        self._objective.total(losses).backward()  # type: ignore[no-untyped-call]
        processes.average(p.grad for p in self._parameters if p.grad is not None)
        norm = clip_grad_norm_(self._parameters, recipe.max_gradient_norm)
        rate = self._optimizers.step(state.step, state.num_steps)
        if self._averages:
            # Early on the average reaches back no further than a tenth of the steps.
            decay = min(recipe.ema_decay, 1 - 10 / (10 + state.step))
            torch._foreach_lerp_(self._averages, [p.detach() for p in self._parameters], 1 - decay)
        return losses, norm, rate

    @torch.no_grad()
    def _copy_first(self) -> None:
        for layer in self.modules.layers[1:]:
            layer.load_state_dict(self.modules.layers[0].state_dict())
        for average, parameter in zip(self._averages, self._parameters):
            average.copy_(parameter)

    def _fix_num_steps(self, run: _Run) -> None:
        """Once the speed is known, so is how many steps fit; from then on it is part of the state."""
        state, seconds = self._state, self._recipe.train_seconds
        if state.num_steps is None and seconds is not None and run.num_timed >= _TIMED_UNTIL - _TIMED_AFTER:
            left = max(0.0, seconds - run.seconds) * run.num_timed / run.timed_seconds
            state.num_steps = int(self._processes.agree(state.step + max(1, int(left)), self._target.device))
            self._save()

    @torch.no_grad()
    def _measure(self) -> ChainAcceptance:
        """Greedy acceptance on held-out rows; keeps the weights that are best by it."""
        state = self._state
        with self._averaged():
            found = self.heldout_acceptance()
            if found.mean_length > state.best_length:
                state.best_length, state.num_worse = found.mean_length, 0
                if self._processes.is_first:
                    save_weights(own_parts(self.modules), self._directory / BEST_NAME)
            else:
                state.num_worse += 1
        return found

    @torch.no_grad()
    def heldout_acceptance(self) -> ChainAcceptance:
        """How greedy drafts of the modules as they are fare on rows that are not trained on."""
        total = ChainAcceptance.none(self._recipe.depths)
        head = None if self.draft_tokens is None else self._target.head(self.draft_tokens)
        for first in range(0, len(self._heldout), _HELDOUT_BATCH):
            part = self._heldout[first : first + _HELDOUT_BATCH]
            token_ids = part.token_ids.to(self._target.device, torch.int64)
            chances = accept_chances(
                self._target, self._chain, token_ids, self._recipe.depths, 0.0, self._dtype, head
            ).cpu()  # fmt: skip
            for of_text, flags in zip(chances, part.is_spoken.tolist()):
                for span in spoken_spans(flags):
                    total += chain_acceptance(of_text, span)
        return total

    def _has_ended(self) -> bool:
        state, patience = self._state, self._recipe.patience
        is_stale = patience is not None and state.num_worse >= patience
        return is_stale or (state.num_steps is not None and state.step >= state.num_steps)

    def _must_stop(self, is_interrupted: bool) -> bool:
        deadline = self._options.deadline
        is_late = deadline is not None and time.monotonic() > deadline
        if self._processes.count == 1:
            return is_late or is_interrupted
        if self._state.step % self._options.report_every:
            return False  # processes stop together: now and then they ask each other
        return bool(self._processes.agree(float(is_late or is_interrupted), self._target.device))

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Meanwhile the modules have the average of their weights, if one is kept."""
        kept = [p.detach().clone() for p in self._parameters] if self._averages else []
        with torch.no_grad():
            if kept:
                torch._foreach_copy_([p.data for p in self._parameters], self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                if kept:
                    torch._foreach_copy_([p.data for p in self._parameters], kept)

    def _save(self) -> None:
        if not self._processes.is_first:
            return
        state = self._state
        state.weights = own_parts(self.modules)
        names = [name for name, _ in self.modules.named_parameters() if name in self._own]
        state.averages = dict(zip(names, self._averages))
        state.optimizers = self._optimizers.state_dict()
        state.save(self._directory / CHECKPOINT_NAME)
        if state.is_done:
            is_early = state.num_steps is None or state.step < state.num_steps
            if not (is_early and (self._directory / BEST_NAME).is_file()):
                with self._averaged():
                    save_weights(own_parts(self.modules), self._directory / LAST_NAME)

    def _resume(self) -> None:
        file = self._directory / CHECKPOINT_NAME
        if not file.is_file():
            return
        state = Checkpoint.load(file, self._target.device)
        require_equal(state.made_with, self._made_with, file)
        with torch.no_grad():
            for name, tensor in state.weights.items():
                self._own[name].copy_(tensor)
            for average, kept in zip(self._averages, state.averages.values()):
                average.copy_(kept)
        self._optimizers.load_state_dict(state.optimizers)
        self._state = state


class _Run:
    """Means and speed of the steps since the last report. Nothing waits for the device between two reports."""

    def __init__(self, device: torch.device, seconds: float, recipe: Recipe, processes: Processes) -> None:
        self._device, self._recipe, self._processes = device, recipe, processes
        self._earlier, self._started = seconds, time.monotonic()
        self._num_steps, self.timed_seconds = 0, 0.0
        self._timed_from = 0.0
        self._sums: Tensor | None = None
        self._count = 0
        self._begin()

    @property
    def seconds(self) -> float:
        """Of all runs together."""
        return self._earlier + time.monotonic() - self._started

    @property
    def num_timed(self) -> int:
        """Steps after the first ones, timed so far (0: none)."""
        if self._num_steps < _TIMED_UNTIL:
            return 0
        if not self.timed_seconds:
            self._wait()
            self.timed_seconds = time.monotonic() - self._timed_from
        return _TIMED_UNTIL - _TIMED_AFTER

    def add(self, losses: Losses, norm: Tensor, rate: float) -> None:
        """Count one step."""
        self._num_steps += 1
        if self._num_steps == _TIMED_AFTER:
            self._wait()
            self._timed_from = time.monotonic()
        self._rate = rate
        values = torch.cat([*(each.detach() for each in (losses.loss, losses.match, losses.overlap)), norm[None]])
        if self._sums is not None and self._sums.shape == values.shape:
            self._sums, self._count = self._sums + values, self._count + 1
        else:
            self._sums, self._count = values, 1

    def report(self, state: Checkpoint, heldout: ChainAcceptance | None) -> StepReport:
        """The means, and begin anew."""
        assert self._sums is not None
        means = (self._sums / self._count).tolist()
        if not all(abs(value) < float("inf") for value in means):
            raise ForedraftError(
                f"training has failed at step {state.step}: the loss is no number any more; "
                f"lower learning_rate and begin again from the last checkpoint"
            )
        depths = (len(means) - 1) // 3
        num_tokens = self._count_since * self._recipe.batch_size * self._recipe.row_length
        speed = num_tokens / max(1e-9, time.monotonic() - self._since)
        line = StepReport(
            step=state.step, num_steps=state.num_steps, seconds=state.seconds, tokens_per_second=speed,
            learning_rate=self._rate, gradient_norm=means[-1], loss=means[:depths], match=means[depths : 2 * depths],
            overlap=means[2 * depths : 3 * depths],
            heldout_length=None if heldout is None else heldout.mean_length,
            heldout_rates=None if heldout is None else list(heldout.rates),
        )  # fmt: skip
        self._begin()
        return line

    @property
    def _count_since(self) -> int:
        return self._num_steps - self._steps_before

    def _begin(self) -> None:
        self._sums = None
        self._count, self._since, self._rate = 0, time.monotonic(), 0.0
        self._steps_before = self._num_steps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def draft_tokens(target: FrozenTarget, corpus: Corpus, recipe: Recipe) -> list[int] | None:
    """The tokens that the loss is over, the ends of texts and then the most frequent of the corpus; None: all."""
    if recipe.draft_vocab_size is None:
        return None
    vocab_size = int(target.head().weight.shape[0])
    if recipe.draft_vocab_size > vocab_size:
        raise ConfigError(f"draft_vocab_size={recipe.draft_vocab_size} is more than the target's {vocab_size} tokens")
    ends = target.loaded.eos_token_ids
    chosen = frequent_tokens(corpus.token_ranking(), recipe.draft_vocab_size, vocab_size, ends)
    return [int(token_id) for token_id in chosen]
