"""From the bytes of files to pixels and samples. Files are not trusted: what is read is bounded before it is decoded.

Errors are RequestErrors whose message goes on after the name of a field.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foredraft.engine.media_limits import MediaLimits
from foredraft.errors import RequestError, described

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
MAX_CHANNELS = 16
MIN_RATE, MAX_RATE = 1_000, 384_000
MAX_SCANS = 100
"""Passes over the pixels that a JPEG file may ask for; a progressive one has about ten."""
START_OF_SCAN = b"\xff\xda"
BLOCK = 1 << 16
"""Frames of sound that are decoded at once: what they take is bounded, however much a file holds."""


def decode_image(content: bytes, limits: MediaLimits) -> Image:
    """An image in mode RGB: the first frame, turned as its EXIF data say, over white where it is transparent."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(content), formats=IMAGE_FORMATS) as opened:
            _check_size(opened.size, limits)
            # Within the data of a scan 0xff is followed by 0, so that nothing but segments is counted.
            if opened.format in ("JPEG", "MPO") and content.count(START_OF_SCAN) > MAX_SCANS:
                raise RequestError(f"must have {MAX_SCANS} scans at most")
            opened.load()
            return plain_image(opened, limits)
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError(f"must be an image in one of the formats {', '.join(IMAGE_FORMATS)}") from None
    except Exception as error:  # each decoder's own, for files that are damaged or end early
        raise RequestError(f"cannot be decoded: {described(error)}") from None


def plain_image(image: Image, limits: MediaLimits) -> Image:
    """As `decode_image`, of an image that has been opened."""
    from PIL import Image, ImageOps

    _check_size(image.size, limits)
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        raise RequestError(f"must have 8 or 16 bits a channel, not 32 (mode {image.mode})")
    if image.mode.startswith("I;16"):  # Pillow would cut off what is above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if min(size) < 1 or max(size) > limits.max_side or width * height > limits.max_pixels:
        allowed = f"{limits.max_side} pixels a side and {limits.max_pixels} in all"
        raise RequestError(f"must have {allowed} at most, not {width} x {height}")


def decode_audio(content: bytes, limits: MediaLimits, rate: int, stated: str | None = None) -> NDArray[np.float32]:
    """Sound as samples [N] of one channel, the mean of all, at `rate`. stated: the format that it must have."""
    found = audio_format(content)
    if found is None:
        raise RequestError(f"must be sound in one of the formats {', '.join(AUDIO_FORMATS)}")
    if stated not in (None, found):
        raise RequestError(f"must be {stated}, as its format says, not {found}")
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(content)) as file:
            samples = _read(file, limits, rate)
    except RequestError:
        raise
    except soundfile.LibsndfileError as error:  # in whose own text the file is an address in memory
        raise RequestError(f"cannot be decoded: {error.error_string}") from None
    except Exception as error:  # the decoders' own
        raise RequestError(f"cannot be decoded: {described(error)}") from None
    return checked_samples(samples)


def audio_format(content: bytes) -> str | None:
    """Which of AUDIO_FORMATS bytes begin like."""
    if content[:4] in (b"RIFF", b"RF64") and content[8:12] == b"WAVE":
        return "wav"
    if content[:4] == b"fLaC":
        return "flac"
    if content[:4] == b"OggS":
        return "ogg"
    is_frame = len(content) > 1 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0
    return "mp3" if content[:3] == b"ID3" or is_frame else None


def plain_samples(samples: object, rate: int, limits: MediaLimits, wanted_rate: int) -> NDArray[np.float32]:
    """As `decode_audio`, of samples [N] or [N, channels] that are numbers already."""
    try:
        given = np.asarray(samples)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of unequal lengths, a tensor of another device
        raise RequestError(f"must have samples that are an array: {described(error)}") from None
    if given.ndim not in (1, 2) or not np.issubdtype(given.dtype, np.floating):
        raise RequestError("must have floating-point samples [N] or [N, channels]")
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not MIN_RATE <= rate <= MAX_RATE:
        raise RequestError(f"must have a rate from {MIN_RATE} to {MAX_RATE}, an integer")
    if len(given) > limits.max_seconds * rate:
        raise RequestError(f"must last {limits.max_seconds:g} s at most, not {len(given) / rate:.1f}")
    mono = given.astype(np.float32)
    resampler = _Resampler(int(rate), wanted_rate)
    return checked_samples(np.concatenate([resampler.add(_mean(mono)), resampler.end()]))


def checked_samples(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same. Raises RequestError if there are none, or if one is no finite number."""
    if not len(samples):
        raise RequestError("must not be empty")
    if not np.isfinite(samples).all():
        raise RequestError("must have finite samples: some are NaN or infinite")
    return samples


def _read(file: Any, limits: MediaLimits, rate: int) -> NDArray[np.float32]:
    own_rate, channels = int(file.samplerate), int(file.channels)
    if not (MIN_RATE <= own_rate <= MAX_RATE and channels <= MAX_CHANNELS):
        allowed = f"{MIN_RATE} to {MAX_RATE} samples a second and {MAX_CHANNELS} channels at most"
        raise RequestError(f"must have {allowed}, not {own_rate} and {channels}")
    resampler = _Resampler(own_rate, rate)
    pieces: list[NDArray[np.float32]] = []
    num_frames = 0
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        num_frames += len(block)
        if num_frames > limits.max_seconds * own_rate:  # counted: what the head of a file says may be wrong
            raise RequestError(f"must last {limits.max_seconds:g} s at most")
        pieces.append(resampler.add(_mean(block)))
    return np.concatenate([*pieces, resampler.end()])


def _mean(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    return frames if frames.ndim == 1 else frames.mean(axis=1, dtype=np.float32)


class _Resampler:
    """From one rate to another, block by block."""

    def __init__(self, rate: int, wanted_rate: int) -> None:
        self._stream: Any = None
        if rate != wanted_rate:
            import soxr

            self._stream = soxr.ResampleStream(rate, wanted_rate, 1, dtype="float32")

    def add(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def end(self) -> NDArray[np.float32]:
        nothing = np.zeros(0, np.float32)
        return nothing if self._stream is None else self._stream.resample_chunk(nothing, last=True)
