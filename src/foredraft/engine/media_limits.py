"""How much of images and sound is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaLimits:
    """What one image or one piece of sound may be, and what is kept of those that were read.

    max_bytes: of the file as it comes. max_pixels, max_side: of an image. max_seconds: of sound. max_tokens: rows that
    all media of a prompt may take up; None: the engine alone decides. max_cached_bytes: of features that are kept.
    fetch_seconds: how long another host may take.
    """

    max_bytes: int = 20 << 20
    max_pixels: int = 1 << 24
    max_side: int = 8_192
    max_seconds: float = 600.0
    max_tokens: int | None = None
    max_cached_bytes: int = 256 << 20
    fetch_seconds: float = 10.0
