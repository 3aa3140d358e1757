"""Reading images and sound: what is accepted is what it says, and whatever is not is refused by name."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media.checkpoint import AUDIO_ID, IMAGE, IMAGE_ID, RATE, picture, save_processor, sound
from media.files import data_url, image_bytes, sound_bytes
from PIL import Image

from foredraft.engine.media_files import START_OF_SCAN, decode_image
from foredraft.engine.media_limits import MediaLimits
from foredraft.engine.media_parts import take_media
from foredraft.engine.media_reader import MediaReader
from foredraft.errors import RequestError
from foredraft.media import MediaKind
from foredraft.models.media_processor import MediaProcessor, load_media_processor

SMALL = MediaLimits(max_bytes=4_000, max_pixels=400, max_side=64, max_seconds=0.5, max_cached_bytes=4_000)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    path = tmp_path_factory.mktemp("reader")
    save_processor(path)
    found = load_media_processor(path, {MediaKind.IMAGE: IMAGE_ID, MediaKind.AUDIO: AUDIO_ID})
    assert found is not None
    return found


@pytest.fixture
def reader(processor: MediaProcessor) -> MediaReader:
    return MediaReader(processor)


# -- images ----------------------------------------------------------------------------------------------------------


def pixels(reader: MediaReader, image: Image.Image) -> torch.Tensor:
    """What the model sees of an image that is in mode RGB already."""
    return reader.image(image, "image").features["pixel_values"]


@pytest.mark.parametrize("image_format", ["png", "webp", "bmp", "tiff"])
def test_formats_without_loss_give_the_pixels(reader: MediaReader, image_format: str) -> None:
    options = {"lossless": True} if image_format == "webp" else {}
    content = image_bytes(picture(), image_format, **options)
    found = reader.image_url(data_url(f"image/{image_format}", content), "url")
    assert torch.equal(found.features["pixel_values"], pixels(reader, picture()))
    assert found.num_tokens == 2 * 3
    assert found.first_id == reader.image(picture(), "image").first_id


def test_formats_with_loss_are_read_too(reader: MediaReader) -> None:
    for image_format in ("jpeg", "gif"):
        found = reader.image_url(data_url(f"image/{image_format}", image_bytes(picture(), image_format)), "url")
        assert found.num_tokens == 6


def test_an_animation_shows_its_first_frame(reader: MediaReader) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    content = image_bytes(frames[0], "gif", save_all=True, append_images=frames[1:])
    assert torch.equal(reader.image(content, "image").features["pixel_values"], pixels(reader, frames[0]))


def test_an_image_is_turned_as_its_camera_was(reader: MediaReader) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    content = image_bytes(picture(9, 6), "png", exif=exif)
    turned = picture(9, 6).transpose(Image.Transpose.ROTATE_270)
    assert torch.equal(reader.image(content, "image").features["pixel_values"], pixels(reader, turned))


def test_what_is_transparent_is_white(reader: MediaReader) -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.paste((10, 20, 30, 255), (0, 0, 2, 4))
    wanted = Image.new("RGB", (4, 4), "white")
    wanted.paste((10, 20, 30), (0, 0, 2, 4))
    palette = image.quantize(8)
    grey = Image.new("LA", (4, 4), (7, 0))
    for shown, right in ((image, wanted), (palette, wanted), (grey, Image.new("RGB", (4, 4), "white"))):
        content = image_bytes(shown, "png")
        assert torch.equal(reader.image(content, "image").features["pixel_values"], pixels(reader, right))


def test_other_modes_become_rgb(reader: MediaReader) -> None:
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    shallow = Image.fromarray((np.arange(64) * 1000 // 256).astype(np.uint8).reshape(8, 8)).convert("RGB")
    assert deep.mode == "I;16"
    assert torch.equal(reader.image(image_bytes(deep, "png"), "i").features["pixel_values"], pixels(reader, shallow))
    for mode in ("1", "L", "P", "CMYK"):
        image = picture().convert(mode)
        content = image_bytes(image, "tiff")
        assert torch.equal(reader.image(content, "i").features["pixel_values"], pixels(reader, image.convert("RGB")))
    for mode in ("F", "I"):
        with pytest.raises(RequestError, match=r"^image must have 8 or 16 bits a channel, not 32"):
            reader.image(image_bytes(Image.new(mode, (4, 4)), "tiff"), "image")


def test_images_that_are_refused(reader: MediaReader, processor: MediaProcessor) -> None:
    png = image_bytes(picture(40, 40), "png")
    small = MediaReader(processor, limits=SMALL)
    cases: list[tuple[MediaReader, bytes, str]] = [
        (reader, b"", "must be an image in one of the formats PNG, JPEG"),
        (reader, b"not an image at all", "must be an image in one of the formats"),
        (reader, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "must be an image in one of the formats"),
        (reader, png[: len(png) // 2], "cannot be decoded: OSError"),
        (reader, png[:40], "cannot be decoded|must be an image"),
        (reader, image_bytes(picture(40, 40), "jpeg")[:700], "cannot be decoded: OSError"),
        (
            small,
            image_bytes(Image.new("RGB", (65, 1)), "png"),
            "must have 64 pixels a side and 400 in all at most, not 65",
        ),
        (small, image_bytes(Image.new("RGB", (21, 20)), "png"), "must have 64 pixels a side .* not 21 x 20"),
        (small, image_bytes(picture(40, 40), "bmp"), "must have 4000 bytes at most"),
        (
            reader,
            image_bytes(Image.new("1", (8_000, 8_000)), "png"),
            "must have 8192 pixels a side and 16777216 in all",
        ),
        (reader, image_bytes(Image.new("1", (30_000, 30_000)), "png"), "must have|cannot be decoded"),
    ]
    for one, content, message in cases:
        with pytest.raises(RequestError, match=rf"^messages\.0 ({message})"):
            one.image_url(data_url("image/png", content), "messages.0")
    with pytest.raises(RequestError, match=r"^image must be an image of Pillow's, or a file, not int"):
        reader.image(3, "image")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^image must have 64 pixels a side"):
        small.image(Image.new("RGB", (100, 1)), "image")
    assert reader.image(picture(), "image").num_tokens == 6


# -- sound -----------------------------------------------------------------------------------------------------------


def bins(reader: MediaReader, samples: Any) -> torch.Tensor:
    return reader.audio((samples, RATE), "audio").features["audio_input_ids"]


@pytest.mark.parametrize("audio_format", ["wav", "flac", "ogg", "mp3"])
def test_formats_of_sound(reader: MediaReader, audio_format: str) -> None:
    content = sound_bytes(sound(0.3), RATE, audio_format)
    found = reader.input_audio(base64.b64encode(content).decode(), audio_format, "data")
    assert abs(found.num_tokens - 6) <= 3  # mp3 adds silence at both ends
    if audio_format == "wav":
        assert torch.equal(found.features["audio_input_ids"], bins(reader, sound(0.3)))
    again = reader.input_audio(data_url("audio/x", content), audio_format, "data")
    assert again is found
    assert reader.audio(content, "audio").row_ids == found.row_ids


def test_channels_become_their_mean(reader: MediaReader) -> None:
    both = np.stack([sound(seed=1), sound(seed=2)], axis=1)
    mean = both.mean(axis=1, dtype=np.float32)
    assert torch.equal(bins(reader, both), bins(reader, mean))
    found = reader.audio(sound_bytes(both, RATE, "wav"), "audio")
    assert torch.equal(found.features["audio_input_ids"], bins(reader, mean))


def test_other_rates_are_resampled(reader: MediaReader) -> None:
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100)).astype(np.float32)
    wanted = (0.3 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
    found = reader.audio((tone, 44_100), "audio")
    assert found.num_tokens == 20
    assert (found.features["audio_input_ids"] - bins(reader, wanted)).abs().float().mean() < 0.3
    assert found.row_ids == reader.audio(sound_bytes(tone, 44_100, "wav"), "audio").row_ids


def test_sound_that_is_refused(reader: MediaReader, processor: MediaProcessor) -> None:
    wav = sound_bytes(sound(), RATE, "wav")
    small = MediaReader(processor, limits=MediaLimits(max_seconds=0.1))
    cases: list[tuple[MediaReader, bytes, str, str]] = [
        (reader, b"", "wav", r"must be sound in one of the formats wav, mp3, flac, ogg"),
        (reader, b"nothing", "wav", "must be sound in one of the formats"),
        (reader, wav, "flac", "must be flac, as its format says, not wav"),
        (reader, wav[:20], "wav", "cannot be decoded: (?!.*0x)"),
        (reader, b"fLaC" + bytes(100), "flac", "cannot be decoded: (?!.*0x)"),
        (reader, b"\xff\xfb" + bytes(100), "mp3", "cannot be decoded|must not be empty"),
        (reader, sound_bytes(sound(0.0), RATE, "wav"), "wav", "must not be empty"),
        (reader, sound_bytes(np.array([0.1, np.nan], np.float32), RATE, "wav"), "wav", "must have finite samples"),
        (reader, sound_bytes(sound(rate=500), 500, "wav"), "wav", "must have 1000 to 384000 samples a second"),
        (reader, sound_bytes(np.zeros((9, 17), np.float32), RATE, "wav"), "wav", "must have 1000 to .* 16 channels"),
        (small, wav, "wav", "must last 0.1 s at most"),
    ]
    for one, content, stated, message in cases:
        with pytest.raises(RequestError, match=rf"^data ({message})"):
            one.input_audio(base64.b64encode(content).decode(), stated, "data")
    wrong: list[tuple[Any, str]] = [
        (3, r"must be \(samples, rate\), or a file"),
        ((sound(), 3.5), "must have a rate from 1000"),
        ((sound(), True), "must have a rate from 1000"),
        ((np.zeros(4, np.int16), RATE), "must have floating-point samples"),
        ((np.zeros((1, 2, 3), np.float32), RATE), "must have floating-point samples"),
        ((sound()[:0], RATE), "must not be empty"),
        (([[0.5], [0.5, 0.5]], RATE), "must have samples that are an array"),
        ((torch.zeros(4, requires_grad=True), RATE), "must have samples that are an array"),
        ((np.full(9, np.inf, np.float32), RATE), "must have finite samples"),
    ]
    for audio, message in wrong:
        with pytest.raises(RequestError, match=rf"^audio {message}"):
            reader.audio(audio, "audio")
    with pytest.raises(RequestError, match=r"^audio must last 0.1 s at most, not 0.2"):
        small.audio((sound(), RATE), "audio")
    assert reader.audio(wav, "audio").num_tokens == 4
    assert reader.audio((sound().tolist(), RATE), "audio").row_ids == reader.audio(wav, "audio").row_ids


# -- where bytes come from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must be a URL that begins with data:"),
        ("picture.png", "must be a URL that begins with data:"),
        ("ftp://example.com/a.png", "must be a URL that begins with"),
        ("data:image/png,abc", "must be a data URL in base64"),
        ("data:image/png;base64", "must be a data URL in base64"),
        ("data:audio/wav;base64,AAAA", "must be of a type image/..., not 'audio/wav'"),
        ("data:text/html;base64,AAAA", "must be of a type image/"),
        ("data:image/png;base64,A", "must be base64: Error"),
        ("data:image/png;base64,A A=", "must be base64"),
        ("data:image/png;base64,\xe4", "must be base64"),
        ("data:image/png;base64,\ud800", "must be base64"),
        ("file:///etc/passwd", r"must not be a file:// URL: no directory is allowed \(allowed_local_media_path\)"),
        ("http://127.0.0.1/a.png", r"must not be at '127.0.0.1': of other hosts none may be asked"),
        ("HTTPS://example.com/a.png", "must not be at 'example.com'"),
        ("http://", "must not be at ''"),
        ("http://[::1/a", "cannot be fetched|must not be"),
        ("http://a:b/c", "cannot be fetched|must not be"),
    ],
)
def test_urls_that_are_refused(reader: MediaReader, url: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^url ({message})"):
        reader.image_url(url, "url")


def test_files_are_read_from_the_allowed_directory_alone(tmp_path: Path, processor: MediaProcessor) -> None:
    allowed, outside = tmp_path / "all owed", tmp_path / "outside"
    for directory in (allowed, outside):
        directory.mkdir()
        (directory / "a.png").write_bytes(image_bytes(picture(), "png"))
    (allowed / "link.png").symlink_to(allowed / "a.png")
    (allowed / "out.png").symlink_to(outside / "a.png")
    (allowed / "directory").symlink_to(outside)
    (allowed / "circle").symlink_to(allowed / "circle")
    (tmp_path / "all owed twin").mkdir()
    os.mkfifo(allowed / "pipe")
    reader = MediaReader(processor, allowed_local_path=allowed)
    root = (tmp_path / "all owed").as_uri()
    wanted = reader.image(picture(), "image").row_ids
    for url in (f"{root}/a.png", f"{root}/link.png", f"{root}/../all%20owed/a.png"):
        assert reader.image_url(url, "url").row_ids == wanted
    inside = "must be inside the directory that allowed_local_media_path names"
    cases = [
        (f"{root}/out.png", inside),
        (f"{root}/directory/a.png", inside),
        (f"{root}/../outside/a.png", inside),
        (f"{root}%20twin/a.png", inside),
        (f"{root}/../outside/nothing.png", inside),
        ("file:///etc/passwd", inside),
        (f"{root}/circle", "must be like file:///|cannot be read"),
        (f"{root}/a%00.png", "must be like file:///"),
        (f"{root}/a%ff.png", "must be like file:///"),
        ("file:a.png", "must be like file:///"),
        ("file://host/a.png", "must be like file:///"),
        (f"{root}/nothing.png", "cannot be read: No such file or directory$"),
        (f"{root}/pipe", "must be a file"),
        (root, "must be a file|cannot be read"),
    ]
    for url, message in cases:
        with pytest.raises(RequestError, match=f"^url ({message})") as caught:
            reader.image_url(url, "url")
        assert str(tmp_path) not in str(caught.value)


def test_paths_are_the_callers_own(tmp_path: Path, reader: MediaReader) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes(picture(), "png"))
    (tmp_path / "a.wav").write_bytes(sound_bytes(sound(), RATE, "wav"))
    assert reader.image(tmp_path / "a.png", "image").row_ids == reader.image(picture(), "image").row_ids
    assert reader.audio(str(tmp_path / "a.wav"), "audio").num_tokens == 4
    with pytest.raises(RequestError, match=r"^image cannot be read: No such file"):
        reader.image(tmp_path / "nothing", "image")
    with pytest.raises(RequestError, match=r"^image cannot be read: its name is not one of a file"):
        reader.image("a\0b", "image")


def test_what_was_read_is_not_prepared_again(processor: MediaProcessor) -> None:
    one_image = 2_048 + 6 * 4 * 4 * 3 * 2 * 4
    reader = MediaReader(processor, limits=MediaLimits(max_cached_bytes=2 * one_image))
    contents = [image_bytes(picture(seed=seed), "png") for seed in range(3)]
    first, second, third = contents
    assert reader.image(first, "i") is reader.image(first, "i")
    reader.image(second, "i")
    reader.image(first, "i")
    assert reader.num_prepared == 2
    reader.image(third, "i")  # `second` has to go
    reader.image(first, "i")
    assert reader.num_prepared == 3
    reader.image(second, "i")
    assert reader.num_prepared == 4
    nothing = MediaReader(processor, limits=MediaLimits(max_cached_bytes=0))
    assert nothing.image(first, "i").row_ids == nothing.image(first, "i").row_ids
    assert nothing.num_prepared == 2


# -- parts of messages -----------------------------------------------------------------------------------------------


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image_part(content: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url("image/png", content), **options}}


def test_parts_become_what_templates_expect(reader: MediaReader) -> None:
    png, wav = image_bytes(picture(), "png"), sound_bytes(sound(), RATE, "wav")
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    text = {"type": "text", "text": "What is it?"}
    messages = [{"role": "system", "content": "Be brief."}, *user(image_part(png, detail="auto"), text, audio)]
    plain, media = take_media(messages, reader)
    assert plain[0] == messages[0]
    assert plain[1] == {"role": "user", "content": [{"type": "image"}, text, {"type": "audio"}]}
    assert [one.num_tokens for one in media] == [6, 4]
    own = [{"type": "image", "image": picture()}, {"type": "audio", "audio": (sound(), RATE)}]
    assert [one.num_tokens for one in take_media(user(*own), reader, is_callers_own=True)[1]] == [6, 4]


CASES: list[tuple[Any, str]] = [
    ({"type": "image"}, r"\.type must be one of text, image_url, input_audio, not 'image'"),
    ({"type": []}, r"\.type must be one of text"),
    ({"type": "image_url"}, r"\.image_url must be"),
    ({"type": "image_url", "image_url": {"url": 3}}, r"\.image_url must be"),
    ({"type": "image_url", "image_url": {"url": "x"}}, r"\.image_url\.url must be a URL"),
    ({"type": "image_url", "image_url": {"url": "x", "detail": "high"}}, r"\.image_url\.detail must be auto"),
    ({"type": "input_audio", "input_audio": "x"}, r"\.input_audio must be"),
    (
        {"type": "input_audio", "input_audio": {"data": "", "format": "pcm"}},
        r"\.input_audio\.format must be one of wav",
    ),
    ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, r"\.input_audio\.data must be base64"),
    ({"type": "text", "text": f"an {IMAGE}"}, r" must not have '<\|image\|>' in its text: it stands for image"),
]


@pytest.mark.parametrize(("part", "message"), CASES)
def test_a_bad_part_is_named(reader: MediaReader, part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^messages\.0\.content\.1{message}"):
        take_media(user({"type": "text", "text": "a"}, part), reader)


def test_other_refusals(reader: MediaReader, processor: MediaProcessor) -> None:
    png = image_bytes(picture(), "png")
    with pytest.raises(RequestError, match=r"^messages\.0\.content\.0\.type must be text, not image_url: this model"):
        take_media(user(image_part(png)), None)
    with pytest.raises(RequestError, match=r"^messages\.0\.content must not have '<\|image\|>'"):
        take_media([{"role": "user", "content": IMAGE}], reader)
    few = MediaReader(processor, limits=MediaLimits(max_tokens=11))
    with pytest.raises(
        RequestError, match=r"^messages\.0\.content\.1 brings what is shown to 12 tokens; max_model_len"
    ):
        take_media(user(image_part(png), image_part(png)), few)
    assert len(take_media(user(image_part(png)), few)[1]) == 1


def test_random_bytes_are_refused_by_name(reader: MediaReader) -> None:
    """Files that begin right and go wrong anywhere: never anything but a RequestError."""
    generator = np.random.default_rng(0)
    messages: list[str] = []
    kinds: list[tuple[bytes, Callable[[bytes, str], Any]]] = [
        (image_bytes(picture(), image_format), reader.image) for image_format in ("png", "jpeg", "webp", "gif", "tiff")
    ]
    kinds += [(sound_bytes(sound(0.05), RATE, name), reader.audio) for name in ("wav", "flac", "ogg", "mp3")]
    for content, read in kinds:
        for _ in range(30):
            damaged = bytearray(content)
            for place in generator.integers(0, len(content), 3):
                damaged[place] = generator.integers(256)
            try:
                read(bytes(damaged[: generator.integers(1, len(content) + 1)]), "field")
            except RequestError as error:
                messages.append(str(error))
    assert len(messages) > 100
    assert all(message.startswith("field ") for message in messages)


def test_bytes_of_a_buffer(reader: MediaReader) -> None:
    with BytesIO(image_bytes(picture(), "png")) as file, Image.open(file) as opened:
        assert reader.image(opened, "image").num_tokens == 6


def test_passes_over_a_picture_are_bounded() -> None:
    """A progressive file may say the same pixels over and over, each time for a few bytes."""
    content = image_bytes(picture(64, 64), "JPEG", progressive=True)
    scan = content[content.rindex(START_OF_SCAN) : -2]
    assert decode_image(content[:-2] + 50 * scan + content[-2:], MediaLimits()).size == (64, 64)
    with pytest.raises(RequestError, match="must have 100 scans at most"):
        decode_image(content[:-2] + 100 * scan + content[-2:], MediaLimits())
