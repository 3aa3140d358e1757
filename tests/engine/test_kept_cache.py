"""The cache on disk, through `LLM`: a restart finds what was there, and nobody finds what is not theirs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, tiny_llama, tiny_mistral
from torch import Tensor, nn

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError, ForedraftError
from foredraft.models.fingerprint import fingerprint
from foredraft.models.loader import load_checkpoint

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
NUM_CACHED = 20
"""Tokens of PROMPT that lie in full blocks."""
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 2, "max_model_len": 60}
HOST_GIB = 0.01


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture, all weights drawn anew."""
    return tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def open_llm(checkpoint: Path, directory: Path | None, **settings: Any) -> LLM:
    kept = {} if directory is None else {"cache_dir": directory, "cpu_cache_gib": HOST_GIB}
    return LLM(checkpoint, **SETTINGS | kept | settings)


def answer(llm: LLM, prompt: Sequence[int] = PROMPT) -> tuple[tuple[int, ...], int]:
    """The tokens that follow, and how many of the prompt were cached."""
    (output,) = llm.generate([list(prompt)], GREEDY)
    return output.token_ids, output.num_cached_tokens


def one_session(checkpoint: Path, directory: Path | None, **settings: Any) -> tuple[tuple[int, ...], int]:
    with open_llm(checkpoint, directory, **settings) as llm:
        return answer(llm)


# -- a restart -------------------------------------------------------------------------------------------------------


def test_a_restart_finds_the_prompt_and_answers_the_same(checkpoint: Path, directory: Path) -> None:
    expected, _ = one_session(checkpoint, None)
    assert one_session(checkpoint, directory) == (expected, 0)
    for _ in range(2):
        assert one_session(checkpoint, directory) == (expected, NUM_CACHED)


def test_the_answer_is_found_as_well_with_the_modules_rows(checkpoint: Path, directory: Path) -> None:
    tokens, _ = one_session(checkpoint, directory)
    turn = [*PROMPT, *tokens, 1, 2]
    with open_llm(checkpoint, None) as llm:
        expected, _ = answer(llm, turn)
    with open_llm(checkpoint, directory) as llm:
        match = llm.engine.cache.match(turn, None, 3)
        assert match.num_rows == 28
        assert match.num_module_rows >= NUM_CACHED
        assert answer(llm, turn) == (expected, 28)


def test_salts_are_kept_apart_on_disk_too(checkpoint: Path, directory: Path) -> None:
    def num_cached(llm: LLM, salt: str | None) -> int:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=4, cache_salt=salt))
        return output.num_cached_tokens

    with open_llm(checkpoint, directory) as llm:
        assert num_cached(llm, "x") == 0
    with open_llm(checkpoint, directory) as llm:
        assert [num_cached(llm, salt) for salt in (None, "", "y", "x")] == [0, 0, 0, NUM_CACHED]


def test_only_closing_saves(checkpoint: Path, directory: Path) -> None:
    llm = open_llm(checkpoint, directory)
    answer(llm)
    assert list(directory.iterdir()) == []
    llm.close()
    assert [path.suffix for path in directory.glob("*.safetensors")] == [".safetensors"]
    assert one_session(checkpoint, directory)[1] == NUM_CACHED


def test_leaving_the_context_by_an_error_saves_too(checkpoint: Path, directory: Path) -> None:
    def fail() -> None:
        with open_llm(checkpoint, directory) as llm:
            answer(llm)
            raise LookupError("the caller's own")

    with pytest.raises(LookupError):
        fail()
    assert one_session(checkpoint, directory)[1] == NUM_CACHED


def test_closing_twice_is_closing_once(checkpoint: Path, directory: Path) -> None:
    with open_llm(checkpoint, directory) as llm:
        answer(llm)
        llm.close()
    assert one_session(checkpoint, directory)[1] == NUM_CACHED


def test_a_request_that_is_cut_off_by_the_end_leaves_its_rows(checkpoint: Path, directory: Path) -> None:
    with open_llm(checkpoint, directory) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
    assert one_session(checkpoint, directory)[1] == NUM_CACHED


def test_what_was_reset_is_not_saved(checkpoint: Path, directory: Path) -> None:
    with open_llm(checkpoint, directory) as llm:
        answer(llm)
        llm.reset_prefix_cache()
    assert one_session(checkpoint, directory)[1] == 0


def test_token_ids_of_another_kind_of_integer_are_saved_as_well(checkpoint: Path, directory: Path) -> None:
    kind = IntEnum("Token", [f"t{token_id}" for token_id in range(64)], start=0)  # type: ignore[misc]
    with open_llm(checkpoint, directory) as llm:
        expected, _ = answer(llm, [kind(token_id) for token_id in PROMPT])
    assert one_session(checkpoint, directory) == (expected, NUM_CACHED)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_step_does_not_cost_what_was_saved_before(
    failure: type[BaseException], checkpoint: Path, directory: Path
) -> None:
    one_session(checkpoint, directory)

    def fail() -> None:
        with open_llm(checkpoint, directory) as llm:

            def execute(plan: object) -> None:
                raise failure("in the middle of a step")

            llm.engine.runner.execute = execute  # type: ignore[assignment, method-assign]
            answer(llm, PROMPT[::-1])

    with pytest.raises(failure):
        fail()
    assert one_session(checkpoint, directory)[1] == NUM_CACHED


def test_a_smaller_host_cache_takes_what_fits(checkpoint: Path, directory: Path) -> None:
    expected, _ = one_session(checkpoint, directory)
    with open_llm(checkpoint, directory) as llm:
        bytes_per_block = llm.engine.cache.layout.bytes_per_token() * 4
    num_usable = 3
    tokens, num_cached = one_session(
        checkpoint, directory, cpu_cache_gib=(num_usable + 1.5) * bytes_per_block / (1 << 30)
    )
    assert tokens == expected
    assert num_cached == num_usable * 4


# -- nobody finds what is not theirs ---------------------------------------------------------------------------------


def exchange_mtp(checkpoint: Path, other: Path) -> dict[str, Any]:
    return {"mtp": other / "mtp.safetensors"}


def change_a_weight(file: Path, part: str) -> None:
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if part in name)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] += 1
    file.unlink()  # `tensors` are mapped from it
    save_file(tensors, file, metadata={"format": "pt"})


def change_a_target_weight(checkpoint: Path, other: Path) -> dict[str, Any]:
    change_a_weight(checkpoint / "model.safetensors", "layers.1.mlp")
    return {}


def change_a_module_weight(checkpoint: Path, other: Path) -> dict[str, Any]:
    change_a_weight(checkpoint / "mtp.safetensors", "layers.1")
    return {}


def change_rope(checkpoint: Path, other: Path) -> dict[str, Any]:
    edit_config(checkpoint, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    return {}


def scale_rope(checkpoint: Path, other: Path) -> dict[str, Any]:
    """As it is done to a published checkpoint for longer contexts."""
    edit_config(checkpoint, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    return {}


def change_norm(checkpoint: Path, other: Path) -> dict[str, Any]:
    edit_config(checkpoint, rms_norm_eps=0.1)
    return {}


CHANGES: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "other weights": lambda checkpoint, other: {"model": other},
    "other MTP weights": exchange_mtp,
    "one other weight": change_a_target_weight,
    "one other MTP weight": change_a_module_weight,
    "other dtype": lambda checkpoint, other: {"dtype": "bfloat16"},
    "other block size": lambda checkpoint, other: {"block_size": 8},
    "fewer modules": lambda checkpoint, other: {"num_speculative_tokens": 2},
    "no modules": lambda checkpoint, other: {"num_speculative_tokens": 0},
    "other rotary base": change_rope,
    "scaled positions": scale_rope,
    "other epsilon of norms": change_norm,
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_or_layout_finds_nothing_and_leaves_what_is_there(
    change: str, checkpoint: Path, other: Path, directory: Path, tmp_path: Path
) -> None:
    expected, _ = one_session(checkpoint, directory)
    changed = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    settings = CHANGES[change](changed, other)
    path = settings.pop("model", changed)
    alone, _ = one_session(path, None, **settings)
    assert one_session(path, directory, **settings) == (alone, 0)
    num_cached = len(PROMPT) // settings.get("block_size", 4) * settings.get("block_size", 4)
    assert one_session(path, directory, **settings) == (alone, num_cached)
    assert one_session(checkpoint, directory) == (expected, NUM_CACHED)


def test_another_window_finds_nothing(directory: Path, tmp_path: Path) -> None:
    """All weights and widths are the same."""
    wide = tiny_mistral(tmp_path / "wide", sliding_window=16)
    narrow = Path(shutil.copytree(wide, tmp_path / "narrow"))
    edit_config(narrow, sliding_window=4)
    settings = {"max_num_batched_tokens": 32}
    expected, _ = one_session(wide, directory, **settings)
    alone, _ = one_session(narrow, None, **settings)
    assert one_session(narrow, directory, **settings) == (alone, 0)
    assert one_session(wide, directory, **settings) == (expected, NUM_CACHED)


def test_a_copy_of_the_checkpoint_elsewhere_finds_all(checkpoint: Path, directory: Path, tmp_path: Path) -> None:
    one_session(checkpoint, directory)
    assert one_session(Path(shutil.copytree(checkpoint, tmp_path / "copy")), directory)[1] == NUM_CACHED


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_file_is_left_out_with_a_warning(
    damage: Callable[[Path], None], checkpoint: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = one_session(checkpoint, directory)
    (shard,) = directory.glob("*.safetensors")
    damage(shard)
    with caplog.at_level("WARNING", logger="foredraft"):
        assert one_session(checkpoint, directory) == (expected, 0)
    assert shard.name in caplog.text
    assert one_session(checkpoint, directory) == (expected, NUM_CACHED), "it is saved anew"


# -- settings --------------------------------------------------------------------------------------------------------


def test_a_cache_dir_that_is_a_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("something else")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match="cache_dir"):
            open_llm(checkpoint, path)
    assert file.read_text() == "something else"


def test_a_cache_dir_that_is_lost_meanwhile_is_reported(checkpoint: Path, directory: Path) -> None:
    llm = open_llm(checkpoint, directory)
    answer(llm)
    directory.rmdir()
    directory.write_text("something else")
    with pytest.raises(ForedraftError, match=r"cache_dir .* cannot be saved"):
        llm.close()


def test_settings_that_do_not_fit_are_refused(checkpoint: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match="cache_dir needs cpu_cache_gib"):
        open_llm(checkpoint, None, cache_dir=directory)
    with pytest.raises(ConfigError, match="cpu_cache_gib=1e-07 is less than two blocks"):
        open_llm(checkpoint, directory, cpu_cache_gib=1e-7)
    with pytest.raises(ConfigError, match="cpu_cache_gib needs enable_prefix_caching"):
        open_llm(checkpoint, directory, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="cpu_cache_gib must be a number from 0 to 262144"):
        open_llm(checkpoint, directory, cpu_cache_gib=-1.0)
    with pytest.raises(ConfigError, match="cache_dir must be a path"):
        open_llm(checkpoint, None, cache_dir=3)
    assert not directory.exists()


# -- fingerprints ----------------------------------------------------------------------------------------------------


def load(path: Path) -> tuple[nn.Module, nn.Module]:
    loaded = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.mtp is not None
    return loaded.target, loaded.mtp


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> tuple[nn.Module, nn.Module]:
    return load(checkpoint)


def test_the_same_files_have_the_same_fingerprint(checkpoint: Path, weights: tuple[nn.Module, nn.Module]) -> None:
    assert list(map(fingerprint, load(checkpoint))) == list(map(fingerprint, weights))
    assert fingerprint(weights[0]) != fingerprint(weights[1])


@pytest.mark.parametrize("part", [0, 1], ids=["target", "modules"])
def test_one_weight_anywhere_changes_the_fingerprint(part: int, weights: tuple[nn.Module, nn.Module]) -> None:
    module = weights[part]
    before = fingerprint(module)
    state = module.state_dict()
    for kind in ("embed_tokens", "norm", "self_attn", "mlp"):
        assert any(kind in name for name in state)
    for name, tensor in state.items():
        flat = tensor.view(-1)
        for index in {0, tensor.numel() // 2, tensor.numel() - 1}:
            weight = flat[index].clone()
            flat[index] = torch.nextafter(weight, weight + 1)
            assert fingerprint(module) != before, f"{name}, weight {index}"
            flat[index] = weight
    assert fingerprint(module) == before


def exchange_two_in_a_row(row: Tensor) -> None:
    row[[0, 1]] = row[[1, 0]]


def change_two_signs(row: Tensor) -> None:
    row[:2] *= -1


def reverse(row: Tensor) -> None:
    row.copy_(row.flip(0))


@pytest.mark.parametrize("change", [exchange_two_in_a_row, change_two_signs, reverse])
def test_several_weights_of_a_row_cannot_make_up_for_each_other(change: Callable[[Tensor], None]) -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 13.0).view(3, 4))
        before = fingerprint(layer)
        change(layer.weight[1])
    assert fingerprint(layer) != before


@pytest.mark.parametrize("value", [0.0, 0.5, 2.0])
def test_a_norm_of_equal_weights_has_a_fingerprint_of_its_own(value: float) -> None:
    norm = nn.LayerNorm(4)
    before = fingerprint(norm)
    with torch.no_grad():
        norm.weight.fill_(value)
    assert fingerprint(norm) != before
