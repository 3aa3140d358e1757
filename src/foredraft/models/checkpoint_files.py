"""The files of a checkpoint: where they are, and what the headers of its safetensors files say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from foredraft.errors import ModelLoadError

MTP_FILE_NAME = "mtp.safetensors"

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = ["*.json", "model*.safetensors", MTP_FILE_NAME, "tokenizer*", "*.model", "vocab*", "merges.txt", "*.jinja"]
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors header says of one tensor: the file, its name there, dtype (`F32`, `I8`, ...) and shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_packed(self) -> bool:
        """Whether these are weights that a cast alone would turn into wrong ones; masks and counts are none."""
        return self.dtype.startswith(("F8", "F4")) or (
            self.dtype in ("I8", "U8", "I32") and self.name.endswith("weight")
        )

    @property
    def dtype_name(self) -> str:
        """The dtype by torch's name, if that is known."""
        return _DTYPE_NAMES.get(self.dtype, self.dtype)


def resolve_directory(model: str | Path) -> Path:
    """The directory `model` names, or a local snapshot of the hub repository of that id. ModelLoadError if neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if isinstance(model, Path) or path.exists() or not _HUB_ID.fullmatch(model):
        raise ModelLoadError(f"{model}: no such directory")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{model}: no such directory, and not to be had from the hub: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the checkpoint in `path`, of which transformers takes model.safetensors first."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelLoadError(
            f"{path}: neither model.safetensors nor model.safetensors.index.json; only safetensors load"
        )
    try:
        return sorted({path / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index}: not an index of safetensors files ({error})") from error


def mtp_file(path: Path, mtp: str | Path | None) -> Path | None:
    """The mtp.safetensors to use: `mtp` or the one in it, which must exist; else one beside the checkpoint, if any."""
    if mtp is None:
        beside = path / MTP_FILE_NAME
        return beside if beside.is_file() else None
    given = Path(mtp).expanduser()
    file = given / MTP_FILE_NAME if given.is_dir() else given
    if not file.is_file():
        raise ModelLoadError(f"{file}: no such file of MTP modules")
    return file


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Headers of all tensors in safetensors `files`, by name; no tensor is read.

    ModelLoadError names a file that is missing, truncated or no safetensors file.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                    tensor = tensors.get_slice(name)
                    headers[name] = TensorHeader(file, name, tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file}: cannot be read as safetensors ({error}); is the file complete?") from error
    return headers


def missing_experts(names: Iterable[str]) -> list[str]:
    """The tensors that would close the gaps among numbered experts, whose matrices transformers stacks."""
    numbers: dict[tuple[str, str], set[int]] = {}
    counts: dict[str, int] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return sorted(
        f"{stem}{number}{rest}"
        for (stem, rest), present in numbers.items()
        for number in range(counts[stem])
        if number not in present
    )


def count_parameters(headers: Mapping[str, TensorHeader], is_tied: bool) -> int:
    """Elements of all tensors; a head that repeats the embedding (`is_tied`) is not counted."""
    return sum(header.num_elements for name, header in headers.items() if not (is_tied and name == "lm_head.weight"))


def stored_dtype(headers: Mapping[str, TensorHeader]) -> str:
    """The dtype that most elements are stored in, by torch's name (`bfloat16`)."""
    sizes: Counter[str] = Counter()
    for header in headers.values():
        sizes[header.dtype] += header.num_elements
    dtype = max(sizes, key=sizes.__getitem__, default="none")
    return _DTYPE_NAMES.get(dtype, dtype)
