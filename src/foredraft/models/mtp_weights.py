"""MTP weights of a checkpoint: finding them, mapping their names, building transformers' `MtpModel` from them.

Three layouts are known. Beside the checkpoint, in `mtp.safetensors`, tensors have `MtpModel`'s own names,
`layers.{k}.…`. Inside, module k is either `model.layers.{num_hidden_layers + k}.…` or `mtp.layers.{k}.…`; a single
module may keep its projection and norms one level up, as `mtp.fc`, `mtp.norm` and so on. A family knows the
names that its parts have beyond that. How many modules there are follows from these names alone: published
configurations name the depth in several ways, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from foredraft.errors import ModelLoadError
from foredraft.models.checkpoint_files import TensorHeader, read_headers
from foredraft.models.families.family import Family
from foredraft.models.families.registry import family_of
from foredraft.models.shared_copies import check_copies

SCALE_SUFFIX = "_scale"

MtpLayout = Literal["beside", "inside"]

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_BESIDE = re.compile(r"layers\.(?P<index>\d+)\..+|shared_post_norm\.weight")
# The modules use the target's embedding and head; published checkpoints repeat both in every module.
_SHARED = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head|shared_head|shared_head\.head)\.(?:weight|bias)")
# How the names begin of layers that are no tower's, and what else a tensor of a module would be called.
_LAYER = re.compile(
    r"(?:(?:model|language_model|text_model|decoder|transformer|backbone|llm)\.)*(?:layers|blocks|h)\.(\d+)\..+"
)
_LIKE_MTP = re.compile(r"(?:.*[._])?(?:mtp|nextn)(?:[._\d].*)?", re.IGNORECASE)
_PROJECTION = re.compile(r"(?:layers\.\d+\.(?:eh_proj|input_proj)|fc)\.weight")


@dataclass(frozen=True)
class MtpSource:
    """Where the modules of a checkpoint are.

    `modules[k]` maps the tensors of module k from `MtpModel`'s numbering to their headers; int8 matrices have their
    row scales in `scales`, by the same name. `owned` are the checkpoint's names that are not the target's, the
    repeated embedding and head included; `copies` are those two, each with the number of its module.
    """

    layout: MtpLayout
    path: Path
    modules: tuple[dict[str, TensorHeader], ...]
    scales: dict[str, TensorHeader]
    owned: frozenset[str]
    copies: tuple[tuple[int, TensorHeader], ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(header.num_elements for module in self.modules for header in module.values())


def find_mtp_beside(file: Path, hidden_size: int) -> MtpSource:
    """The modules in an `mtp.safetensors` file. ModelLoadError if it is damaged or made for another hidden size."""
    headers = read_headers([file])
    names = {name: (int(match["index"] or 0), name) for name in headers if (match := _BESIDE.fullmatch(name))}
    names |= {name: (0, name) for name in headers if name not in names and _SHARED.fullmatch(name)}
    if surplus := [name for name in headers if name not in names]:
        raise ModelLoadError(f"{file}: surplus tensors, of no MTP module: {listed(surplus)}")
    source = _collect("beside", file, headers, names, hidden_size)
    if not source.modules:
        raise ModelLoadError(f"{file}: no MTP module in it (expected tensors named layers.0.…)")
    return source


def find_mtp_inside(
    directory: Path, headers: Mapping[str, TensorHeader], num_hidden_layers: int, hidden_size: int, family: Family
) -> MtpSource | None:
    """The modules among a checkpoint's own tensors; None if it has none. ModelLoadError as `find_mtp_beside`."""
    found = ((name, family.mtp_name(name, num_hidden_layers)) for name in headers)
    names = {name: place for name, place in found if place is not None}
    return _collect("inside", directory, headers, names, hidden_size) if names else None


def unknown_mtp_tensors(names: Iterable[str], source: MtpSource | None, num_hidden_layers: int) -> list[str]:
    """Those among a checkpoint's tensors that look like a module's, but that `source` knows nothing of."""
    owned: frozenset[str] = frozenset() if source is None else source.owned
    unknown = []
    for name in names:
        layer = _LAYER.fullmatch(name)
        if name not in owned and (_LIKE_MTP.fullmatch(name) or (layer and int(layer[1]) >= num_hidden_layers)):
            unknown.append(name)
    return sorted(unknown)


def _collect(
    layout: MtpLayout,
    path: Path,
    headers: Mapping[str, TensorHeader],
    names: Mapping[str, tuple[int, str]],
    hidden_size: int,
) -> MtpSource:
    """Sort the tensors `names` (their own name to module and new name) into modules, and check what headers show."""
    modules: dict[int, dict[str, TensorHeader]] = {}
    scales: dict[str, TensorHeader] = {}
    copies: list[tuple[int, TensorHeader]] = []
    for name, (index, new_name) in names.items():
        if _SHARED.fullmatch(name):
            copies.append((index, headers[name]))
            continue
        scaled = headers.get(name.removesuffix(SCALE_SUFFIX)) if name.endswith(SCALE_SUFFIX) else None
        if scaled is not None and scaled.dtype == "I8":
            scales[new_name.removesuffix(SCALE_SUFFIX)] = headers[name]
        else:
            modules.setdefault(index, {})[new_name] = headers[name]
    if absent := [index for index in range(len(modules)) if index not in modules]:
        raise ModelLoadError(f"{path}: MTP module {absent[0]} is missing, though there is a module {max(modules)}")
    by_index = tuple(modules[index] for index in sorted(modules))
    source = MtpSource(layout, path, by_index, scales, frozenset(names), tuple(copies))
    for module in source.modules:
        for new_name, header in module.items():
            _check_storage(header, scales.get(new_name))
            if _PROJECTION.fullmatch(new_name) and header.shape != (hidden_size, 2 * hidden_size):
                raise ModelLoadError(
                    f"{header.file}: {header.name} is {list(header.shape)}, but a target of hidden size {hidden_size} "
                    f"needs [{hidden_size}, {2 * hidden_size}]; these MTP modules belong to another target"
                )
    return source


def _check_storage(header: TensorHeader, scale: TensorHeader | None) -> None:
    """Refuse tensors that a cast alone would turn into wrong weights."""
    if header.dtype in _FLOAT_DTYPES:
        return
    if header.dtype != "I8":
        raise ModelLoadError(
            f"{header.file}: {header.name} is stored as {header.dtype}; only floats and int8 can be read"
        )
    if scale is None:
        raise ModelLoadError(
            f"{header.file}: int8 tensor {header.name} lacks its row scales {header.name}{SCALE_SUFFIX}"
        )
    if len(header.shape) != 2 or scale.dtype not in _FLOAT_DTYPES or scale.num_elements != header.shape[0]:
        raise ModelLoadError(
            f"{scale.file}: {scale.name} ({scale.dtype} {list(scale.shape)}) is not one float a row "
            f"of {header.name} {list(header.shape)}"
        )


def set_mtp_fields(config: PreTrainedConfig, num_modules: int) -> None:
    """Write into `config` what `MtpModel` needs to know of `num_modules` modules; the caller must own `config`.

    Kinds of layer that it does not name itself are those of the target's last layer.
    """
    text_config: Any = config.get_text_config(decoder=True)
    family_of(config).prepare(text_config, num_modules)
    text_config.num_mtp_layers = num_modules
    for field in ("layer_types", "mlp_layer_types"):
        target_kinds = getattr(text_config, field, None)
        if target_kinds is not None:
            named = list(getattr(text_config, f"mtp_{field}", None) or [])
            kinds = named[:num_modules]
            filler = kinds[-1] if kinds else target_kinds[-1]
            kinds += [filler] * (num_modules - len(kinds))
            if kinds != named:  # some configurations work them out, and cannot be told
                setattr(text_config, f"mtp_{field}", kinds)


def build_mtp_model(
    target: PreTrainedModel, source: MtpSource, num_modules: int, dtype: torch.dtype, device: torch.device
) -> MtpModel:
    """An `MtpModel` of the first `num_modules` modules in `dtype` on `device`; later ones are not read.

    The embedding, head and rotary embedding are the target's own. The target's config must have been through
    `set_mtp_fields`. ModelLoadError names tensors that are missing, surplus or of the wrong shape, and copies of the
    embedding or the head that are not the target's.
    """
    model = new_mtp_model(target, num_modules, dtype, block_width(source))
    modules = source.modules[:num_modules]
    check_copies(target, (header for module, header in source.copies if module < num_modules))
    headers = [header for module in modules for header in module.values()]
    is_converted = any(header.dtype_name != str(dtype).removeprefix("torch.") for header in headers)
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt", backend="pread" if is_converted else "mmap"))
            for file in {header.file for header in headers}
        }
        tensors: dict[str, Any] = {}
        for module in modules:
            for name, header in module.items():
                tensor = opened[header.file].get_slice(header.name)
                scale = source.scales.get(name)
                tensors[name] = (
                    tensor if scale is None else _ScaledRows(tensor, opened[scale.file].get_slice(scale.name))
                )
        # Not `get_weight_conversions`: it would renumber names that are numbered from 0 already.
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping += get_model_conversion_mapping(target, add_legacy=False)
        load_config = LoadStateDictConfig(
            weight_mapping=mapping,  # type: ignore[arg-type]
            device_map={"": device},
            dtype=dtype,
            dtype_plan=target._get_dtype_plan(dtype),
        )
        info, _ = convert_and_load_state_dict_in_model(model, tensors, load_config)
    missing = {name for name in info.missing_keys if not name.startswith(("embed_tokens.", "shared_head."))}
    missing |= {name for name, tensor in _tensors(model) if tensor.is_meta}
    problems = describe_problems(
        missing - {name for name, *_ in info.mismatched_keys}, info.unexpected_keys, info.mismatched_keys
    )
    problems += [f"{name} cannot be converted" for name in info.conversion_errors]
    if problems:
        raise ModelLoadError(f"{source.path}: MTP weights do not fit {type(target).__name__}: {'; '.join(problems)}")
    model.train(False)
    return model.requires_grad_(False)


def block_width(source: MtpSource) -> int | None:
    """Neurons of the modules' MLP, as the weights say, which may be fewer than the target's; None: no plain MLP."""
    header = source.modules[0].get("layers.0.mtp_block.mlp.gate_proj.weight")
    return None if header is None or len(header.shape) != 2 else header.shape[0]


def new_mtp_model(target: PreTrainedModel, num_modules: int, dtype: torch.dtype, width: int | None = None) -> MtpModel:
    """An `MtpModel` whose own weights are on the meta device (elsewhere it would initialise the target's embedding).

    width: neurons of a module's MLP, where it is a plain one; None: as many as the target's have.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(_plain_embedding(target))
            stack.enter_context(_of_width(target, width))
            for context in MtpModel.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            model = MtpModel(target, num_modules)
            family_of(target.config).complete(model)
    except (AttributeError, TypeError, ValueError, StopIteration) as error:
        raise ModelLoadError(f"transformers cannot build MTP modules for {type(target).__name__}: {error}") from error
    # Decoders with one window for all layers do not list kinds, and `MtpModel` would mask as if there were no window.
    if getattr(model.config, "layer_types", None) is None and getattr(model.config, "sliding_window", None) is not None:
        model.config.layer_types = ["sliding_attention"] * num_modules
    return model


@contextmanager
def _plain_embedding(target: PreTrainedModel) -> Iterator[None]:
    """Meanwhile the target's embedding has no norm, if it has one: `MtpModel` would copy all, to leave out the norm."""
    normed = target.get_input_embeddings()
    if not hasattr(normed, "embed_norm"):
        yield
        return
    plain = nn.Embedding.from_pretrained(normed.get_parameter("weight"))  # type: ignore[no-untyped-call]
    target.set_input_embeddings(plain)
    try:
        yield
    finally:
        target.set_input_embeddings(normed)


@contextmanager
def _of_width(target: PreTrainedModel, width: int | None) -> Iterator[None]:
    """Meanwhile the target's configuration has MLPs of this width, if it knows but one: `MtpModel` copies it."""
    text_config: Any = target.config.get_text_config(decoder=True)
    kept = getattr(text_config, "intermediate_size", None)
    is_narrower = width is not None and isinstance(kept, int) and width < kept
    if not is_narrower or getattr(text_config, "mlp_layer_types", None) is not None:
        yield
        return
    text_config.intermediate_size = width
    try:
        yield
    finally:
        text_config.intermediate_size = kept


def _tensors(model: MtpModel) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def describe_problems(
    missing: Iterable[str], surplus: Iterable[str], mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]
) -> list[str]:
    """What is wrong with a load, a phrase for each kind of problem; empty if nothing is."""
    shapes = [f"{name} {list(stored)}, not {list(wanted)}" for name, stored, wanted in mismatched]
    kinds = {"missing": sorted(missing), "surplus": sorted(surplus), "wrong shape": sorted(shapes)}
    return [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]


def listed(names: list[str], limit: int = 8) -> str:
    """The names for a message, no more than `limit` of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class _ScaledRows:
    """A lazy int8 matrix that expands when it is read, as a safetensors slice does: one full matrix at a time."""

    def __init__(self, values: Any, scales: Any) -> None:
        self._values, self._scales = values, scales

    def __getitem__(self, index: Any) -> Tensor:
        scales: Tensor = self._scales[...].to(torch.float32).view(-1, 1)
        expanded: Tensor = (self._values[...].to(torch.float32) * scales)[index]
        return expanded
