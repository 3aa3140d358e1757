"""Items that go through the processor alone are those that it makes of a whole prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media.checkpoint import AUDIO, AUDIO_ID, IMAGE, IMAGE_ID, RATE, picture, save_processor, sound
from transformers import AutoProcessor

from foredraft.engine.media_reader import MediaReader
from foredraft.errors import ModelLoadError, RequestError
from foredraft.media import Media, MediaKind
from foredraft.models.media_processor import MediaProcessor, load_media_processor

PLACEHOLDERS = {MediaKind.IMAGE: IMAGE_ID, MediaKind.AUDIO: AUDIO_ID}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("processor")
    save_processor(found)
    return found


@pytest.fixture(scope="module")
def processor(path: Path) -> MediaProcessor:
    found = load_media_processor(path, PLACEHOLDERS)
    assert found is not None
    return found


@pytest.mark.parametrize("size", [(1, 1), (4, 4), (9, 6), (5, 33)])
@pytest.mark.parametrize("num_samples", [1, 800, 801, 3_333])
def test_a_prompt_is_the_processors_own(
    path: Path, processor: MediaProcessor, size: tuple[int, int], num_samples: int
) -> None:
    whole: Any = AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
    images = [picture(*size, seed=1), picture(7, 8, seed=2)]
    audio = [sound(num_samples / RATE, seed=3), sound(seed=4)]
    text = f"a {IMAGE} b {AUDIO}{IMAGE} c {AUDIO}!"
    wanted = whole(text=[text], images=images, audio=audio, sampling_rate=RATE, return_tensors="pt")

    media = [*map(processor.image, images), *(processor.audio(samples, RATE) for samples in audio)]
    token_ids = whole.tokenizer(text)["input_ids"]
    found = processor.prompt(token_ids, media)

    assert list(found.token_ids) == wanted["input_ids"][0].tolist()
    assert [one.kind.value for one in found.media] == ["image", "audio", "image", "audio"]
    assert torch.equal(features(found.media, "pixel_values"), wanted["pixel_values"])
    mask = wanted["audio_input_ids_mask"].bool()
    assert torch.equal(features(found.media, "audio_input_ids", flat=True), wanted["audio_input_ids"][mask])
    assert {name for one in found.media for name in one.features} == {"pixel_values", "audio_input_ids"}
    assert sum(one.num_tokens for one in found.media) == sum(map(list(found.token_ids).count, (IMAGE_ID, AUDIO_ID)))


def features(media: Any, name: str, *, flat: bool = False) -> torch.Tensor:
    found = [one.features[name] for one in media if name in one.features]
    return torch.cat([tensor.flatten(0, 1) for tensor in found] if flat else found)


def test_what_is_shown_again_has_the_same_ids(processor: MediaProcessor) -> None:
    assert processor.image(picture(seed=1)).row_ids == processor.image(picture(seed=1)).row_ids
    assert processor.image(picture(seed=1)).first_id != processor.image(picture(seed=2)).first_id


@pytest.mark.parametrize(
    ("token_ids", "num_images", "message"),
    [
        (
            [1, IMAGE_ID, IMAGE_ID],
            1,
            r"^prompt must have as many placeholders '<\|image\|>' of image .* 2, and 1 shown",
        ),
        ([1], 1, r"^prompt must have as many .* 0, and 1 shown"),
        ([AUDIO_ID, IMAGE_ID], 1, r"^prompt must have as many placeholders '<\|audio\|>' of audio .* 1, and 0 shown"),
    ],
)
def test_placeholders_and_media_must_fit(
    processor: MediaProcessor, token_ids: list[int], num_images: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        processor.prompt(token_ids, [processor.image(picture())] * num_images)


def test_what_the_processor_refuses_is_an_error_of_the_request(processor: MediaProcessor) -> None:
    with pytest.raises(RequestError, match="cannot be prepared by the model's processor: ValueError"):
        processor.audio(sound(), RATE + 1)
    with pytest.raises(RequestError, match="cannot be prepared by the model's processor"):
        processor.audio(np.zeros(0, np.float32), RATE)


def test_a_model_may_take_one_kind_alone(path: Path) -> None:
    one = load_media_processor(path, {MediaKind.IMAGE: IMAGE_ID})
    assert one is not None
    shown: Media = one.image(picture())
    assert shown.num_tokens == 6
    with pytest.raises(RequestError, match="it takes no audio"):
        one.audio(sound(), RATE)
    with pytest.raises(RequestError, match="it takes no audio"):
        _ = one.sampling_rate


def test_without_a_processor_nothing_can_be_shown(tmp_path: Path) -> None:
    assert load_media_processor(tmp_path, {}) is None
    none = load_media_processor(tmp_path, PLACEHOLDERS)
    assert none is not None
    with pytest.raises(RequestError, match=r"the checkpoint has no processor_config.json"):
        none.image(picture())


def test_without_the_extra_the_error_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.models.media_processor.PACKAGES", ("PIL", "no_such_package"))
    none = load_media_processor(path, PLACEHOLDERS)
    assert none is not None
    message = r"cannot be shown to the model: no_such_package cannot be imported; pip install 'foredraft\[media\]'"
    with pytest.raises(RequestError, match=message):
        none.image(picture())
    for read in (MediaReader(none).image, MediaReader(none).audio):
        with pytest.raises(RequestError, match=f"^field {message}"):
            read(b"not read", "field")
    with pytest.raises(RequestError, match=f"^field {message}"):
        MediaReader(none).image_url("nothing", "field")


def test_a_processor_must_fit_the_model(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"token 1 is the placeholder of image in config.json, and 71 that of"):
        load_media_processor(path, {MediaKind.IMAGE: 1, MediaKind.AUDIO: AUDIO_ID})
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="transformers cannot load its processor"):
        load_media_processor(tmp_path, PLACEHOLDERS)
