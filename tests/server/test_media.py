"""Images and sound over HTTP: what is shown reaches the model; what is wrong with it is a 400 that names the part."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from media.checkpoint import AUDIO, AUDIO_ID, IMAGE, IMAGE_ID, RATE, picture, sound, tiny_multimodal
from media.files import data_url, image_bytes, sound_bytes
from openai import OpenAI
from PIL import Image

from foredraft import LLM, SamplingParams

CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "What is it?"}


def image_part(content: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url("image/png", content), **options}}


def audio_part(content: bytes, audio_format: str = "wav") -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": audio_format}}


PNG = image_bytes(picture(), "png")
OTHER = image_bytes(picture(seed=1), "png")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "a.png").write_bytes(PNG)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_multimodal(tmp_path_factory.mktemp("media") / "model", num_modules=2)


def load(path: Path) -> LLM:
    return LLM(path, device="cpu", dtype="float32", block_size=4, num_blocks=256)


@pytest.fixture(scope="module")
def live(checkpoint: Path, files: Path) -> Iterator[LiveServer]:
    options: dict[str, Any] = {"max_media_mib": 1, "max_image_pixels": 4_000, "max_audio_seconds": 2}
    with live_server(lambda: load(checkpoint), allowed_local_media_path=files, **options) as live:
        yield live
        live.wait_until_idle()
        assert live.server.failure is None


@pytest.fixture(scope="module")
def wav() -> bytes:
    return sound_bytes(sound(), RATE, "wav")


def ask(live: LiveServer, *parts: Any, **options: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    return live.post(CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, **options})


def test_what_is_shown_reaches_the_model(live: LiveServer, checkpoint: Path, wav: bytes) -> None:
    parts: list[Any] = [TEXT, image_part(PNG), audio_part(wav), image_part(OTHER)]
    answer = ask(live, *parts, return_token_ids=True).json()
    with load(checkpoint) as llm:
        (right,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=8))
    assert answer["choices"][0]["token_ids"] == list(right.token_ids)
    assert answer["prompt_token_ids"] == list(right.prompt_token_ids)
    assert answer["prompt_token_ids"].count(IMAGE_ID) == 12
    assert answer["prompt_token_ids"].count(AUDIO_ID) == 4
    assert answer["usage"]["prompt_tokens"] == len(right.prompt_token_ids)
    swapped = [parts[3] if part is parts[1] else parts[1] if part is parts[3] else part for part in parts]
    assert ask(live, *swapped, return_token_ids=True).json()["choices"][0]["token_ids"] != list(right.token_ids)


def test_the_openai_client_shows_images(live: LiveServer, wav: bytes) -> None:
    client = OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    content: Any = [image_part(PNG, detail="auto"), audio_part(wav), TEXT]
    messages: Any = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    whole = client.chat.completions.create(model="model", messages=messages, max_tokens=8, temperature=0)
    assert whole.usage is not None
    stream = client.chat.completions.create(model="model", messages=messages, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    bad: Any = [{"role": "user", "content": [image_part(b"no image")]}]
    with pytest.raises(openai.BadRequestError, match="must be an image in one of the formats") as caught:
        client.chat.completions.create(model="model", messages=bad)
    assert caught.value.param == "messages.0.content.0.image_url.url"


def test_tokens_are_counted(live: LiveServer, wav: bytes) -> None:
    messages = [{"role": "user", "content": [image_part(PNG), TEXT, audio_part(wav)]}]
    counted = live.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()
    answer = live.post(CHAT, {"messages": messages, "max_tokens": 1, "return_token_ids": True}).json()
    assert counted["tokens"] == answer["prompt_token_ids"]
    assert counted["count"] == answer["usage"]["prompt_tokens"]
    assert counted["token_strs"].count(IMAGE) == 6
    assert counted["token_strs"].count(AUDIO) == 4


def test_a_conversation_that_goes_on_finds_its_rows(live: LiveServer) -> None:
    unlike = image_part(image_bytes(picture(20, 20, seed=9), "png"))
    prepared = live.server.service.reader.media
    assert prepared is not None
    first = ask(live, unlike, TEXT).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_prepared = prepared.num_prepared
    text = first["choices"][0]["message"]["content"].replace(IMAGE, "").replace(AUDIO, "")
    messages = [
        {"role": "user", "content": [unlike, TEXT]},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And now?"},
    ]
    second = live.post(CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 30
    assert prepared.num_prepared == num_prepared


def test_bad_media_are_refused_and_the_next_request_is_served(live: LiveServer, files: Path, wav: bytes) -> None:
    url = "messages.0.content.1.image_url.url"
    bomb = image_bytes(Image.new("1", (30_000, 30_000)), "png")
    cases: list[tuple[Any, str, str]] = [
        (image_part(b""), url, "must be an image in one of the formats"),
        (image_part(PNG[:60]), url, "cannot be decoded or else must be an image"),
        (image_part(bomb), url, "must have or else cannot be decoded"),
        (image_part(image_bytes(picture(80, 80), "png")), url, "must have 8192 pixels a side and 4000 in all at most"),
        (image_part(bytes(1 << 21)), url, "must have 1048576 bytes at most"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, url, "must not be at 'example.com'"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, url, "must be inside the directory"),
        ({"type": "image_url", "image_url": {"url": f"{files.as_uri()}/b.png"}}, url, "cannot be read: No such file"),
        (image_part(PNG, detail="high"), "messages.0.content.1.image_url.detail", "must be 'auto'"),
        ({"type": "image_url", "image_url": "x"}, "messages.0.content.1.image_url", "must be an object"),
        ({"type": "video_url"}, "messages.0.content.1.type", "must be text, image_url or input_audio, not 'video_url'"),
        ({"type": "image", "image": "a.png"}, "messages.0.content.1.type", "must be text, image_url or input_audio"),
        (audio_part(b"RIFF"), "messages.0.content.1.input_audio.data", "must be sound in one of the formats"),
        (audio_part(wav, "flac"), "messages.0.content.1.input_audio.data", "must be flac, as its format says, not wav"),
        (audio_part(wav, "aac"), "messages.0.content.1.input_audio.format", "must be 'wav', 'mp3', 'flac' or 'ogg'"),
        (
            audio_part(sound_bytes(sound(2.1), RATE, "wav")),
            "messages.0.content.1.input_audio.data",
            "must last 2 s at most",
        ),
        ({"type": "text", "text": f"an {IMAGE}"}, "messages.0.content.1", "must not have '<|image|>' in its text"),
    ]
    for part, param, message in cases:
        answer = ask(live, TEXT, part)
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(param)
        assert any(each in error["message"] for each in message.split(" or else "))
        assert ask(live, TEXT, image_part(PNG), max_tokens=1).status_code == 200


def test_what_else_is_refused(live: LiveServer) -> None:
    """In other roles, as text, as token ids, through variables of the template, and more than fits."""
    system = [{"role": "system", "content": [image_part(PNG)]}]
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (CHAT, {"messages": system}, "messages.0.content.0.type", "must be text in a message of role system"),
        (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content", "it stands for image"),
        ("/tokenize", {"messages": [{"role": "user", "content": AUDIO}]}, "messages.0.content", "it stands for audio"),
        ("/v1/completions", {"prompt": f"see {IMAGE}"}, "prompt", "must not have '<|image|>' in its text"),
        ("/v1/completions", {"prompt": [1, IMAGE_ID, 2]}, "prompt", "the prompt has 1 placeholders of image"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"suffix": IMAGE}},
            "messages",
            "must have as many placeholders '<|image|>' of image as are shown: there are 1, and 0 shown",
        ),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [image_part(image_bytes(picture(63, 63, seed=s), "png")) for s in (1, 2)],
                    }
                ]
            },
            "messages.0.content.1",
            "max_model_len=256 is too few",
        ),
    ]
    for path, body, param, message in cases:
        answer = live.post(path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert message in answer.json()["error"]["message"]


def test_bad_media_disturb_nobody(live: LiveServer, wav: bytes) -> None:
    """Many at once, each third of them damaged."""
    right = ask(live, image_part(PNG), audio_part(wav), TEXT).json()["choices"][0]["message"]["content"]
    cut = [image_part(PNG[:place]) for place in range(10, len(PNG), len(PNG) // 4)]
    bodies = [
        [cut[index % 4], TEXT] if index % 3 == 0 else [image_part(PNG), audio_part(wav), TEXT] for index in range(15)
    ]
    with ThreadPoolExecutor(15) as pool:
        answers = list(pool.map(lambda parts: ask(live, *parts), bodies))
    for index, answer in enumerate(answers):
        assert answer.status_code == (400 if index % 3 == 0 else 200)
        assert index % 3 == 0 or answer.json()["choices"][0]["message"]["content"] == right
    live.wait_until_idle()


def test_files_are_shown_by_permission(live: LiveServer, files: Path) -> None:
    by_file = ask(live, {"type": "image_url", "image_url": {"url": f"{files.as_uri()}/a.png"}}, TEXT).json()
    by_data = ask(live, image_part(PNG), TEXT).json()
    assert by_file["choices"][0]["message"] == by_data["choices"][0]["message"]


def test_tools_and_media(live: LiveServer) -> None:
    """The template knows no tools: they are told as text beside what is shown."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": [image_part(PNG), TEXT]}]
    counted = live.post("/tokenize", {"messages": messages, "tools": [tool]}).json()
    assert counted["tokens"].count(IMAGE_ID) == 6


def test_a_model_of_text_says_so(tmp_path: Path) -> None:
    with live_server(lambda: LLM(byte_llama(tmp_path / "model"), device="cpu", num_blocks=64)) as live:
        for part in (image_part(PNG), audio_part(b"RIFF")):
            for path in (CHAT, "/tokenize"):
                answer = live.post(path, {"messages": [{"role": "user", "content": [TEXT, part]}]})
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["param"] == "messages.0.content.1.type"
                assert error["message"].endswith(f"must be text, not {part['type']}: this model takes text only")
        assert ask(live, TEXT).status_code == 200


def test_the_document_describes_parts(live: LiveServer) -> None:
    schemas = httpx.get(f"{live.url}/openapi.json").json()["components"]["schemas"]
    assert schemas["ImageUrl"]["required"] == ["url"]
    assert schemas["InputAudio"]["properties"]["format"]["enum"] == ["wav", "mp3", "flac", "ogg"]
