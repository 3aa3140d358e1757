"""Files of images and sound, in memory."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

from numpy.typing import NDArray
from PIL import Image

SUBTYPES = {"wav": "FLOAT", "flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}


def image_bytes(image: Image.Image, image_format: str, **options: Any) -> bytes:
    """What a file in this format holds."""
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def sound_bytes(samples: NDArray[Any], rate: int, audio_format: str) -> bytes:
    """What a file in this format holds, of samples [N] or [N, channels]."""
    import soundfile

    file = BytesIO()
    soundfile.write(file, samples, rate, format=audio_format, subtype=SUBTYPES[audio_format])
    return file.getvalue()


def data_url(media_type: str, content: bytes) -> str:
    """The URL that holds it."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
