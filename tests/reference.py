"""What the engine is compared with: transformers alone, eager attention, no cache, the whole history in every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripted import ScriptedDrafter
from tiny_models import SHARED_PREFIXES, new_mtp_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.sampling.sampler import SamplingTensors
from foredraft.sampling.sampling_state import SamplingState
from foredraft.speculation.drafter import Drafter, Drafts, Window


class Reference:
    """The target in `directory` and the modules in its mtp.safetensors, one sequence at a time."""

    def __init__(self, directory: Path, num_modules: int = 0) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        self._sequences: dict[tuple[int, ...], list[int]] = {}
        if num_modules:
            self.mtp = new_mtp_model(self.target, num_modules)
            report = self.mtp.load_state_dict(load_file(directory / "mtp.safetensors"), strict=False)
            assert not report.unexpected_keys
            assert all(name.startswith(SHARED_PREFIXES) for name in report.missing_keys)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """The target's logits [n, vocab_size] at every row of a sequence."""
        logits: Tensor = self.target(torch.tensor([list(token_ids)])).logits[0]
        return logits

    def sequence(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The prompt and at least `num_tokens` tokens of the target's greedy continuation."""
        token_ids = self._sequences.setdefault(tuple(prompt), list(prompt))
        while len(token_ids) < len(prompt) + num_tokens:
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids

    @torch.inference_mode()
    def draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Tensor:
        """What each draft after the committed `token_ids` is chosen from, if the drafts before it are those given.

        Returns [num drafts, vocab_size]. The target has run on all tokens but the last; module k reads its rows with
        the tokens k further, drafts where there is nothing else. A single module asked for more drafts than one reads
        its own last output in place of the target's, one row further each time.
        """
        tokens = torch.tensor([[*token_ids, *draft_token_ids]])
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        num_rows = len(token_ids) - 1
        hidden: Tensor = self.target.model(tokens[:, :num_rows]).last_hidden_state
        is_chained = len(draft_token_ids) > len(self.mtp.layers) == 1
        logits = []
        for index in range(len(draft_token_ids)):
            first = 1 if is_chained else index + 1
            rows = slice(first, first + hidden.shape[1])
            module = 0 if is_chained else index
            output = self.mtp.forward_layer(module, hidden, positions[:, rows], None, input_ids=tokens[:, rows])
            logits.append(self.target.lm_head(output[0, -1]))
            hidden = torch.cat([hidden, output[:, -1:]], dim=1) if is_chained else output
        return torch.stack(logits)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as the engine loads it, and as transformers runs it."""

    loaded: LoadedModel
    reference: Reference

    @classmethod
    def load(cls, directory: Path, num_modules: int) -> Checkpoint:
        loaded = load_checkpoint(directory, dtype=torch.float32, device=torch.device("cpu"))
        return cls(loaded, Reference(directory, num_modules))


Builders = dict[str, tuple[Callable[[Path], Path], int]]
"""How tiny checkpoints are written, by kind, and how many modules each has."""


def checkpoints_of(builders: Builders, factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Get a tiny random checkpoint by its kind; each is written and loaded once."""
    made: dict[str, Checkpoint] = {}

    def get(kind: str) -> Checkpoint:
        if kind not in made:
            build, num_modules = builders[kind]
            made[kind] = Checkpoint.load(build(factory.mktemp("model")), num_modules)
        return made[kind]

    return get


class RecordingDrafter(ScriptedDrafter):
    """Keeps the logits behind every draft. A request without a continuation is fed the modules' own choice.

    How many drafts are right varies from cycle to cycle: 0, 1, 2, ... in turn, by the number of committed tokens.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.logits: dict[tuple[str, int], list[Tensor]] = {}

    def run(
        self, windows: Sequence[Window], sampling: SamplingTensors, rules: Sequence[SamplingState | None]
    ) -> Drafts:
        for window in windows:
            if window.num_drafts:
                self.num_right[window.request_id] = window.num_tokens % (window.num_drafts + 1)
        return super().run(windows, sampling, rules)

    def choose(
        self, index: int, windows: Sequence[Window], logits: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor | None]:
        chosen, _ = Drafter.choose(self, index, windows, logits, sampling)
        for row, window in enumerate(windows):
            self.logits.setdefault((window.request_id, window.num_tokens), []).append(logits[row].clone())
            if window.request_id in self.continuations:
                chosen[row] = self._draft(window, index)
        return chosen, None

    def assert_equals(self, reference: Reference, token_ids: dict[str, list[int]]) -> None:
        """Every draft of every cycle so far was, or would have been, the one of `reference`; token_ids by request."""
        cycles = [(window, drafts) for window, drafts in self.seen if drafts]
        assert {(window.request_id, window.num_tokens) for window, _ in cycles} == self.logits.keys()
        for window, drafts in cycles:
            ours = torch.stack(self.logits[window.request_id, window.num_tokens])
            theirs = reference.draft_logits(token_ids[window.request_id][: window.num_tokens], drafts)
            assert_close(ours, theirs)
            highest, second = theirs.topk(2).values.unbind(-1)
            is_clear = highest - second > 1e-3 * highest.abs()
            assert bool(((ours.argmax(-1) == theirs.argmax(-1)) | ~is_clear).all())


def recording_engine(
    loaded: LoadedModel,
    depth: int,
    max_num_seqs: int,
    budget: int = 1024,
    max_model_len: int = 80,
    num_blocks: int = 128,
    **settings: Any,
) -> tuple[Engine, RecordingDrafter]:
    """An engine over `loaded` with room for all, and its drafter."""
    made: list[RecordingDrafter] = []

    def make(*args: object) -> RecordingDrafter:
        made.append(RecordingDrafter(*args))
        return made[0]

    config = EngineConfig(
        num_speculative_tokens=depth,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=4,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        **settings,
    )
    return build_engine(loaded, config, make), made[0]


def assert_close(ours: Tensor, theirs: Tensor, bound: float = 1e-4) -> None:
    """Equal to `bound` times the largest absolute value."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())
