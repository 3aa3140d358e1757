"""Images and sound as callers name them, ready for the model: read, decoded, prepared, and remembered."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.engine.media_files import decode_audio, decode_image, plain_image, plain_samples
from foredraft.engine.media_limits import MediaLimits
from foredraft.engine.media_sources import MediaSources
from foredraft.errors import RequestError, described
from foredraft.media import Media, MediaKind, MediaPrompt
from foredraft.models.media_processor import MediaProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

_ENTRY_BYTES = 2048
"""What is remembered of one image or sound beside its features."""
URL_SCHEMES = ("data:", "file:", "http:", "https:")


class MediaReader:
    """Reads media for one model. Every error is a RequestError that begins with the name of the field at fault.

    What was prepared from the same bytes before is not prepared again, as far as `limits.max_cached_bytes` goes: a
    conversation sends its images with every turn. One thread at a time may call it.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        *,
        allowed_local_path: Path | None = None,
        allowed_hosts: frozenset[str] = frozenset(),
        limits: MediaLimits | None = None,
    ) -> None:
        self.limits = limits or MediaLimits()
        self._processor = processor
        self._sources = MediaSources(allowed_local_path, allowed_hosts, self.limits)
        self._kept: OrderedDict[bytes, Media] = OrderedDict()
        self._num_kept_bytes = 0
        self.num_prepared = 0

    def image_url(self, url: str, field: str) -> Media:
        """The image behind a URL."""
        with self._reading(MediaKind.IMAGE, field):
            return self._image(self._sources.content(url, MediaKind.IMAGE))

    def input_audio(self, data: str, audio_format: str, field: str) -> Media:
        """Sound in base64, or behind a URL, in one of AUDIO_FORMATS."""
        with self._reading(MediaKind.AUDIO, field):
            is_url = data[:8].lower().startswith(URL_SCHEMES)
            content = self._sources.content(data, MediaKind.AUDIO) if is_url else self._sources.base64(data)
            return self._audio(content, audio_format)

    def image(self, image: Image | Path | str | bytes, field: str) -> Media:
        """An image of the caller's own: pixels, a file wherever it is, or what a file holds."""
        with self._reading(MediaKind.IMAGE, field):
            if isinstance(image, Path | str):
                return self._image(self._sources.file(Path(image)))
            if isinstance(image, bytes):
                return self._image(image)
            return self._pixels(image)

    def audio(self, audio: tuple[Any, int] | Path | str | bytes, field: str) -> Media:
        """Sound of the caller's own: samples [N] or [N, channels] and how many make a second, a file, or its bytes."""
        with self._reading(MediaKind.AUDIO, field):
            if isinstance(audio, Path | str):
                return self._audio(self._sources.file(Path(audio)), None)
            if isinstance(audio, bytes):
                return self._audio(audio, None)
            if not isinstance(audio, tuple | list) or len(audio) != 2:
                raise RequestError("must be (samples, rate), or a file")
            rate = self._processor.sampling_rate
            self.num_prepared += 1
            return self._processor.audio(plain_samples(*audio, self.limits, rate), rate)

    def prompt(self, token_ids: Sequence[int], media: Sequence[Media], field: str = "prompt") -> MediaPrompt:
        """See MediaProcessor.prompt."""
        return self._processor.prompt(token_ids, media, field)

    def check_text(self, text: str, field: str) -> None:
        """Raise RequestError for a text that would pass as a placeholder of something shown."""
        for kind, placeholder in self._processor.placeholder_texts.items():
            if placeholder in text:
                raise RequestError(f"{field} must not have {placeholder!r} in its text: it stands for {kind.value}")

    @contextmanager
    def _reading(self, kind: MediaKind, field: str) -> Iterator[None]:
        """Put the name of the field before what is wrong with it. What cannot be shown at all is not even read."""
        try:
            self._processor.check(kind)
            yield
        except RequestError as error:
            raise RequestError(f"{field} {error}") from error.__cause__

    def _image(self, content: bytes) -> Media:
        return self._remembered(
            MediaKind.IMAGE, content, lambda: self._processor.image(decode_image(content, self.limits))
        )

    def _audio(self, content: bytes, stated: str | None) -> Media:
        rate = self._processor.sampling_rate
        key = content if stated is None else stated.encode() + b":" + content
        return self._remembered(
            MediaKind.AUDIO,
            key,
            lambda: self._processor.audio(decode_audio(content, self.limits, rate, stated), rate),
        )

    def _pixels(self, image: Any) -> Media:
        from PIL.Image import Image

        if not isinstance(image, Image):
            raise RequestError(f"must be an image of Pillow's, or a file, not {type(image).__name__}")
        try:
            plain = plain_image(image, self.limits)
        except RequestError:
            raise
        except Exception as error:  # a file that was opened, and cannot be decoded
            raise RequestError(f"cannot be decoded: {described(error)}") from None
        self.num_prepared += 1
        return self._processor.image(plain)

    def _remembered(self, kind: MediaKind, content: bytes, prepare: Callable[[], Media]) -> Media:
        key = hashlib.sha256(kind.value.encode() + b":" + content).digest()
        media = self._kept.get(key)
        if media is not None:
            self._kept.move_to_end(key)
            return media
        media = prepare()
        self.num_prepared += 1
        self._kept[key] = media
        self._num_kept_bytes += _num_bytes(media)
        while self._num_kept_bytes > self.limits.max_cached_bytes:
            self._num_kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return media


def _num_bytes(media: Media) -> int:
    return _ENTRY_BYTES + sum(tensor.nbytes for tensor in media.features.values())
