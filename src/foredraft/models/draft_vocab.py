"""Which tokens are frequent: counted in texts, kept in a file, read for the head that drafts are chosen with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ConfigError
from foredraft.models.builtin import builtin_mtp_directory

_CHARACTERS_AT_ONCE = 100_000


def builtin_ranking() -> Path:
    """The ranking of the built-in model's tokens, a file of the package."""
    return builtin_mtp_directory() / "draft_vocab.json"


def read_ranking(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The token ids of a file, the most frequent first: those of a list in JSON, or counted in a text.

    path: a .json file, or one that `read_texts` reads. Raises ConfigError that names draft_vocab.
    """
    if path.suffix != ".json":
        if tokenizer is None:
            raise ConfigError(f"draft_vocab={str(path)!r} is a text, but the model has no tokenizer: name a .json file")
        return ranked(count_tokens(read_texts(path), tokenizer))
    text = _contents(path)
    try:
        ranking: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"draft_vocab={str(path)!r} is not JSON: {error}") from error
    if not isinstance(ranking, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ranking):
        raise ConfigError(f"draft_vocab={str(path)!r} is not a list of token ids")
    return ranking


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a .txt file, which is one, or of a .jsonl file: all that stands in its values. ConfigError."""
    if path.suffix == ".txt":
        yield _contents(path)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(_contents(path).splitlines(), start=1):
            try:
                yield from _strings(json.loads(line) if line.strip() else None)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"draft_vocab: {path}, line {number} is not JSON: {error}") from error
    else:
        raise ConfigError(f"draft_vocab={str(path)!r} must end in .json (token ids), .txt or .jsonl (texts)")


def count_tokens(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    """How often each token stands in the texts, special tokens left out. Raises ConfigError if there is no text."""
    counts: Counter[int] = Counter()
    for text in texts:
        text = text.encode(
            "utf-8", "replace"
        ).decode()  # JSON may hold halves of characters, tokenizers do not take them
        for start in range(0, len(text), _CHARACTERS_AT_ONCE):
            part = text[start : start + _CHARACTERS_AT_ONCE]
            counts.update(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
    if not counts:
        raise ConfigError("draft_vocab: there is no text to count tokens in")
    return counts


def ranked(counts: Counter[int]) -> list[int]:
    """The tokens that were counted, the most frequent first; of equal counts the lower id, which a byte-pair vocabulary
    has learnt earlier."""
    return sorted(counts, key=lambda token_id: (-counts[token_id], token_id))


def frequent_tokens(ranking: Iterable[int], num_tokens: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The first `num_tokens` token ids [num_tokens] of `always`, then of the ranking, then of all in their order.

    always: tokens that end an answer, which no text shows. Raises ConfigError for an id that the model does not have.
    """
    ranking = list(ranking)
    if too_large := [token_id for token_id in ranking if token_id >= vocab_size]:
        raise ConfigError(f"draft_vocab has token id {too_large[0]}, but the model has {vocab_size} token ids")
    ends = sorted(token_id for token_id in always if token_id < vocab_size)  # configurations name some beyond the head
    order = dict.fromkeys((*ends, *ranking, *range(vocab_size)))
    return torch.tensor(list(order)[:num_tokens], dtype=torch.int64)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _contents(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft_vocab={str(path)!r} cannot be read: {error}") from error
