"""Cached prefix blocks on disk, so that a new process need not compute them again.

One directory holds the snapshots of any number of signatures, each under a stem of its own:

    foredraft-SIGNATURE.json                              the manifest: a generation, and the digests of its shards
    foredraft-SIGNATURE-GENERATION-NUMBER.safetensors     a shard: blocks
    foredraft-SIGNATURE.lock                              held by the process that saves

A save writes the shards of a new generation, which nobody reads, and then replaces the manifest in one rename. So there
is one complete generation at any moment, whatever stops the process. The manifest has the digest of every byte of a
shard: one that is torn, altered or of another generation is never served. A shard is two tensors of bytes, `nodes`
(JSON) and `rows` (the rows of all parts, one after the other).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import NoneType
from typing import Any

import safetensors.torch
import torch
from filelock import FileLock
from torch import Tensor

FORMAT_VERSION = 1
SHARD_BYTES = 64 << 20  # rows in a shard; a larger node has one to itself
SHARD_NODES = 4096
MAX_MANIFEST_BYTES = 64 << 20
LOCK_SECONDS = 60.0  # another save takes less, unless its process hangs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Signature:
    """What must agree for a file to be usable.

    model and mtp: fingerprints of the checkpoints, "" for no MTP; layout: the layers, widths and windows as text.
    """

    model: str
    mtp: str
    dtype: str
    layout: str
    block_size: int


@dataclass(frozen=True)
class SavedPart:
    """The rows of one block in one cache group, uint8 [num_bytes], contiguous on the CPU.

    continuation: the tokens after the block that its rows depend on as well, () for the target's groups.
    """

    group: int
    continuation: tuple[int, ...]
    rows: Tensor


@dataclass(frozen=True)
class SavedNode:
    """One full block of tokens in the tree of prefixes.

    parent: index of the node before it among those that are saved or loaded, -1 for the first block of a sequence.
    salt: the caller's cache salt, the same along a sequence.
    """

    salt: str | None
    parent: int
    token_ids: tuple[int, ...]
    parts: tuple[SavedPart, ...]


def save_snapshot(directory: Path, signature: Signature, nodes: Iterable[SavedNode]) -> int:
    """Replace what the directory holds for this signature by `nodes`, parents before children; return their number.

    Takes one shard of `nodes` into memory at a time, and copies the rows of a node before it asks for the next. `nodes`
    may be a `load_snapshot` of the same files. Waits for another save of this signature to end; the last one wins.

    Raises OSError if the directory cannot be made or written (or locked, within LOCK_SECONDS), ValueError for a node
    that breaks its contract, and what `nodes` raises. The snapshot that was there before is kept then, and what was
    written of the new one is deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = _Files.of(directory, signature)
    with FileLock(files.lock, timeout=LOCK_SECONDS):
        before = _generation(files, signature)
        try:
            num_nodes = _write_generation(files, signature, nodes)
        except BaseException:
            _sweep(files, keep={before, _generation(files, signature)})
            raise
        _sweep(files, keep={_generation(files, signature)})
    return num_nodes


def load_snapshot(directory: Path, signature: Signature) -> Iterator[SavedNode]:
    """Yield the nodes that are intact, parents before children; `parent` counts among the yielded ones.

    Reads one shard at a time. A shard that is missing or damaged is ignored, and so are the nodes after its own; a
    warning names the file and the reason. Nothing is yielded, without a warning, where nothing was saved. A save that
    ends meanwhile deletes the files that were not read yet. Raises nothing.
    """
    files = _Files.of(directory, signature)
    indices: dict[str, int] = {}
    num_yielded = 0
    for path, shard in _listed_shards(files, signature):
        num_orphans = 0
        for parent, node in _read_shard(path, shard, signature.block_size):
            if parent is not None and parent not in indices:
                num_orphans += 1
                continue
            indices.setdefault(_chain_digest(parent, node.salt, node.token_ids), num_yielded)
            num_yielded += 1
            # Rows of their own: a view would keep the whole shard in memory.
            parts = tuple(replace(part, rows=part.rows.clone()) for part in node.parts)
            yield replace(node, parent=-1 if parent is None else indices[parent], parts=parts)
        if num_orphans:
            logger.warning("%s: %d blocks are ignored: those before them are missing", path, num_orphans)


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """The names of one signature's files."""

    directory: Path
    stem: str

    @classmethod
    def of(cls, directory: Path, signature: Signature) -> _Files:
        return cls(directory, f"foredraft-{_json_digest(_signature_record(signature))[:32]}")

    @property
    def manifest(self) -> Path:
        return self.directory / f"{self.stem}.json"

    @property
    def new_manifest(self) -> Path:
        return self.directory / f"{self.stem}.json.tmp"

    @property
    def lock(self) -> Path:
        return self.directory / f"{self.stem}.lock"

    def shard(self, generation: str, number: int) -> Path:
        return self.directory / f"{self.stem}-{generation}-{number:05d}.safetensors"

    def generation_of(self, path: Path) -> str | None:
        """The generation of a file that is named like a shard, None for other files."""
        match = re.fullmatch(rf"{self.stem}-([0-9a-f]{{16}})-\d{{5,}}\.safetensors", path.name)
        return match and match[1]


def _signature_record(signature: Signature) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **asdict(signature)}


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()


def _json_digest(value: object) -> str:
    return _digest(json.dumps(value, sort_keys=True).encode())


def _read(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file. Raises ValueError for one that is too large to be the right one, or that could block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"{status.st_size} bytes, {max_bytes} at most were expected")
    return path.read_bytes()


def _write(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Wait until the names in the directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(files: _Files, keep: set[str | None]) -> None:
    """Delete this signature's shards of generations that are not in `keep`, and a manifest that was not finished."""
    try:
        for path in list(files.directory.iterdir()):
            generation = files.generation_of(path)
            if path == files.new_manifest or (generation is not None and generation not in keep):
                path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: old snapshot files are not deleted: %s", files.directory, error)


# -- the manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """What a shard's file must be."""

    num_bytes: int
    digest: str


@dataclass(frozen=True)
class _Manifest:
    """A generation and its shards, in the order of their numbers."""

    generation: str
    shards: tuple[_Shard, ...]


def _read_manifest(files: _Files, signature: Signature) -> _Manifest:
    """Raises OSError if it cannot be read, ValueError or RecursionError if it is damaged or of another signature."""
    record = json.loads(_read(files.manifest, MAX_MANIFEST_BYTES))
    body = _field(record, "body", dict)
    if _field(record, "digest", str) != _json_digest(body):
        raise ValueError("its digest is wrong")
    if _field(body, "signature", dict) != _signature_record(signature):
        raise ValueError("it is of another model, cache layout or format")
    generation = _field(body, "generation", str)
    if not re.fullmatch("[0-9a-f]{16}", generation):
        raise ValueError(f"generation: {generation!r}")
    shards = (_Shard(_field(s, "num_bytes", int), _field(s, "digest", str)) for s in _field(body, "shards", list))
    return _Manifest(generation, tuple(shards))


def _write_manifest(files: _Files, signature: Signature, manifest: _Manifest) -> None:
    """Make `manifest` the one that is read. Raises OSError, most likely with the old one in place."""
    body = {"signature": _signature_record(signature), **asdict(manifest)}
    _write(files.new_manifest, json.dumps({"digest": _json_digest(body), "body": body}).encode())
    _sync_directory(files.directory)
    files.new_manifest.replace(files.manifest)
    _sync_directory(files.directory)


def _generation(files: _Files, signature: Signature) -> str | None:
    """The generation that is read now, None if there is none. Raises OSError if that cannot be known."""
    try:
        return _read_manifest(files, signature).generation
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _listed_shards(files: _Files, signature: Signature) -> Iterator[tuple[Path, _Shard]]:
    """The shards to read; none, with a warning, if there is a manifest that is of no use."""
    try:
        manifest = _read_manifest(files, signature)
    except FileNotFoundError:
        return
    except Exception as error:  # whatever a hostile file provokes
        logger.warning("%s is ignored: %r", files.manifest, error)
        return
    for number, shard in enumerate(manifest.shards):
        yield files.shard(manifest.generation, number), shard


# -- shards ----------------------------------------------------------------------------------------------------------


def _write_generation(files: _Files, signature: Signature, nodes: Iterable[SavedNode]) -> int:
    """Write the shards, then the manifest; return the number of nodes."""
    generation = secrets.token_hex(8)
    shards: list[_Shard] = []
    num_nodes = 0
    for records, rows in _packed(nodes, signature.block_size):
        shards.append(_write_shard(files.shard(generation, len(shards)), records, rows))
        num_nodes += len(records)
    _write_manifest(files, signature, _Manifest(generation, tuple(shards)))
    return num_nodes


def _packed(nodes: Iterable[SavedNode], block_size: int) -> Iterator[tuple[list[dict[str, Any]], bytearray]]:
    """The nodes in shards: their records, and the rows of their parts one after the other."""
    digests: list[str] = []
    records: list[dict[str, Any]] = []
    rows = bytearray()
    for node in nodes:
        if not -1 <= node.parent < len(digests):
            raise ValueError(f"parent must be -1 or the index of a node before it: {node.parent} at {len(digests)}")
        _check_node(node, block_size)
        num_bytes = sum(part.rows.numel() for part in node.parts)
        if records and (len(records) >= SHARD_NODES or len(rows) + num_bytes > SHARD_BYTES):
            yield records, rows
            records, rows = [], bytearray()
        parent = None if node.parent < 0 else digests[node.parent]
        digests.append(_chain_digest(parent, node.salt, node.token_ids))
        records.append(_node_record(parent, node))
        for part in node.parts:
            rows += part.rows.numpy().tobytes()
    if records:
        yield records, rows


def _write_shard(path: Path, records: list[dict[str, Any]], rows: bytearray) -> _Shard:
    text = bytearray(json.dumps(records, separators=(",", ":")).encode())
    data = safetensors.torch.save({"nodes": _byte_tensor(text), "rows": _byte_tensor(rows)})
    _write(path, data)
    return _Shard(len(data), _digest(data))


def _read_shard(path: Path, shard: _Shard, block_size: int) -> Sequence[tuple[str | None, SavedNode]]:
    """What `_decoded` returns for the shard; nothing, with a warning, if it is missing or damaged."""
    try:
        data = _read(path, shard.num_bytes)
        if _digest(data) != shard.digest:
            raise ValueError("its digest is wrong")
        return _decoded(data, block_size)
    except Exception as error:  # whatever a hostile file provokes
        logger.warning("%s is ignored: %r", path, error)
        return ()


def _byte_tensor(data: bytearray) -> Tensor:
    """`data` without a copy; torch.frombuffer refuses an empty buffer."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _decoded(data: bytes, block_size: int) -> list[tuple[str | None, SavedNode]]:
    """The nodes of a shard, each with the digest of the prefix before it; `parent` is not set and rows are views.

    Raises, whatever comes first, if `data` is not a shard.
    """
    tensors = safetensors.torch.load(data)
    records = json.loads(tensors["nodes"].numpy().tobytes())
    # torch.split insists that the sizes are not negative and add up to what there is.
    sizes = [_field(part, "num_bytes", int) for record in records for part in _field(record, "parts", list)]
    rows = iter(torch.split(tensors["rows"], sizes))
    nodes = [(_field(record, "parent", str, NoneType), _node(record, rows)) for record in records]
    for _, node in nodes:
        _check_node(node, block_size)
    return nodes


# -- nodes -----------------------------------------------------------------------------------------------------------


def _chain_digest(parent: str | None, salt: str | None, token_ids: tuple[int, ...]) -> str:
    """What names a prefix, whichever files hold its blocks: salt and tokens of all of them."""
    return _json_digest([parent, salt, token_ids])


def _node_record(parent: str | None, node: SavedNode) -> dict[str, Any]:
    parts = [
        {"group": part.group, "continuation": part.continuation, "num_bytes": part.rows.numel()} for part in node.parts
    ]
    return {"salt": node.salt, "parent": parent, "token_ids": node.token_ids, "parts": parts}


def _node(record: object, rows: Iterator[Tensor]) -> SavedNode:
    parts = tuple(
        SavedPart(_field(part, "group", int), tuple(_field(part, "continuation", list)), next(rows))
        for part in _field(record, "parts", list)
    )
    return SavedNode(_field(record, "salt", str, NoneType), -1, tuple(_field(record, "token_ids", list)), parts)


def _field(record: object, key: str, *kinds: type) -> Any:
    """The value of `key` in what JSON has given. Raises ValueError unless it is there and of one of the kinds."""
    if not isinstance(record, dict) or key not in record:
        raise ValueError(f"{key} is missing")
    value = record[key]
    if type(value) not in kinds:  # not isinstance: True is no number
        raise ValueError(f"{key} is of type {type(value).__name__}")
    return value


def _check_node(node: SavedNode, block_size: int) -> None:
    """Raise ValueError unless the node is what `SavedNode` and `SavedPart` say."""
    if len(node.token_ids) != block_size:
        raise ValueError(f"token_ids must fill a block of {block_size}: {len(node.token_ids)} tokens")
    numbers = [*node.token_ids, *(n for part in node.parts for n in (part.group, *part.continuation))]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("token ids and groups must be whole numbers, 0 or more")
    for rows in (part.rows for part in node.parts):
        if rows.dtype != torch.uint8 or rows.dim() != 1 or not rows.is_contiguous() or rows.device.type != "cpu":
            raise ValueError(f"rows must be uint8 [num_bytes], contiguous on the CPU: {rows.dtype} {list(rows.shape)}")
