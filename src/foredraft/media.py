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
from types import MappingProxyType

import torch
from torch import Tensor

FIRST_MEDIA_ID = 2**256
"""Larger than any token id. Ids of rows of media begin here; they are compared, and never reach a tensor."""


class MediaKind(Enum):
    """What is shown."""

    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, eq=False)
class Media:
    """One image or one piece of sound, as the model's processor has prepared it.

    features: what the tower reads, by transformers' names; they are copied to the CPU. num_tokens: rows that the tower
    makes of it. first_id: its rows go by this id and those that follow. Raises ValueError for no number of rows.
    """

    kind: MediaKind
    features: Mapping[str, Tensor]
    num_tokens: int
    first_id: int = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 1:
            raise ValueError(f"num_tokens must be an integer of at least 1, not {self.num_tokens!r:.40}")
        # What a caller does with its own tensors from now on changes neither the rows nor the ids that they go by.
        features = {name: _own(tensor) for name, tensor in sorted(self.features.items())}
        digest = hashlib.sha256(repr((self.kind.value, self.num_tokens)).encode())
        for name, tensor in features.items():
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        object.__setattr__(self, "features", MappingProxyType(features))
        object.__setattr__(self, "first_id", FIRST_MEDIA_ID + int.from_bytes(digest.digest(), "big"))

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
    places = [place for place, token_id in enumerate(token_ids) if token_id in kinds]
    for kind, token_id in placeholders.items():
        num_given = sum(one.num_tokens for one in media if one.kind is kind)
        num_places = sum(kinds[token_ids[place]] is kind for place in places)
        if num_given != num_places:
            raise ValueError(
                f"the prompt has {num_places} placeholders of {kind.value} (token {token_id}), "
                f"and what is shown fills {num_given}"
            )
    ids = list(token_ids)
    for place, (kind, row_id) in zip(
        places, ((one.kind, row_id) for one in media for row_id in one.row_ids), strict=True
    ):
        if (wanted := kinds[ids[place]]) is not kind:
            raise ValueError(f"token {place} of the prompt is a placeholder of {wanted.value}, not {kind.value}")
        ids[place] = row_id
    return tuple(ids)


def _own(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()
