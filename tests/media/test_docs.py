"""The figures of docs/media.md."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from media.torchvision_operators import skip_without_media

from foredraft.engine.media_files import AUDIO_FORMATS, IMAGE_FORMATS, MAX_CHANNELS, MAX_RATE, MIN_RATE
from foredraft.engine.media_limits import MediaLimits
from foredraft.engine.media_sources import MAX_REDIRECTS
from foredraft.server.settings import ServerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "media.md").read_text(encoding="utf-8")


def test_limits_are_those_of_the_code() -> None:
    limits = MediaLimits()
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ServerSettings)}
    assert (defaults["max_media_mib"] << 20, defaults["max_image_pixels"]) == (limits.max_bytes, limits.max_pixels)
    assert defaults["max_audio_seconds"] == limits.max_seconds
    for figure in (
        f"files; {defaults['max_body_mib']} MiB |",
        f"| {limits.max_bytes >> 20} MiB | one file |",
        f"| {limits.max_pixels:,} | an image, which may have {limits.max_side:,} pixels a side",
        f"| {limits.max_seconds:g} | a piece of sound |",
        f"of {MIN_RATE:,} to {MAX_RATE:,} samples a second and {MAX_CHANNELS} channels at most",
        f"in host memory ({limits.max_cached_bytes >> 20} MiB)",
    ):
        assert figure in PAGE
    assert (MAX_REDIRECTS, limits.fetch_seconds) == (3, 10)


def test_formats_are_those_of_the_code() -> None:
    images = PAGE.split("**Images**: ")[1].split(".")[0].upper().split(", ")
    assert images == list(IMAGE_FORMATS)
    assert PAGE.split("**Sound**: ")[1].split(", of")[0].split(", ") == list(AUDIO_FORMATS)


def test_rows_are_as_many_as_stated() -> None:
    skip_without_media()
    from torch import zeros
    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor
    from transformers.models.inkling.image_processing_inkling import InklingImageProcessor, divide_to_patches

    extractor, size = InklingFeatureExtractor(), InklingImageProcessor().size
    assert extractor.sampling_rate // extractor.hop_length == 20
    assert size["height"] == 40
    for width, height in ((1, 1), (40, 40), (79, 81)):
        num_patches = len(divide_to_patches(zeros(3, height, width), 40))
        assert num_patches == (width // 40 + 1) * -(-height // 40)
