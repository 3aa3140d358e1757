"""Images and sound as transformers' processor prepares them, and the placeholders that they take up in a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoProcessor

from foredraft.errors import ModelLoadError, RequestError, described
from foredraft.media import Media, MediaKind, MediaPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
PACKAGES = ("PIL", "soundfile", "soxr", "torchvision")
"""What the extra `media` installs, by the names that are imported."""


class MediaProcessor:
    """A checkpoint's processor: each image and each piece of sound goes through it alone.

    processor: transformers'; None: there is none for the reason in `obstacle`, and nothing can be shown to the model.
    placeholders: the model's, by kind. One thread at a time may call it.
    """

    def __init__(self, processor: Any, placeholders: Mapping[MediaKind, int], obstacle: str = "") -> None:
        self._processor = processor
        self._obstacle = obstacle
        self.placeholders = dict(placeholders)
        self.placeholder_texts: dict[MediaKind, str] = {}
        if processor is not None:
            tokens = processor.tokenizer.convert_ids_to_tokens(list(self.placeholders.values()))
            self.placeholder_texts = dict(zip(self.placeholders, tokens))

    @property
    def chat_template(self) -> str | None:
        """The processor's own, if it has one."""
        return getattr(self._processor, "chat_template", None)

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sound that it takes."""
        self.check(MediaKind.AUDIO)
        return int(self._processor.feature_extractor.sampling_rate)

    def check(self, kind: MediaKind) -> None:
        """Raise RequestError, as `image` does, if the model cannot be shown this kind."""
        if kind not in self.placeholders:
            raise RequestError(f"cannot be shown to the model: it takes no {kind.value}")
        if self._processor is None:
            raise RequestError(f"cannot be shown to the model: {self._obstacle}")

    def image(self, image: Image) -> Media:
        """An image in mode RGB. Raises RequestError, whose message goes on after the name of a field."""
        return self._prepare(MediaKind.IMAGE, images=[image])

    def audio(self, samples: NDArray[np.float32], rate: int) -> Media:
        """Sound, samples [N] of one channel at `sampling_rate`. Raises RequestError as `image` does."""
        return self._prepare(MediaKind.AUDIO, audio=[samples], sampling_rate=rate)

    def prompt(self, token_ids: Sequence[int], media: Sequence[Media], field: str = "prompt") -> MediaPrompt:
        """A prompt that has one placeholder for each of `media`, as chat templates write it, with as many as they take.

        Each kind by itself is in the order of its placeholders; the result has all of them in that order. Raises
        RequestError, which begins with `field`, if there are more or fewer placeholders than media.
        """
        kinds = {token_id: kind for kind, token_id in self.placeholders.items()}
        waiting = {kind: [one for one in media if one.kind is kind] for kind in MediaKind}
        for kind, items in waiting.items():
            num_places = list(token_ids).count(self.placeholders[kind]) if kind in self.placeholders else 0
            if num_places != len(items):
                name = self.placeholder_texts.get(kind, "")
                rule = f"must have as many placeholders {name!r} of {kind.value} as are shown"
                raise RequestError(f"{field} {rule}: there are {num_places}, and {len(items)} shown")
        expanded: list[int] = []
        ordered: list[Media] = []
        for token_id in token_ids:
            if (place := kinds.get(token_id)) is None:
                expanded.append(token_id)
            else:
                ordered.append(waiting[place].pop(0))
                expanded += [token_id] * ordered[-1].num_tokens
        return MediaPrompt(expanded, tuple(ordered))

    def _prepare(self, kind: MediaKind, **inputs: Any) -> Media:
        self.check(kind)
        processor = self._processor
        try:
            found = processor(text=[self.placeholder_texts[kind]], return_tensors="pt", **inputs)
            num_tokens = int((found["input_ids"] == self.placeholders[kind]).sum())
            texts = {*processor.tokenizer.model_input_names, "mm_token_type_ids"}
            return Media(kind, _without_padding({n: t for n, t in found.items() if n not in texts}), num_tokens)
        except Exception as error:  # every processor's own
            raise RequestError(f"cannot be prepared by the model's processor: {described(error)}") from error


def _without_padding(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """features: of one item [1, T, ...]; what has a mask [1, T] beside it is cut down to what the mask keeps."""
    kept: dict[str, Tensor] = {}
    for name, tensor in features.items():
        mask = features.get(f"{name}_mask")
        if not name.endswith("_mask"):
            kept[name] = tensor if mask is None else tensor[mask.bool()].unsqueeze(0)
    return kept


def load_media_processor(path: Path, placeholders: Mapping[MediaKind, int]) -> MediaProcessor | None:
    """The processor of a checkpoint; None for a model without placeholders, which takes text only. ModelLoadError."""
    if not placeholders:
        return None
    if not any((path / name).is_file() for name in PROCESSOR_FILES):
        return MediaProcessor(None, placeholders, f"the checkpoint has no {PROCESSOR_FILES[0]}")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        advice = "pip install 'foredraft[media]' brings what is missing"
        return MediaProcessor(None, placeholders, f"{', '.join(missing)} cannot be imported; {advice}")
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)  # type: ignore[no-untyped-call]
        loaded = MediaProcessor(processor, placeholders)
        writes = {kind: getattr(processor, f"{kind.value}_token_id", None) for kind in placeholders}
    except Exception as error:  # as with tokenizers
        raise ModelLoadError(f"{path}: transformers cannot load its processor: {described(error)}") from error
    for kind, token_id in placeholders.items():
        if writes[kind] != token_id:
            rule = f"token {token_id} is the placeholder of {kind.value} in config.json"
            raise ModelLoadError(f"{path}: {rule}, and {writes[kind]} that of the processor")
    return loaded
