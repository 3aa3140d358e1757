"""Images and sound in a prompt: what a tower reads of them, and by which ids their rows go.

Such a prompt has a placeholder token for each row that a tower gives. Where rows are computed, looked up and shared,
each placeholder goes by an id of its own instead, which follows from what is shown: two rows have equal ids where their
embeddings are equal. So whatever compares token ids (the prefix cache, its files, the modules' look ahead) is right for
media as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

FIRST_MEDIA_ID = 2**32
"""Larger than any token id. Ids of rows of media begin here, and stay below 2^63."""


class MediaKind(Enum):
    """What is shown."""

    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, eq=False)
class Media:
    """One image or one piece of sound, as the model's processor has prepared it.

    features: what the tower reads, by transformers' names, on the CPU. num_tokens: rows that the tower makes of it.
    first_id: its rows go by this id and those that follow.
    """

    kind: MediaKind
    features: Mapping[str, Tensor]
    num_tokens: int
    first_id: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr((self.kind.value, self.num_tokens)).encode())
        for name, tensor in sorted(self.features.items()):
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        number = int.from_bytes(digest.digest()[:8], "big") % 2**62
        object.__setattr__(self, "first_id", FIRST_MEDIA_ID + number)

    @property
    def row_ids(self) -> range:
        return range(self.first_id, self.first_id + self.num_tokens)


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt that shows something. token_ids: with `num_tokens` placeholders for each of `media`, in their order."""

    token_ids: Sequence[int]
    media: Sequence[Media] = ()


def row_ids(token_ids: Sequence[int], media: Sequence[Media], placeholders: Mapping[MediaKind, int]) -> tuple[int, ...]:
    """The ids that the rows of a prompt go by: those of its tokens, and of its media in place of placeholders.

    placeholders: the model's, by kind. Raises ValueError unless each of `media` finds exactly its placeholders.
    """
    kinds = {token_id: kind for kind, token_id in placeholders.items()}
    ids = list(token_ids)
    ordered: list[tuple[MediaKind, int]] = [(one.kind, row_id) for one in media for row_id in one.row_ids]
    places: list[Any] = [place for place, token_id in enumerate(ids) if token_id in kinds]
    for kind, token_id in placeholders.items():
        num_given = sum(one.num_tokens for one in media if one.kind is kind)
        num_places = sum(kinds[ids[place]] is kind for place in places)
        if num_given != num_places:
            raise ValueError(
                f"the prompt has {num_places} placeholders of {kind.value} (token {token_id}), "
                f"and what is shown fills {num_given}"
            )
    for place, (kind, row_id) in zip(places, ordered):
        if kinds[ids[place]] is not kind:
            raise ValueError(
                f"token {place} of the prompt is a placeholder of {kinds[ids[place]].value}, not {kind.value}"
            )
        ids[place] = row_id
    return tuple(ids)
