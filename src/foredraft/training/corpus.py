"""Rows of text on disk, all of one length: token ids, and which of them an assistant said.

A corpus is a directory of shards, each a safetensors file that is there whole or not at all, and `corpus.json`, which
says what it was made with. Shards are numbered, and a shard's number decides what is in it, so that any number of
processes may write them, in any order, again after a kill.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.training.files import write_atomically, write_text
from foredraft.training.recipe import require_equal

INFO_NAME = "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """token_ids [N, L] int32; is_spoken [N, L] bool: part of an assistant's turn, its end included."""

    token_ids: Tensor
    is_spoken: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def row_length(self) -> int:
        return int(self.token_ids.shape[1])

    def split(self, num_heldout: int, share: float) -> tuple[Corpus, Corpus]:
        """The first `share` of what is trained on, and the last rows, which are not. ConfigError if none are left."""
        num_trained = int((len(self) - num_heldout) * share)
        if num_trained < 1:
            raise ConfigError(
                f"the corpus has {len(self)} rows: with heldout_rows={num_heldout} and data_share={share} none are left"
            )
        return self[:num_trained], self[len(self) - num_heldout :]

    def __getitem__(self, rows: slice) -> Corpus:
        return Corpus(self.token_ids[rows], self.is_spoken[rows])

    def token_ranking(self) -> list[int]:
        """The token ids that stand in it, the most frequent first, of equal counts the lower id."""
        counts = torch.bincount(self.token_ids.flatten())
        order = torch.sort(counts, descending=True, stable=True).indices
        return [int(token_id) for token_id in order[: int((counts > 0).sum())]]


class CorpusDirectory:
    """Where the shards of a corpus are written and read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, made_with: dict[str, Any], except_for: Sequence[str] = ()) -> None:
        """Begin, or go on with, a corpus that is made with these settings. ConfigError if it was made with others."""
        file = self.path / INFO_NAME
        if file.is_file():
            require_equal(self.info(), made_with, self.path, except_for)
        else:
            write_text(file, json.dumps(made_with, indent=2) + "\n")

    def info(self) -> dict[str, Any]:
        """What it was made with. ConfigError if that cannot be read."""
        file = self.path / INFO_NAME
        try:
            info: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; is {self.path} a corpus?") from error
        if not isinstance(info, dict):
            raise ConfigError(f"{file} must be an object of settings")
        return info

    def has(self, shard: int) -> bool:
        """Whether this shard is written."""
        return self._file(shard).is_file()

    def write(self, shard: int, rows: Corpus) -> None:
        """Write a shard, whole or not at all."""
        tensors = {"token_ids": rows.token_ids.int().contiguous(), "is_spoken": rows.is_spoken.bool().contiguous()}
        write_atomically(self._file(shard), lambda partial: save_file(tensors, partial))

    def num_rows(self) -> int:
        """Rows of all shards that are written."""
        return sum(len(self._read(file)) for file in self._files())

    def read(self, limit: int | None = None) -> Corpus:
        """The rows of all shards in order, no more than `limit`. ConfigError if there are none, or one is damaged."""
        shards = [self._read(file) for file in self._files()]
        if not shards:
            raise ConfigError(f"{self.path} has no rows of text: run the stage synthesise first")
        corpus = Corpus(torch.cat([s.token_ids for s in shards]), torch.cat([s.is_spoken for s in shards]))
        return corpus[: len(corpus) if limit is None else limit]

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("rows-*.safetensors"))

    def _file(self, shard: int) -> Path:
        return self.path / f"rows-{shard:06d}.safetensors"

    @staticmethod
    def _read(file: Path) -> Corpus:
        try:
            tensors = load_file(file)
            return Corpus(tensors["token_ids"], tensors["is_spoken"])
        except (OSError, SafetensorError, KeyError) as error:
            raise ConfigError(f"{file} is damaged ({error}): delete it, and run the stage synthesise again") from error
