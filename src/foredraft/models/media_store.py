"""The embeddings of what prompts show: made by the model's towers when rows first need them, and kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.media import FIRST_MEDIA_ID, Media

DEFAULT_MEDIA_BYTES = 256 << 20
"""Embeddings that are kept."""


@dataclass(frozen=True)
class MediaRows:
    """Rows of a pass that read no token: their places among its rows [M] int64, and their embeddings [M, hidden_size].

    In such a pass the token ids at those places mean nothing.
    """

    places: Tensor
    embeddings: Tensor

    def over(self, embeddings: Tensor) -> Tensor:
        """embeddings [T, hidden_size] of the pass's tokens, with these rows in their places."""
        return embeddings.index_copy(0, self.places, self.embeddings.to(embeddings.dtype))


class MediaStore:
    """Embeddings by the ids that rows of media go by. What is not there (any more) is encoded again.

    encode: a tower, from one of media to its rows [num_tokens, hidden_size] on the model's device. Beside the rows that
    a step reads there are never more than `max_bytes` and one image or sound; the least recently read goes first.
    """

    def __init__(self, encode: Callable[[Media], Tensor], max_bytes: int = DEFAULT_MEDIA_BYTES) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._of_step: dict[int, tuple[Tensor, int]] = {}
        self.num_encoded = 0

    @property
    def num_bytes(self) -> int:
        """What is kept now from step to step."""
        return sum(rows.nbytes for rows in self._kept.values())

    def begin_step(self) -> None:
        """What the step before has read is needed no more."""
        self._of_step.clear()

    def prepare(self, ids: Collection[int], shown: Iterable[Media]) -> None:
        """Make ready what of `ids` are rows of `shown`, for the passes of this step. Raises whatever the tower does."""
        wanted = {row_id for row_id in ids if row_id >= FIRST_MEDIA_ID} - self._of_step.keys()
        if not wanted:  # as in almost every step: a prompt is read once
            return
        for one in shown:
            if members := [row_id for row_id in wanted if row_id in one.row_ids]:
                encoded = self._encoded(one)
                index = torch.tensor([row_id - one.first_id for row_id in members]).to(encoded.device)
                rows = encoded.index_select(0, index)
                self._of_step |= {row_id: (rows, number) for number, row_id in enumerate(members)}
                wanted.difference_update(members)
                self._shrink()

    def rows(self, ids: Sequence[int]) -> MediaRows | None:
        """The rows of a pass that reads `ids` [T], which are made ready; None if all are tokens."""
        places = [place for place, row_id in enumerate(ids) if row_id >= FIRST_MEDIA_ID]
        if not places:
            return None
        embeddings = torch.stack([rows[number] for rows, number in (self._of_step[ids[place]] for place in places)])
        return MediaRows(torch.tensor(places).to(embeddings.device), embeddings)

    def _encoded(self, media: Media) -> Tensor:
        rows = self._kept.get(media.first_id)
        if rows is None:
            rows = self._kept[media.first_id] = self._encode(media)
            self.num_encoded += 1
        self._kept.move_to_end(media.first_id)
        return rows

    def _shrink(self) -> None:
        num_bytes = self.num_bytes
        while num_bytes > self._max_bytes:
            num_bytes -= self._kept.popitem(last=False)[1].nbytes


def text_ids(ids: Sequence[int]) -> list[int]:
    """Token ids that an embedding can be asked for: 0 where a row of media is read."""
    return [0 if row_id >= FIRST_MEDIA_ID else row_id for row_id in ids]
