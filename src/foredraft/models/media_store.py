"""The embeddings of what prompts show: made by the model's towers when rows first need them, and kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

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

    encode: a tower, from one of media to its rows [num_tokens, hidden_size] on the model's device. More than
    `max_bytes` and one image or sound are never there at once; the least recently read goes first.
    """

    def __init__(self, encode: Callable[[Media], Tensor], max_bytes: int = DEFAULT_MEDIA_BYTES) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._sound: WeakSet[Media] = WeakSet()
        self.num_encoded = 0

    @property
    def num_bytes(self) -> int:
        """What is kept now."""
        return sum(rows.nbytes for rows in self._kept.values())

    def rows(self, ids: Sequence[int], shown: Iterable[Media]) -> MediaRows | None:
        """The rows of a pass that reads `ids` [T], of prompts that show `shown`; None if all ids are tokens."""
        places = [place for place, row_id in enumerate(ids) if row_id >= FIRST_MEDIA_ID]
        if not places:
            return None
        wanted = {ids[place] for place in places}
        at: dict[int, int] = {}  # where in the parts a row lies
        parts: list[Tensor] = []
        for one in {media.first_id: media for media in shown}.values():
            if members := sorted(wanted.intersection(one.row_ids)):
                at |= {row_id: len(at) + number for number, row_id in enumerate(members)}
                encoded = self._encoded(one)
                index = torch.tensor([row_id - one.first_id for row_id in members]).to(encoded.device)
                parts.append(encoded.index_select(0, index))
                self._shrink()
        order = torch.tensor([at[ids[place]] for place in places]).to(parts[0].device)
        return MediaRows(torch.tensor(places).to(order.device), torch.cat(parts).index_select(0, order))

    def check(self, ids: Collection[int], shown: Iterable[Media]) -> None:
        """Encode what is about to be read for the first time. Raises whatever the tower raises."""
        for one in shown:
            if one not in self._sound and any(row_id in one.row_ids for row_id in ids):
                self._encoded(one)
                self._shrink()

    def _encoded(self, media: Media) -> Tensor:
        rows = self._kept.get(media.first_id)
        if rows is None:
            rows = self._kept[media.first_id] = self._encode(media)
            self.num_encoded += 1
        self._sound.add(media)
        self._kept.move_to_end(media.first_id)
        return rows

    def _shrink(self) -> None:
        num_bytes = self.num_bytes
        while num_bytes > self._max_bytes:
            num_bytes -= self._kept.popitem(last=False)[1].nbytes


def text_ids(ids: Sequence[int]) -> list[int]:
    """Token ids that an embedding can be asked for: 0 where a row of media is read."""
    return [0 if row_id >= FIRST_MEDIA_ID else row_id for row_id in ids]
