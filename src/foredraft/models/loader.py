"""Loading a checkpoint: the target that transformers defines, its MTP modules, its tokenizer.

A checkpoint is checked from its configuration and safetensors headers before any tensor is read, so that one that
cannot run fails at once, with a message that names the file and the rule.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from foredraft.config import LoadFormat
from foredraft.errors import ModelLoadError
from foredraft.models import dummy
from foredraft.models.attention import ATTENTION_NAME
from foredraft.models.checkpoint_files import (
    count_parameters,
    missing_experts,
    mtp_file,
    read_headers,
    resolve_directory,
    stored_dtype,
    weight_files,
)
from foredraft.models.families.registry import family_of
from foredraft.models.media_processor import MediaProcessor, load_media_processor
from foredraft.models.mtp_weights import (
    MtpLayout,
    MtpSource,
    build_mtp_model,
    describe_problems,
    find_mtp_beside,
    find_mtp_inside,
    listed,
    set_mtp_fields,
    unknown_mtp_tensors,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds, as its configuration and headers say.

    num_parameters counts the target (a tied head once); dtype is the one most of its weights are stored in.
    mtp_layout: 'beside' the checkpoint in mtp_path, a file, or 'inside' it (mtp_path is then the directory).
    """

    path: Path
    architecture: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int
    dtype: str
    tie_word_embeddings: bool
    num_mtp_modules: int
    mtp_layout: MtpLayout | None
    mtp_path: Path | None
    num_mtp_parameters: int


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to run, with as many MTP modules as were asked for.

    num_mtp_modules: how many the checkpoint has. tokenizer: None if the directory has none. eos_token_ids: from the
    generation configuration, else from the model's. processor: None for a model that takes text only.
    """

    target: PreTrainedModel
    mtp: MtpModel | None
    num_mtp_modules: int
    tokenizer: PreTrainedTokenizerBase | None
    info: CheckpointInfo
    eos_token_ids: frozenset[int]
    processor: MediaProcessor | None = None


def inspect_checkpoint(
    model: str | Path, mtp: str | Path | None = None, load_format: LoadFormat = "auto", num_modules: int | None = None
) -> CheckpointInfo:
    """Describe a checkpoint without reading a tensor; arguments and errors as for `load_checkpoint`. Of num_modules it
    matters only whether it is 0: no module will be asked for."""
    return _examine_shape(model, mtp)[0] if load_format == "dummy" else _examine(model, mtp, num_modules)[0]


def load_checkpoint(
    model: str | Path,
    mtp: str | Path | None = None,
    *,
    num_modules: int | None = None,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str = ATTENTION_NAME,
    load_format: LoadFormat = "auto",
) -> LoadedModel:
    """Load a target with its first `num_modules` MTP modules (None: all; 0: none), its tokenizer and its processor.

    model: a directory that transformers can load as a decoder, or an id on the Hugging Face hub. mtp: an
    `mtp.safetensors` file or a directory with one; None looks in the model's directory, then inside the checkpoint.
    Weights are converted to `dtype`, except those that the model's class keeps in float32 (routers). The modules
    share the target's embedding and head.

    load_format "dummy": only config.json and, where there are any, the files of tokenizer and processor are read; the
    weights are random (see `models.dummy`). There are as many modules as the configuration says, or as `mtp` holds.

    ModelLoadError: not found, not readable, not a decoder that Foredraft runs, or weights that do not fit it; unless
    num_modules is 0, also tensors that look like those of modules, but that no known layout has.
    """
    source: MtpSource | None = None
    if load_format == "dummy":
        info, config = _examine_shape(model, mtp)
    else:
        info, config, source = _examine(model, mtp, num_modules)
    wanted = info.num_mtp_modules if num_modules is None else num_modules
    if not 0 <= wanted <= info.num_mtp_modules:
        raise ModelLoadError(f"{info.path}: {wanted} MTP modules asked for, but there are {info.num_mtp_modules}")
    if wanted:
        set_mtp_fields(config, wanted)
    with _quiet_transformers():
        target = (
            dummy.build_target(config, dtype, device)
            if load_format == "dummy"
            else _load_target(info, config, dtype, device)
        )
        # Before the modules are built: they keep the attention that is set by then.
        target.set_attn_implementation(attn_implementation)
        modules: MtpModel | None = None
        if wanted and load_format == "dummy":
            modules = dummy.build_mtp(target, wanted, dtype, device)
        elif wanted and source is not None:
            modules = build_mtp_model(target, source, wanted, dtype, device)
    tokenizer = load_tokenizer(info.path)
    processor = load_media_processor(info.path, family_of(target.config).placeholders(target.config))
    if tokenizer is not None and processor is not None:  # older checkpoints have the template beside the processor
        tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return LoadedModel(target, modules, info.num_mtp_modules, tokenizer, info, _eos_token_ids(target), processor)


def _examine(
    model: str | Path, mtp: str | Path | None, num_modules: int | None
) -> tuple[CheckpointInfo, PreTrainedConfig, MtpSource | None]:
    """Everything that can be known, and refused, before a tensor is read. The config is the caller's own."""
    path = resolve_directory(model)
    config = _read_config(path)
    architecture = _check_runnable(path, config)
    text_config: Any = config.get_text_config(decoder=True)
    headers = read_headers(weight_files(path))
    inside = find_mtp_inside(path, headers, text_config.num_hidden_layers, text_config.hidden_size, family_of(config))
    beside = mtp_file(path, mtp)
    source = inside if beside is None else find_mtp_beside(beside, text_config.hidden_size)
    if beside is None and num_modules != 0:
        _check_all_known(path, config, unknown_mtp_tensors(headers, inside, text_config.num_hidden_layers))
    if source is not None and not source.modules:  # nothing but copies of the embedding or head
        source = None
    target_headers = {name: header for name, header in headers.items() if inside is None or name not in inside.owned}
    if packed := [header for header in target_headers.values() if header.is_packed]:
        raise ModelLoadError(
            f"{packed[0].file}: {packed[0].name} is stored as {packed[0].dtype}; quantized checkpoints do not run yet"
        )
    if missing := missing_experts(target_headers):
        raise ModelLoadError(f"{path}: weights do not fit {architecture}: missing: {listed(missing)}")
    is_tied = bool(getattr(text_config, "tie_word_embeddings", False))
    info = _info(
        path,
        config,
        architecture,
        num_parameters=count_parameters(target_headers, is_tied),
        dtype=stored_dtype(target_headers),
        num_mtp_modules=0 if source is None else len(source.modules),
        mtp_layout=None if source is None else source.layout,
        mtp_path=None if source is None else source.path,
        num_mtp_parameters=0 if source is None else source.num_parameters,
    )
    return info, config, source


def _check_all_known(path: Path, config: PreTrainedConfig, unknown: list[str]) -> None:
    if unknown:
        raise ModelLoadError(
            f"{path}: tensors that look like those of MTP modules, in no layout that is known of {config.model_type}; "
            f"surplus: {listed(unknown)}. With num_speculative_tokens=0 the model runs without modules"
        )


def _examine_shape(model: str | Path, mtp: str | Path | None) -> tuple[CheckpointInfo, PreTrainedConfig]:
    """As `_examine`, for random weights: from config.json alone, and the headers of the file that `mtp` names."""
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelLoadError(f"{model}: no such directory; random weights need one with config.json")
    config = _read_config(path)
    architecture = _check_runnable(path, config)
    text_config: Any = config.get_text_config(decoder=True)
    beside = None if mtp is None else mtp_file(path, mtp)
    if beside is None:
        num_modules = dummy.declared_modules(config)
    else:
        num_modules = len(find_mtp_beside(beside, text_config.hidden_size).modules)
    num_parameters, num_mtp_parameters = dummy.count_parameters(config, num_modules)
    layout: MtpLayout = "inside" if beside is None else "beside"
    info = _info(
        path,
        config,
        architecture,
        num_parameters=num_parameters,
        dtype=_declared_dtype(text_config),
        num_mtp_modules=num_modules,
        mtp_layout=layout if num_modules else None,
        mtp_path=(beside or path) if num_modules else None,
        num_mtp_parameters=num_mtp_parameters,
    )
    return info, config


def _declared_dtype(text_config: Any) -> str:
    """As the configuration says; bfloat16, which most are published in, if it says nothing."""
    return str(getattr(text_config, "dtype", None) or "bfloat16").removeprefix("torch.")


def _info(path: Path, config: PreTrainedConfig, architecture: str, **contents: Any) -> CheckpointInfo:
    """With what the configuration says; contents: what is known of the weights."""
    text_config: Any = config.get_text_config(decoder=True)
    return CheckpointInfo(
        path=path,
        architecture=architecture,
        model_type=config.model_type,
        num_hidden_layers=text_config.num_hidden_layers,
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        max_position_embeddings=_max_position_embeddings(path, text_config),
        tie_word_embeddings=bool(getattr(text_config, "tie_word_embeddings", False)),
        **contents,
    )


def _read_config(path: Path) -> PreTrainedConfig:
    """A fresh config object, so that changing it changes nobody else's."""
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path}: no config.json, so not a checkpoint that transformers can load")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # every model's configuration has validators and errors of its own
        raise ModelLoadError(f"{path / 'config.json'}: transformers cannot read it: {error}") from error
    return config


def _check_runnable(path: Path, config: PreTrainedConfig) -> str:
    """The class that runs `config`; ModelLoadError if it is none that Foredraft runs."""
    text_config: Any = config.get_text_config(decoder=True)
    file = path / "config.json"
    if config.is_encoder_decoder or type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        raise ModelLoadError(f"{file}: {config.model_type} has an encoder; only decoders run")
    family = family_of(config)
    model_class = family.model_class(config)
    if model_class is None:
        raise ModelLoadError(f"{file}: {config.model_type} is not a decoder that transformers knows")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelLoadError(f"{file}: quantized checkpoints (`quantization_config`) do not run yet")
    kinds = [*(getattr(text_config, "layer_types", None) or []), *(getattr(text_config, "mtp_layer_types", None) or [])]
    if refused := sorted(set(kinds) - family.layer_kinds):
        raise ModelLoadError(f"{file}: layers of kind {', '.join(refused)} do not run yet")
    if refused := sorted(kind for kind in _rope_types(text_config) if "dynamic" in kind or kind == "longrope"):
        raise ModelLoadError(
            f"{file}: rope_type {', '.join(refused)} turns with the length of the longest sequence in a batch, "
            f"so cached keys would not be those of one prefill; it does not run"
        )
    if reason := family.refusal(config):
        raise ModelLoadError(f"{file}: {reason}")
    return str(model_class.__name__)


def _rope_types(text_config: Any) -> set[str]:
    """The kinds of rotary embedding; a configuration holds one set of parameters, or one for each kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    several = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(one.get("rope_type", "default")) for one in several}


def _max_position_embeddings(path: Path, text_config: Any) -> int:
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:
        raise ModelLoadError(f"{path / 'config.json'}: max_position_embeddings is missing")
    return int(limit)


def _load_target(
    info: CheckpointInfo, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    family = family_of(config)
    model_class = family.model_class(config)
    options: dict[str, Any] = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    target: PreTrainedModel
    report: dict[str, Any]
    try:
        if info.dtype == str(dtype).removeprefix("torch."):  # weights may stay in the files, which are mapped
            target, report = model_class.from_pretrained(info.path, config=family.own_config(config), **options)
        else:
            target, report = _load_converted(info.path, model_class, family.own_config(config), options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelLoadError(f"{info.path}: transformers cannot load it: {error}") from error
    # Surplus tensors are allowed, as in transformers: MTP modules are some, and towers that a decoder leaves out.
    if problems := describe_problems(report["missing_keys"], (), report["mismatched_keys"]):
        raise ModelLoadError(f"{info.path}: weights do not fit {info.architecture}: {'; '.join(problems)}")
    return target.requires_grad_(False)


def _load_converted(
    path: Path, model_class: Any, config: PreTrainedConfig, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """As transformers loads a directory, but tensor by tensor: of a mapped file all that was looked at takes memory,
    until the last weight is converted."""
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in weight_files(path):
            opened = stack.enter_context(safe_open(file, framework="pt", backend="pread"))
            tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (as in `read_headers`)
        target, report = model_class.from_pretrained(None, config=config, state_dict=tensors, **options)
    if (path / GENERATION_CONFIG_NAME).is_file():
        target.generation_config = GenerationConfig.from_pretrained(path)
    return target, report


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' load report (its lists are checked here) and, off a terminal, its progress bar from stderr."""

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    is_bar_hidden = transformers_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    logger.addFilter(is_no_report)
    if is_bar_hidden:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)
        if is_bar_hidden:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a checkpoint's directory, None if there is none. ModelLoadError."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # as with configurations: tokenizers fail in ways of their own
        raise ModelLoadError(f"{path}: transformers cannot load its tokenizer: {error}") from error
    return tokenizer


def _eos_token_ids(target: PreTrainedModel) -> frozenset[int]:
    generation_config, text_config = target.generation_config, target.config.get_text_config(decoder=True)
    for ids in (getattr(generation_config, "eos_token_id", None), getattr(text_config, "eos_token_id", None)):
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
