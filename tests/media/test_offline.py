"""LLM and the command line over prompts that show something."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from media.checkpoint import AUDIO, AUDIO_ID, IMAGE, IMAGE_ID, RATE, picture, sound
from media.files import data_url, image_bytes, sound_bytes
from tiny_models import tiny_llama
from transformers import AutoModelForMultimodalLM, AutoProcessor
from typer.testing import CliRunner

from foredraft import LLM, MediaPrompt, RequestError, SamplingParams
from foredraft.cli.app import app
from foredraft.stopping import FinishReason

GREEDY = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", dtype="float32", block_size=4, num_blocks=128) as llm:
        yield llm


def wanted(checkpoint: Path, prompt: str, images: Any = None, audio: Any = None) -> list[int]:
    """What transformers generates, from its own processor on."""
    processor: Any = AutoProcessor.from_pretrained(checkpoint)  # type: ignore[no-untyped-call]
    model: Any = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32)
    inputs = processor(text=[prompt], images=images, audio=audio, sampling_rate=RATE, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def test_it_says_what_transformers_says(checkpoint: Path, llm: LLM) -> None:
    images, audio = [picture(seed=1), picture(5, 4, seed=2)], [sound()]
    text = f"First {IMAGE} then {IMAGE} and {AUDIO}?"
    right = wanted(checkpoint, text, images, audio)
    (output,) = llm.generate({"prompt": text, "images": images, "audio": [(audio[0], RATE)]}, GREEDY)
    assert list(output.token_ids) == right
    assert list(output.prompt_token_ids).count(IMAGE_ID) == 6 + 2
    assert list(output.prompt_token_ids).count(AUDIO_ID) == 4
    (other,) = llm.generate({"prompt": text, "images": images[::-1], "audio": [(audio[0], RATE)]}, GREEDY)
    assert list(other.token_ids) == wanted(checkpoint, text, images[::-1], audio) != right


def test_every_way_to_show_something_is_the_same(llm: LLM, tmp_path: Path) -> None:
    png, wav = image_bytes(picture(), "png"), sound_bytes(sound(), RATE, "wav")
    (tmp_path / "a.png").write_bytes(png)
    (tmp_path / "a.wav").write_bytes(wav)
    images: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url("image/png", png)}},
        {"type": "image", "image": picture()},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image", "image": png},
    ]
    audio: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}},
        {"type": "audio", "audio": (sound(), RATE)},
        {"type": "audio", "audio": tmp_path / "a.wav"},
        {"type": "audio", "audio": str(tmp_path / "a.wav")},
        {"type": "audio", "audio": wav},
    ]
    text = {"type": "text", "text": "What?"}
    conversations = [[{"role": "user", "content": [one, text, other]}] for one, other in zip(images, audio)]
    outputs = llm.chat(conversations, GREEDY)
    raw = f"u:<|image begins|>{IMAGE}What?<|audio begins|>{AUDIO} a:"
    (direct,) = llm.generate({"prompt": raw, "images": [picture()], "audio": [(sound(), RATE)]}, GREEDY)
    prompt = llm.read_conversation(conversations[0])
    assert isinstance(prompt, MediaPrompt)
    (again,) = llm.generate(prompt, GREEDY)
    streamed = list(llm.stream(prompt, GREEDY))[-1].output
    assert streamed is not None
    for output in (*outputs, again, streamed):
        assert output.finish_reason is FinishReason.LENGTH
        assert output.token_ids == direct.token_ids
        assert output.prompt_token_ids == direct.prompt_token_ids == tuple(llm.chat_prompt(conversations[0]))


def test_bad_prompts_fail_alone(llm: LLM) -> None:
    right: dict[str, Any] = {"prompt": f"a{IMAGE}", "images": [picture()]}
    bad: list[tuple[Any, str]] = [
        ({"prompt": f"a{IMAGE}{IMAGE}", "images": [picture()]}, "prompt must have as many placeholders '<|image|>'"),
        ({"prompt": "a", "images": [picture()]}, "prompt must have as many placeholders"),
        ({"prompt": f"a{IMAGE}", "audio": [(sound(), RATE)]}, "prompt must have as many placeholders"),
        ({"prompt": f"a{IMAGE}", "images": [b"x"]}, "images.0 must be an image in one of the formats"),
        ({"prompt": "a", "images": picture()}, "images must be a list, not Image"),
        ({"prompt": "a", "video": []}, "prompt must have no key besides prompt, images and audio, but has 'video'"),
        ({"images": []}, 'a prompt must be text, token ids, or {"prompt"'),
        (f"a{IMAGE}", "media: the prompt has 1 placeholders of image"),
        ([1, IMAGE_ID], "media: the prompt has 1 placeholders of image"),
    ]
    outputs = llm.generate([right, *(prompt for prompt, _ in bad), right], SamplingParams(max_tokens=2))
    for output, (_, message) in zip(outputs[1:], bad):
        assert output.finish_reason is FinishReason.ERROR
        assert output.choices[0].error is not None
        assert message in output.choices[0].error
    assert [outputs[0].finish_reason, outputs[-1].finish_reason] == [FinishReason.LENGTH] * 2
    assert outputs[0].token_ids == outputs[-1].token_ids


def test_bad_conversations(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes(picture(), "png"))
    cases: list[tuple[Any, str]] = [
        ({"type": "image_url", "image_url": {"url": (tmp_path / "a.png").as_uri()}}, "must not be a file:// URL"),
        ({"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}, "must not be at 'localhost'"),
        ({"type": "text", "text": f"see {IMAGE}"}, "must not have '<|image|>' in its text"),
        ({"type": "image", "image": picture(1_100, 4)}, "brings what is shown to 276 tokens; max_model_len=256"),
    ]
    for part, message in cases:
        with pytest.raises(RequestError, match=r"^messages\.0\.content\.0") as caught:
            llm.chat([{"role": "user", "content": [part]}])
        assert message in str(caught.value)


def test_a_model_of_text_alone(tmp_path: Path) -> None:
    with LLM(tiny_llama(tmp_path / "model", num_modules=1), device="cpu", num_blocks=32) as llm:
        (output,) = llm.generate({"prompt": [1, 2], "images": [picture()]}, GREEDY)
        assert output.choices[0].error == "images must be empty: this model takes text only"
        (output,) = llm.generate({"prompt": [1, 2]}, GREEDY)
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("options", [[], ["--raw"]])
def test_the_command_line_shows_files(checkpoint: Path, llm: LLM, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes(picture(), "png"))
    (tmp_path / "a.wav").write_bytes(sound_bytes(sound(), RATE, "wav"))
    raw = f"{AUDIO}{IMAGE}{IMAGE}Well"
    text = raw if options else "Well"
    files = ["--image", f"{tmp_path}/a.png", "--image", f"{tmp_path}/a.png", "--audio", f"{tmp_path}/a.wav"]
    model = ["-m", str(checkpoint), "--device", "cpu", "--num-blocks", "64", "--max-tokens", "10", "--json"]
    result = CliRunner().invoke(app, ["generate", text, *files, *model, *options])
    assert result.exit_code == 0, result.output
    shown: list[dict[str, Any]] = [{"type": "image", "image": picture()}] * 2 + [
        {"type": "audio", "audio": (sound(), RATE)}
    ]
    if options:
        prompt = llm.read_prompt({"prompt": raw, "images": [picture()] * 2, "audio": [(sound(), RATE)]})
    else:
        prompt = llm.read_conversation([{"role": "user", "content": [*shown, {"type": "text", "text": "Well"}]}])
    (output,) = llm.generate(prompt, GREEDY)
    found = json.loads(result.stdout)
    assert (found["text"], found["num_prompt_tokens"]) == (output.text, len(prompt.token_ids))


def test_the_command_line_names_a_file_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["generate", "a", "--image", f"{tmp_path}/none", "-m", str(checkpoint), "--device", "cpu"]
    )
    assert result.exit_code != 0
    assert "cannot be read: No such file" in f"{result.output}{result.exception}"
