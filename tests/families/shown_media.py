"""A few images and sounds of one row each, and prompts that show them in the place of every third token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.engine.engine import Engine
from foredraft.media import FIRST_MEDIA_ID, Media, MediaKind
from foredraft.request import Request
from foredraft.sampling_params import SamplingParams

IMAGE_TOKEN, AUDIO_TOKEN = 71, 70
PLACEHOLDERS = {MediaKind.IMAGE: IMAGE_TOKEN, MediaKind.AUDIO: AUDIO_TOKEN}


def image(seed: int, num_patches: int = 1) -> Media:
    """Random patches as the tiny Inkling's processor would cut them."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(num_patches, 2, 4, 4, 3, generator=generator)
    return Media(MediaKind.IMAGE, {"pixel_values": pixels}, num_patches)


def audio(seed: int, num_frames: int = 1) -> Media:
    """Random frames of the tiny Inkling's four bands."""
    generator = torch.Generator().manual_seed(seed)
    bins = torch.randint(8, (1, num_frames, 4), generator=generator)
    return Media(MediaKind.AUDIO, {"audio_input_ids": bins}, num_frames)


SHOWN = [image(0), audio(1), image(2), image(3), audio(4), image(5)]
BY_ID = {one.first_id: one for one in SHOWN}


def row_id(token_id: int) -> int:
    """What a prompt has in the place of a token: every third is shown."""
    return SHOWN[token_id // 3 % len(SHOWN)].first_id if token_id % 3 == 0 else token_id


def as_prompt(ids: Sequence[int]) -> tuple[list[int], list[Media]]:
    """Token ids with placeholders, and what is shown there, of ids that rows go by."""
    media = [BY_ID[one] for one in ids if one >= FIRST_MEDIA_ID]
    return [one if one < FIRST_MEDIA_ID else PLACEHOLDERS[BY_ID[one].kind] for one in ids], media


@contextmanager
def prompts_of_row_ids() -> Iterator[None]:
    """Within this, `Engine.add_request` takes ids of rows for a prompt."""
    add_request = Engine.add_request

    def add(self: Engine, request_id: str, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Request:
        token_ids, media = as_prompt(prompt)
        return add_request(self, request_id, token_ids, params, media=media, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "add_request", add)
        yield


def inputs_of(ids: Sequence[int]) -> dict[str, Tensor]:
    """What transformers' model takes for a prompt of such ids."""
    token_ids, media = as_prompt(ids)
    inputs = {"input_ids": torch.tensor([token_ids])}
    for kind, name in ((MediaKind.IMAGE, "pixel_values"), (MediaKind.AUDIO, "audio_input_ids")):
        if parts := [one.features[name] for one in media if one.kind is kind]:
            inputs[name] = torch.cat(parts)
    return inputs
