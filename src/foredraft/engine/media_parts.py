"""The parts of messages that show something: from OpenAI's form to what chat templates write placeholders for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foredraft.engine.media_files import AUDIO_FORMATS
from foredraft.engine.media_reader import MediaReader
from foredraft.errors import RequestError, shown
from foredraft.media import Media, MediaPrompt

Part = Mapping[str, Any]


def take_media(
    messages: Sequence[Mapping[str, Any]], reader: MediaReader | None, *, is_callers_own: bool = False
) -> tuple[list[dict[str, Any]], list[Media]]:
    """The messages as chat templates expect them, with {"type": "image"} or {"type": "audio"} in place of what is
    shown, and what that is, in order.

    reader: None for a model that takes text only. is_callers_own: objects and paths may be given, as `image` and
    `audio`, besides `image_url` and `input_audio`. Raises RequestError, which names the part: messages.0.content.1.
    """
    plain: list[dict[str, Any]] = []
    media: list[Media] = []
    for index, message in enumerate(messages):
        content, field = message.get("content"), f"messages.{index}.content"
        if reader is not None and isinstance(content, str):
            reader.check_text(content, field)
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [
                _part(part, f"{field}.{place}", reader, media, is_callers_own=is_callers_own)
                for place, part in enumerate(content)
            ]
            plain.append({**message, "content": parts})
        else:
            plain.append(dict(message))
    return plain, media


def read_prompt(
    prompt: Mapping[str, Any], token_ids: Callable[[Any], list[int]], reader: MediaReader | None
) -> MediaPrompt:
    """A prompt of the caller's own: {"prompt": ..., "images": [...], "audio": [...]}.

    token_ids: reads text or ids. reader: None for a model that takes text only. Raises RequestError.
    """
    if not isinstance(text := prompt.get("prompt"), str | Sequence):
        raise RequestError('a prompt must be text, token ids, or {"prompt": either, "images": [...], "audio": [...]}')
    if wrong := {str(key) for key in prompt} - {"prompt", "images", "audio"}:
        raise RequestError(f"prompt must have no key besides prompt, images and audio, but has {shown(min(wrong))}")
    media: list[Media] = []
    for name in ("images", "audio"):
        items = prompt.get(name, ())
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise RequestError(f"{name} must be a list, not {type(items).__name__}")
        for index, item in enumerate(items):
            if reader is None:
                raise RequestError(f"{name} must be empty: this model takes text only")
            field = f"{name}.{index}"
            media.append(reader.image(item, field) if name == "images" else reader.audio(item, field))
            _check_total(media, field, reader)
    found = token_ids(text)
    return MediaPrompt(found) if reader is None else reader.prompt(found, media)


def _part(part: Any, field: str, reader: MediaReader | None, media: list[Media], *, is_callers_own: bool) -> Any:
    """What the template sees of a part; what it shows is added to `media`."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    if kind == "text":
        text = part.get("text") if isinstance(part, Mapping) else None
        if reader is not None and isinstance(text, str):
            reader.check_text(text, field)
        return part
    known: dict[str, Callable[[Part, str, MediaReader], Media]] = {"image_url": _image_url, "input_audio": _input_audio}
    if is_callers_own:
        known |= {"image": _image, "audio": _audio}
    if not isinstance(kind, str) or kind not in known:
        raise RequestError(f"{field}.type must be one of text, {', '.join(known)}, not {shown(kind)}")
    if reader is None:
        raise RequestError(f"{field}.type must be text, not {kind}: this model takes text only")
    media.append(known[kind](part, field, reader))
    _check_total(media, field, reader)
    return {"type": media[-1].kind.value}


def _check_total(media: Sequence[Media], field: str, reader: MediaReader) -> None:
    """Before more is read, which could never be run."""
    num_tokens = sum(one.num_tokens for one in media)
    if (limit := reader.limits.max_tokens) is not None and num_tokens > limit:
        raise RequestError(f"{field} brings what is shown to {num_tokens} tokens; max_model_len={limit} is too few")


def _image_url(part: Part, field: str, reader: MediaReader) -> Media:
    value = part.get("image_url")
    if not isinstance(value, Mapping) or not isinstance(value.get("url"), str):
        raise RequestError(f'{field}.image_url must be {{"url": ...}}')
    if (detail := value.get("detail", "auto")) != "auto":
        raise RequestError(f"{field}.image_url.detail must be auto, not {shown(detail)}: the model knows one size only")
    return reader.image_url(value["url"], f"{field}.image_url.url")


def _input_audio(part: Part, field: str, reader: MediaReader) -> Media:
    value = part.get("input_audio")
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
        raise RequestError(f'{field}.input_audio must be {{"data": ..., "format": ...}}')
    if (audio_format := value.get("format")) not in AUDIO_FORMATS:
        allowed = ", ".join(AUDIO_FORMATS)
        raise RequestError(f"{field}.input_audio.format must be one of {allowed}, not {shown(audio_format)}")
    return reader.input_audio(value["data"], audio_format, f"{field}.input_audio.data")


def _image(part: Part, field: str, reader: MediaReader) -> Media:
    return reader.image(part.get("image"), f"{field}.image")  # type: ignore[arg-type]


def _audio(part: Part, field: str, reader: MediaReader) -> Media:
    return reader.audio(part.get("audio"), f"{field}.audio")  # type: ignore[arg-type]
