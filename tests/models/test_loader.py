"""Checkpoints of every layout load as written, and those that cannot run fail with the file and the rule."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3NextConfig,
    T5Config,
    ViTConfig,
)
from transformers import logging as transformers_logging
from transformers.modeling_layers import MtpModel

from foredraft.errors import ModelLoadError
from foredraft.models import checkpoint_files, mtp_weights
from foredraft.models.attention import ATTENTION_NAME
from foredraft.models.loader import LoadedModel, inspect_checkpoint, load_checkpoint

CPU = torch.device("cpu")
HIDDEN, VOCAB = 32, 64

Build = Callable[..., Path]

# (builder, how the modules are stored, number of modules); more modules than layers, and ten, provoke mixed-up numbers.
LAYOUTS: dict[str, tuple[Build, dict[str, Any], int]] = {
    "llama beside": (tiny.tiny_llama, {}, 3),
    "llama model.layers": (tiny.tiny_llama, {"mtp_names": "model.layers", "num_layers": 1, "num_modules": 10}, 10),
    "llama mtp.layers": (tiny.tiny_llama, {"mtp_names": "mtp.layers"}, 3),
    "llama model.mtp.layers": (tiny.tiny_llama, {"mtp_names": "model.mtp.layers"}, 3),
    "llama tied": (tiny.tiny_llama, {"tie_word_embeddings": True}, 3),
    "mistral beside": (tiny.tiny_mistral, {}, 2),
    "qwen2 beside": (tiny.tiny_qwen2, {}, 2),
    "qwen2 sliding beside": (tiny.tiny_qwen2, {"sliding_window": 8}, 2),
    "qwen3 beside": (tiny.tiny_qwen3, {}, 2),
    "glm4_moe model.layers": (tiny.tiny_glm4_moe, {}, 1),
    "glm4_moe two inside": (tiny.tiny_glm4_moe, {"num_modules": 2}, 2),
    "glm4_moe beside": (tiny.tiny_glm4_moe, {"mtp_names": "beside"}, 1),
    "mellum mtp.fc": (tiny.tiny_mellum, {}, 1),
}


def load(path: Path, mtp: Path | None = None, **options: Any) -> LoadedModel:
    defaults: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attn_implementation": "eager"}
    return load_checkpoint(path, mtp, **(defaults | options))


def own_tensors(mtp: MtpModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in mtp.state_dict().items() if not name.startswith(tiny.SHARED_PREFIXES)}


def assert_same_tensors(loaded: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    assert loaded.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, int]:
    """A checkpoint; the same with its modules beside it, under `MtpModel`'s names; the number of modules."""
    build, options, num_modules = LAYOUTS[request.param]
    return build(tmp_path / "a", **options), build(tmp_path / "b", **(options | BESIDE[build])), num_modules


BESIDE: dict[Build, dict[str, Any]] = {
    tiny.tiny_llama: {"mtp_names": "beside"},
    tiny.tiny_glm4_moe: {"mtp_names": "beside"},
    tiny.tiny_mellum: {"mtp_names": "beside"},
    tiny.tiny_mistral: {},
    tiny.tiny_qwen2: {},
    tiny.tiny_qwen3: {},
}


def test_weights_are_those_written(layout: tuple[Path, Path, int]) -> None:
    path, beside, num_modules = layout
    model = load(path)
    assert model.mtp is not None
    assert model.num_mtp_modules == len(model.mtp.layers) == model.info.num_mtp_modules == num_modules
    assert_same_tensors(own_tensors(model.mtp), load_file(beside / "mtp.safetensors"))
    (beside / "mtp.safetensors").unlink()
    assert_same_tensors(model.target.state_dict(), AutoModelForCausalLM.from_pretrained(beside).state_dict())
    assert not model.target.training
    assert not model.mtp.training
    assert not any(parameter.requires_grad for parameter in [*model.target.parameters(), *model.mtp.parameters()])


def test_modules_compute_what_a_directly_built_model_computes(layout: tuple[Path, Path, int]) -> None:
    path, beside, num_modules = layout
    model = load(path)
    assert model.mtp is not None
    target = AutoModelForCausalLM.from_pretrained(beside, attn_implementation="eager")
    reference = tiny.new_mtp_model(target, num_modules)
    reference.load_state_dict(load_file(beside / "mtp.safetensors"), strict=False)
    token_ids = torch.randint(VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(1, 20, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = hidden
    with torch.no_grad():
        for module in range(num_modules):
            rows = slice(1 + module, 21 + module) if module < 9 else slice(10, 30)
            positions = torch.arange(30)[None, rows]
            hidden = model.mtp.forward_layer(module, hidden, positions, None, input_ids=token_ids[:, rows])
            expected = reference.forward_layer(module, expected, positions, None, input_ids=token_ids[:, rows])
            assert torch.equal(hidden, expected), module
        assert torch.equal(model.target(token_ids).logits, target(token_ids).logits)


def test_modules_share_embedding_and_head_with_the_target(layout: tuple[Path, Path, int]) -> None:
    path, beside, _ = layout
    model = load(path)
    assert model.mtp is not None
    target = model.target
    embedding, head = model.mtp.get_parameter("embed_tokens.weight"), model.mtp.get_parameter("shared_head.weight")
    assert embedding.data_ptr() == target.get_parameter("model.embed_tokens.weight").data_ptr()
    assert head.data_ptr() == target.get_parameter("lm_head.weight").data_ptr()
    tensors = [*target.state_dict().values(), *model.mtp.state_dict().values()]
    num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    assert num_bytes == 4 * (model.info.num_parameters + model.info.num_mtp_parameters)
    stored = sum(tensor.nbytes for tensor in load_file(beside / "mtp.safetensors").values())
    assert stored == 4 * model.info.num_mtp_parameters


def test_glm4_moe_matches_transformers_own_loading(tmp_path: Path) -> None:
    path = tiny.tiny_glm4_moe(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(path)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # 5.24 knows the published models' number only
    model = load(path)
    assert model.mtp is not None
    assert_same_tensors(own_tensors(model.mtp), own_tensors(MtpModel.from_pretrained(target)))


def test_a_window_for_all_layers_holds_for_the_modules_too(tmp_path: Path) -> None:
    mtp = load(tiny.tiny_mistral(tmp_path, sliding_window=8)).mtp
    assert mtp is not None
    positions = torch.arange(20)[None]
    hidden = torch.randn(1, 20, HIDDEN, generator=torch.Generator().manual_seed(2))
    changed = hidden.clone()
    changed[:, 0] += 1
    token_ids = torch.zeros_like(positions)
    with torch.no_grad():
        before = mtp.forward_layer(0, hidden, positions, None, input_ids=token_ids)
        after = mtp.forward_layer(0, changed, positions, None, input_ids=token_ids)
    assert not torch.equal(before[:, 7], after[:, 7])
    assert torch.equal(before[:, 8:], after[:, 8:])


def test_copies_of_the_embedding_alone_are_no_module(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path, num_modules=0)
    before = inspect_checkpoint(path)
    edit_tensors(path / "model.safetensors", lambda t: t.update({"mtp.embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}))
    assert inspect_checkpoint(path) == before
    assert load(path).mtp is None


@pytest.mark.parametrize("claimed", [None, 0, 5])
def test_depth_follows_the_weights_not_the_config(tmp_path: Path, claimed: int | None) -> None:
    path = tiny.tiny_glm4_moe(tmp_path)
    tiny.edit_config(path, num_nextn_predict_layers=claimed)
    model = load(path)
    assert model.num_mtp_modules == inspect_checkpoint(path).num_mtp_modules == 1
    assert model.target.config.num_mtp_layers == 1


def test_module_kinds_that_the_config_names_are_kept(tmp_path: Path) -> None:
    path = tiny.tiny_qwen2(tmp_path, sliding_window=8)
    tiny.edit_config(path, mtp_layer_types=["full_attention", "sliding_attention"])
    model = load(path)
    assert model.mtp is not None
    assert model.mtp.config.layer_types == ["full_attention", "sliding_attention"]
    first = load(path, num_modules=1).mtp
    assert first is not None
    assert first.config.layer_types == ["full_attention"]


class RecordingSlice:
    """A safetensors slice that notes when its tensor is read."""

    def __init__(self, inner: Any, name: str, read: list[str]) -> None:
        self._inner, self._name, self._read = inner, name, read

    def __getitem__(self, index: Any) -> Tensor:
        self._read.append(self._name)
        tensor: Tensor = self._inner[index]
        return tensor


@pytest.mark.parametrize("names", ["beside", "mtp.layers"])
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_modules_beyond_those_wanted_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tiny.MtpNames, storage: tiny.MtpStorage
) -> None:
    path = tiny.tiny_llama(tmp_path, num_modules=3, mtp_names=names, mtp_storage=storage)
    read: list[str] = []

    class RecordingFile:
        def __init__(self, file: Path, framework: str, backend: str) -> None:
            self._inner: Any = safe_open(file, framework=framework, backend=backend)

        def __enter__(self) -> RecordingFile:
            self._inner.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._inner.__exit__(*error)

        def get_slice(self, name: str) -> RecordingSlice:
            return RecordingSlice(self._inner.get_slice(name), name, read)

    monkeypatch.setattr(mtp_weights, "safe_open", RecordingFile)
    model = load(path, num_modules=2)
    assert model.mtp is not None
    assert len(model.mtp.layers) == 2
    assert model.num_mtp_modules == 3
    assert {name.removeprefix("mtp.").split(".")[1] for name in read} == {"0", "1"}
    assert len(read) == len(set(read))


def test_no_modules(tmp_path: Path) -> None:
    plain = load(tiny.tiny_llama(tmp_path / "plain", num_modules=0))
    assert plain.mtp is None
    assert plain.num_mtp_modules == 0
    assert plain.info.mtp_layout is None
    assert plain.info.mtp_path is None
    assert plain.info.num_mtp_parameters == 0
    unused = load(tiny.tiny_glm4_moe(tmp_path / "unused"), num_modules=0)
    assert unused.mtp is None
    assert unused.num_mtp_modules == 1


@pytest.mark.parametrize("num_modules", [4, -1])
def test_more_modules_than_there_are(tmp_path: Path, num_modules: int) -> None:
    path = tiny.tiny_llama(tmp_path)
    with pytest.raises(ModelLoadError, match=f"{num_modules} MTP modules asked for, but there are 3"):
        load(path, num_modules=num_modules)


def test_given_modules_go_before_those_found(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path / "a", mtp_names="mtp.layers", num_modules=1)
    other = tiny.tiny_llama(tmp_path / "b", seed=7, num_modules=2)
    for mtp in (other, other / "mtp.safetensors"):
        model = load(path, mtp)
        assert model.mtp is not None
        assert_same_tensors(own_tensors(model.mtp), load_file(other / "mtp.safetensors"))
        assert model.info.mtp_layout == "beside"
        assert model.info.mtp_path == other / "mtp.safetensors"
    assert model.info.num_parameters == inspect_checkpoint(path).num_parameters


@pytest.mark.parametrize("build", [tiny.tiny_llama, tiny.tiny_glm4_moe])
def test_sharded_checkpoints(tmp_path: Path, build: Build) -> None:
    options = {"mtp_names": "model.layers"}
    whole, sharded = load(build(tmp_path / "a", **options)), build(tmp_path / "b", **options)
    tiny.shard(sharded, 3)
    model = load(sharded)
    assert whole.mtp is not None
    assert model.mtp is not None
    assert_same_tensors(own_tensors(model.mtp), own_tensors(whole.mtp))
    assert_same_tensors(model.target.state_dict(), whole.target.state_dict())


def test_stored_forms_of_the_modules(tmp_path: Path) -> None:
    exact = load_file(tiny.tiny_llama(tmp_path / "float32") / "mtp.safetensors")
    half = load(tiny.tiny_llama(tmp_path / "bfloat16", mtp_storage="bfloat16"))
    int8_path = tiny.tiny_llama(tmp_path / "int8", mtp_storage="int8")
    int8, stored = load(int8_path), load_file(int8_path / "mtp.safetensors")
    assert half.mtp is not None
    assert int8.mtp is not None
    assert_same_tensors(own_tensors(half.mtp), {name: tensor.bfloat16().float() for name, tensor in exact.items()})
    for name, tensor in own_tensors(int8.mtp).items():
        scale = stored.get(f"{name}_scale")
        assert tensor.dtype == torch.float32
        expected = stored[name].float() if scale is None else stored[name].float() * scale[:, None]
        assert torch.equal(tensor, expected), name
    assert int8.info.num_mtp_parameters == half.info.num_mtp_parameters
    narrow = load(int8_path, dtype=torch.bfloat16).mtp
    assert narrow is not None
    assert_same_tensors(own_tensors(narrow), {k: v.bfloat16() for k, v in own_tensors(int8.mtp).items()})


@pytest.mark.parametrize("build", [tiny.tiny_llama, tiny.tiny_glm4_moe])
def test_floats_are_loaded_in_the_dtype_asked_for(tmp_path: Path, build: Build) -> None:
    path = build(tmp_path)
    narrow = load(path, dtype=torch.bfloat16)
    assert narrow.mtp is not None
    assert narrow.info.dtype == "float32"
    # What a model class keeps in float32 (the router of GLM-4 MoE) stays so, in the modules as in the target.
    kept = {"gate.weight", "gate.e_score_correction_bias"} if build is tiny.tiny_glm4_moe else set()
    for model in (narrow.target, narrow.mtp):
        wide_names = {name for name, tensor in model.state_dict().items() if tensor.dtype != torch.bfloat16}
        assert {name.split(".mlp.")[-1] for name in wide_names} == kept
    narrow.target.save_pretrained(tmp_path / "narrow")
    wide = load(tmp_path / "narrow", path if build is tiny.tiny_llama else None)
    assert wide.info.dtype == "bfloat16"
    assert {parameter.dtype for parameter in wide.target.parameters()} == {torch.float32}
    assert torch.equal(wide.target.lm_head.weight, narrow.target.lm_head.weight.float())


def test_info(tmp_path: Path) -> None:
    path = tiny.tiny_glm4_moe(tmp_path)
    info = inspect_checkpoint(str(path))
    model = load(path)
    assert model.info == info
    assert model.mtp is not None
    assert info.path == path
    assert (info.architecture, info.model_type) == ("Glm4MoeForCausalLM", "glm4_moe")
    assert (info.num_hidden_layers, info.hidden_size, info.vocab_size) == (2, HIDDEN, VOCAB)
    assert info.max_position_embeddings == 256
    assert info.num_parameters == sum(tensor.numel() for tensor in model.target.state_dict().values())
    assert info.num_mtp_parameters == sum(tensor.numel() for tensor in own_tensors(model.mtp).values())
    assert (info.mtp_layout, info.mtp_path) == ("inside", path)
    assert not info.tie_word_embeddings


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path, tie_word_embeddings=True)
    once = inspect_checkpoint(path)
    edit_tensors(
        path / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert once.tie_word_embeddings
    assert inspect_checkpoint(path).num_parameters == once.num_parameters


def test_inspecting_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.tiny_glm4_moe(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(torch, "empty", refuse)
    assert inspect_checkpoint(path).num_mtp_modules == 1


def test_default_attention_is_the_paged_one(tmp_path: Path) -> None:
    model = load_checkpoint(tiny.tiny_llama(tmp_path), dtype=torch.float32, device=CPU)
    assert model.mtp is not None
    assert model.target.config._attn_implementation == ATTENTION_NAME
    assert model.mtp.config._attn_implementation == ATTENTION_NAME


def test_loading_changes_no_config_that_another_holds(tmp_path: Path) -> None:
    path = tiny.tiny_qwen3(tmp_path)
    held = AutoConfig.from_pretrained(path)
    first = load(path)
    assert first.mtp is not None
    before = [config.to_dict() for config in (held, first.target.config, first.mtp.config)]
    second = load(path, num_modules=1, attn_implementation=ATTENTION_NAME)
    assert [config.to_dict() for config in (held, first.target.config, first.mtp.config)] == before
    assert first.target.config._attn_implementation == first.mtp.config._attn_implementation == "eager"
    assert second.target.config is not first.target.config


def test_tokenizer_and_end_of_sequence(tmp_path: Path) -> None:
    bare = load(tiny.tiny_llama(tmp_path / "bare", num_modules=0))
    assert bare.tokenizer is None
    assert bare.eos_token_ids == frozenset()
    path = tiny.tiny_llama(tmp_path / "full", num_modules=0, tokenizer=True, eos_token_id=5)
    full = load(path)
    assert full.tokenizer is not None
    assert full.tokenizer.encode("w3 w9") == [3, 9]
    assert full.eos_token_ids == {5}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert load(path).eos_token_ids == {6, 7}
    (path / "generation_config.json").write_text("{}")
    assert load(path).eos_token_ids == {5}


def test_transformers_report_and_settings(tmp_path: Path) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    filters = list(logging.getLogger("transformers.modeling_utils").filters)
    is_bar_shown = transformers_logging.is_progress_bar_enabled()
    try:
        load(tiny.tiny_glm4_moe(tmp_path))
    finally:
        logger.removeHandler(handler)
    assert not [record for record in records if "UNEXPECTED" in record]
    assert logging.getLogger("transformers.modeling_utils").filters == filters
    assert transformers_logging.is_progress_bar_enabled() == is_bar_shown


# Checkpoints that cannot be found or are no decoders that run.


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere: no such directory"):
        inspect_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"nowhere: no such directory"):
        inspect_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no such file of MTP modules"):
        inspect_checkpoint(tiny.tiny_llama(tmp_path / "a"), tmp_path)


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.tiny_llama(tmp_path)
    asked_for: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked_for.append(name)
        return str(path)

    def fail(_: str, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(checkpoint_files, "snapshot_download", download)
    assert inspect_checkpoint("someone/something").num_mtp_modules == 3
    assert asked_for == ["someone/something"]

    monkeypatch.setattr(checkpoint_files, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"someone/something: no such directory, and not to be had .* no network"):
        inspect_checkpoint("someone/something")


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (T5Config(), "has an encoder"),
        (BertConfig(), "has an encoder"),
        (ViTConfig(), "not a decoder that transformers knows"),
        (MambaConfig(num_hidden_layers=2), "linear_attention do not run yet"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type dynamic"),
        (Qwen3NextConfig(num_hidden_layers=3), "the last layer must be of full attention"),
        (Llama4TextConfig(num_hidden_layers=4), "chunked_attention do not run yet"),
    ],
)
def test_architectures_that_do_not_run(tmp_path: Path, config: Any, rule: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{rule}"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"model_type": "nonesuch"}, "transformers cannot read it"),
        ({"model_type": None}, "transformers cannot read it"),
        ({"hidden_size": "wide"}, "transformers cannot read it"),
        ({"mtp_layer_types": ["conv", "full_attention"]}, "conv do not run yet"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
)
def test_configs_that_do_not_run(tmp_path: Path, change: dict[str, Any], rule: str) -> None:
    path = tiny.tiny_qwen3(tmp_path)
    tiny.edit_config(path, **change)
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{rule}"):
        inspect_checkpoint(path)


def test_attention_outside_transformers_interface(tmp_path: Path) -> None:
    tiny.edit_config(tiny.tiny_llama(tmp_path), model_type="stablelm")
    with pytest.raises(ModelLoadError, match="StableLmForCausalLM does not have ordinary attention"):
        inspect_checkpoint(tmp_path)


# Files that are damaged.


@pytest.mark.parametrize("name", ["model.safetensors", "mtp.safetensors"])
def test_truncated_files(tmp_path: Path, name: str) -> None:
    file = tiny.tiny_llama(tmp_path) / name
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=rf"{name}: cannot be read as safetensors"):
        load(tmp_path)
    file.write_bytes(b"not safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name}: cannot be read as safetensors"):
        inspect_checkpoint(tmp_path)


def test_missing_weight_files(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path)
    tiny.shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        load(path)
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="not an index of safetensors files"):
        load(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match="only safetensors load"):
        load(path)


def edit_tensors(file: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    file.unlink()  # not overwritten in place: a model that is still mapped from it would change
    save_file(tensors, file, metadata={"format": "pt"})


def test_target_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path / "a")
    edit_tensors(path / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM: missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)
    path = tiny.tiny_llama(tmp_path / "b")
    edit_tensors(path / "model.safetensors", lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ModelLoadError, match=r"wrong shape: model\.norm\.weight \[7\], not \[32\]"):
        load(path)


# Modules that do not fit. Each: the edit of mtp.safetensors and what the message says.
MTP_DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("layers.1.hnorm.weight"), r"missing: layers\.1\.hnorm\.weight"),
    "missing projection": (lambda t: t.pop("layers.1.eh_proj.weight"), r"missing: layers\.1\.eh_proj\.weight"),
    "missing in block": (
        lambda t: t.pop("layers.0.mtp_block.self_attn.q_proj.weight"),
        r"missing: layers\.0\.mtp_block\.self_attn\.q_proj\.weight",
    ),
    "surplus in module": (lambda t: t.update({"layers.0.extra.weight": torch.ones(2)}), r"surplus: .*extra\.weight"),
    "surplus outside": (lambda t: t.update({"foo.weight": torch.ones(2)}), r"surplus tensors.*foo\.weight"),
    "wrong shape": (
        lambda t: t.update({"layers.2.enorm.weight": torch.ones(5)}),
        r"wrong shape: layers\.2\.enorm\.weight \[5\], not \[32\]",
    ),
    "module missing": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.1.")],
        r"MTP module 1 is missing, though there is a module 2",
    ),
    "none": (lambda t: [t.pop(name) for name in list(t)], r"no MTP module in it"),
    "int8 without scale": (
        lambda t: t.update({"layers.0.eh_proj.weight": torch.ones(32, 64, dtype=torch.int8)}),
        r"int8 tensor layers\.0\.eh_proj\.weight lacks its row scales layers\.0\.eh_proj\.weight_scale",
    ),
    "int8 with wrong scale": (
        lambda t: t.update(
            {
                "layers.0.eh_proj.weight": torch.ones(32, 64, dtype=torch.int8),
                "layers.0.eh_proj.weight_scale": torch.ones(31),
            }
        ),
        r"layers\.0\.eh_proj\.weight_scale \(F32 \[31\]\) is not one float a row",
    ),
    "other dtype": (
        lambda t: t.update({"layers.0.eh_proj.weight": torch.ones(32, 64, dtype=torch.int32)}),
        r"layers\.0\.eh_proj\.weight is stored as I32",
    ),
}


@pytest.mark.parametrize("damage", MTP_DAMAGE)
def test_modules_that_do_not_fit(tmp_path: Path, damage: str) -> None:
    edit, message = MTP_DAMAGE[damage]
    path = tiny.tiny_llama(tmp_path)
    edit_tensors(path / "mtp.safetensors", edit)
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_modules_inside_that_do_not_fit(tmp_path: Path) -> None:
    path = tiny.tiny_glm4_moe(tmp_path / "a")
    edit_tensors(path / "model.safetensors", lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mtp_block\.mlp\.experts\.gate_up_proj"):
        load(path)
    assert load(path, num_modules=0).mtp is None
    path = tiny.tiny_glm4_moe(tmp_path / "b")
    edit_tensors(path / "model.safetensors", lambda t: t.update({"mtp.foo.weight": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"surplus: foo\.weight"):
        load(path)


def test_modules_of_another_target(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path / "a")
    wide = tiny.tiny_llama(tmp_path / "b", hidden_size=48)
    with pytest.raises(ModelLoadError, match=r"eh_proj\.weight is \[48, 96\], but a target of hidden size 32"):
        inspect_checkpoint(path, wide)


def test_decoders_that_modules_cannot_be_built_for(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path / "a")
    other = tmp_path / "b"
    config = {"model_type": "gpt_neox", "max_position_embeddings": 64, **tiny._sizes()}
    tiny.write_checkpoint(other, AutoConfig.for_model(**config), num_modules=0)
    assert load(other).mtp is None
    with pytest.raises(ModelLoadError, match="transformers cannot build MTP modules for GPTNeoXForCausalLM"):
        load(other, path)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [tiny.tiny_llama, tiny.tiny_glm4_moe])
def test_loading_onto_a_gpu(tmp_path: Path, build: Build) -> None:
    path = build(tmp_path)
    on_cpu, on_gpu = load(path), load(path, device=torch.device("cuda"))
    assert on_cpu.mtp is not None
    assert on_gpu.mtp is not None
    held = [*on_gpu.target.parameters(), *on_gpu.target.buffers(), *on_gpu.mtp.parameters(), *on_gpu.mtp.buffers()]
    assert {tensor.device.type for tensor in held} == {"cuda"}
    assert on_gpu.mtp.get_parameter("shared_head.weight") is on_gpu.target.get_parameter("lm_head.weight")
    assert_same_tensors({k: v.cpu() for k, v in own_tensors(on_gpu.mtp).items()}, own_tensors(on_cpu.mtp))


def test_builtin_modules_load() -> None:
    builtin = pytest.importorskip("foredraft.models.builtin")
    path, mtp = builtin.builtin_checkpoint(), builtin.builtin_mtp_directory()
    model = load(path, mtp, num_modules=2)
    assert model.mtp is not None
    assert model.num_mtp_modules == 8
    assert model.info.num_mtp_parameters == pytest.approx(33.6e6, rel=0.01)
    stored = load_file(mtp / "mtp.safetensors")
    name = "layers.1.mtp_block.mlp.up_proj.weight"
    expected = stored[name].float() * stored[f"{name}_scale"].float()[:, None]
    assert torch.equal(own_tensors(model.mtp)[name], expected)
    assert model.eos_token_ids == {2}
    assert isinstance(model.target.config, LlamaConfig)
