"""The tokens of a model, ranked by texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from foredraft.config import EngineConfig
from foredraft.engine.llm import resolve_model
from foredraft.errors import ConfigError
from foredraft.models.checkpoint_files import resolve_directory
from foredraft.models.draft_vocab import count_tokens, ranked, read_texts
from foredraft.models.loader import load_tokenizer


def rank_texts(config: EngineConfig, texts: Sequence[Path]) -> list[int]:
    """The tokens of a model that stand in texts (.txt, .jsonl), the most frequent first. No weights are read.

    Raises ConfigError or ModelLoadError.
    """
    directory = resolve_directory(resolve_model(config)[0])
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ConfigError(f"{directory} has no tokenizer to count tokens with")
    counts: Counter[int] = Counter()
    for path in texts:
        counts += count_tokens(read_texts(path), tokenizer)
    return ranked(counts)
