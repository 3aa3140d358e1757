"""What trained modules give on prompts: as the engine measures it, and as the passes over its texts foretell it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from foredraft.engine.llm import LLM
from foredraft.errors import ConfigError
from foredraft.models.loader import load_checkpoint
from foredraft.outputs import RequestOutput
from foredraft.sampling_params import SamplingParams
from foredraft.training.acceptance import ChainAcceptance, Span, accept_chances, chain_acceptance, counted_acceptance
from foredraft.training.chain import TeacherForcedChain
from foredraft.training.chat_frame import chat_frame
from foredraft.training.frozen_target import ATTENTION, FrozenTarget
from foredraft.training.user_turns import read_user_turns

_MAX_REQUESTS = 64
_BLOCK_SIZE = 16
_SEED = 1


@dataclass(frozen=True)
class EvaluationSet:
    """A file of user turns, or token ids to go on with, and the temperature of the answers."""

    file: Path
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.file.stem}, temperature {self.temperature:g}"

    @classmethod
    def parse(cls, text: str) -> EvaluationSet:
        """FILE or FILE:TEMPERATURE. ConfigError."""
        path, colon, number = text.rpartition(":")
        if not colon:
            return cls(Path(text))
        try:
            temperature = float(number)
        except ValueError:
            return cls(Path(text))
        if not 0 <= temperature <= 10:
            raise ConfigError(f"the temperature of {text!r} must be a number from 0 to 10")
        return cls(Path(path), temperature)


@dataclass(frozen=True)
class Evaluation:
    """One set: what the engine measured, and what the passes say of the same texts."""

    name: str
    num_prompts: int
    num_tokens: int
    engine: ChainAcceptance
    exact: ChainAcceptance

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        of = {"engine": self.engine, "exact": self.exact}
        figures = {
            name: {"num_cycles": each.num_cycles, "mean_length": each.mean_length, "rates": list(each.rates)}
            for name, each in of.items()
        }
        return {"name": self.name, "num_prompts": self.num_prompts, "num_tokens": self.num_tokens, **figures}


@dataclass(frozen=True)
class EvaluationSettings:
    """max_tokens of an answer, max_prompts of a file; draft_vocab: the file of tokens to draft among, and how many."""

    device: torch.device
    dtype: torch.dtype
    max_tokens: int = 256
    max_prompts: int = 64
    draft_vocab: Path | None = None
    draft_vocab_size: int | None = None


def evaluate_modules(
    target: str | Path, mtp: Path, sets: Sequence[EvaluationSet], settings: EvaluationSettings
) -> list[Evaluation]:
    """Measure modules on each set. ConfigError for a file that cannot be read, or has no prompt that fits."""
    with _engine(target, mtp, settings) as llm:
        depths = llm.info.num_mtp_modules
        outputs: list[list[RequestOutput]] = []
        for each in sets:
            prompts = _prompts(each, llm.tokenizer, llm, settings)
            params = [
                SamplingParams(max_tokens=settings.max_tokens, temperature=each.temperature, seed=_SEED + index)
                for index in range(len(prompts))
            ]
            outputs.append(llm.generate(prompts, params))
    del llm
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    frozen, chain = _teacher_forced(target, mtp, settings)
    head = None
    if settings.draft_vocab is not None:
        head = frozen.head(_draft_tokens(settings, frozen))
    results = []
    for each, answers in zip(sets, outputs):
        measured = exact = ChainAcceptance.none(depths)
        for answer in answers:
            measured += counted_acceptance(answer.token_depths, depths, settings.max_tokens)
            start = len(answer.prompt_token_ids)
            token_ids = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]], device=settings.device)
            if token_ids.shape[1] < depths + 2:
                continue  # too short for the last depth, and of no cycle that drafts as deep
            chances = accept_chances(frozen, chain, token_ids, depths, each.temperature, settings.dtype, head)
            span = Span(start, token_ids.shape[1], start + settings.max_tokens)
            exact += chain_acceptance(chances[0].cpu(), span)
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        results.append(Evaluation(each.name, len(answers), num_tokens, measured, exact))
    return results


def _engine(target: str | Path, mtp: Path, settings: EvaluationSettings) -> LLM:
    blocks = -(-(2 * settings.max_tokens + 1024) // _BLOCK_SIZE)
    vocabulary: dict[str, Any] = {}
    if settings.draft_vocab is not None:
        vocabulary = {"draft_vocab": settings.draft_vocab, "draft_vocab_size": settings.draft_vocab_size}
    return LLM(
        target,
        mtp=mtp,
        dtype=str(settings.dtype).removeprefix("torch."),
        device=str(settings.device),
        max_num_seqs=_MAX_REQUESTS,
        max_num_batched_tokens=2048,
        block_size=_BLOCK_SIZE,
        num_blocks=1 + _MAX_REQUESTS * blocks,
        enable_prefix_caching=False,
        draft_head_bits=16,  # the modules are measured, not a rounded head
        **vocabulary,
    )


def _prompts(
    each: EvaluationSet, tokenizer: PreTrainedTokenizerBase | None, llm: LLM, settings: EvaluationSettings
) -> list[list[int]]:
    limit = llm.engine.limits.max_model_len - settings.max_tokens
    turns = read_user_turns(each.file, tokenizer, llm.info.vocab_size, limit)[: settings.max_prompts]
    frame = chat_frame(tokenizer)
    if frame is None:
        return [list(turn) for turn in turns]
    whole = [[*frame.opening, *turn, *frame.to_assistant] for turn in turns]
    return [prompt for prompt in whole if len(prompt) <= limit]


def _teacher_forced(
    target: str | Path, mtp: Path, settings: EvaluationSettings
) -> tuple[FrozenTarget, TeacherForcedChain]:
    loaded = load_checkpoint(target, mtp, dtype=settings.dtype, device=settings.device, attn_implementation=ATTENTION)
    assert loaded.mtp is not None
    frozen = FrozenTarget(loaded)
    return frozen, TeacherForcedChain(frozen, loaded.mtp)


def _draft_tokens(settings: EvaluationSettings, frozen: FrozenTarget) -> list[int]:
    from foredraft.models.draft_vocab import frequent_tokens, read_ranking

    assert settings.draft_vocab is not None
    assert settings.draft_vocab_size is not None
    ranking = read_ranking(settings.draft_vocab, frozen.loaded.tokenizer)
    vocab_size = int(frozen.head().weight.shape[0])
    chosen = frequent_tokens(ranking, settings.draft_vocab_size, vocab_size, frozen.loaded.eos_token_ids)
    return [int(token_id) for token_id in chosen]
