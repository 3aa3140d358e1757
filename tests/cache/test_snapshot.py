"""Snapshots: what is loaded is what was saved, or less of it with a warning; never anything else."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from errno import ENOSPC
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from foredraft.cache import snapshot
from foredraft.cache.snapshot import SavedNode, SavedPart, Signature, load_snapshot, save_snapshot

SIGNATURE = Signature(model="model", mtp="mtp", dtype="float32", layout="[1, 2]", block_size=2)
SALTS = (None, "", "x", "\N{SNOWMAN}\ud800")

Plain = tuple[str | None, int, tuple[int, ...], tuple[tuple[int, tuple[int, ...], bytes], ...]]


def plain(nodes: Sequence[SavedNode]) -> list[Plain]:
    """The nodes as values that compare by content."""
    return [
        (n.salt, n.parent, n.token_ids, tuple((p.group, p.continuation, bytes(p.rows.tolist())) for p in n.parts))
        for n in nodes
    ]


def without(nodes: Sequence[SavedNode], lost: set[int]) -> list[SavedNode]:
    """What remains if the nodes of these indices are lost, and their descendants with them."""
    indices: dict[int, int] = {-1: -1}
    kept: list[SavedNode] = []
    for index, node in enumerate(nodes):
        if index not in lost and node.parent in indices:
            indices[index] = len(kept)
            kept.append(replace(node, parent=indices[node.parent]))
    return kept


def rows(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def two_parts(number: int) -> tuple[SavedPart, ...]:
    return SavedPart(0, (), rows(number, 1, 2, 255)), SavedPart(1, (number, 7), rows(number + 100))


def chain_and_branches(seed: int = 0) -> list[SavedNode]:
    """Eight nodes: a chain 0-1-2-3, a branch 4-5 that leaves it after 0, and two roots that differ in salt only."""
    parents = [-1, 0, 1, 2, 0, 4, -1, -1]
    salts = [None] * 6 + ["", "x"]
    tokens = [(seed, number) for number in range(6)] + [(seed, 0)] * 2
    return [
        SavedNode(salt, parent, token_ids, two_parts(number))
        for number, (salt, parent, token_ids) in enumerate(zip(salts, parents, tokens))
    ]


NODES = chain_and_branches()
SHARD_OF = [0, 0, 1, 1, 2, 2, 3, 3]  # with two nodes a shard


@pytest.fixture
def two_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SHARD_NODES", 2)


@contextmanager
def warnings_of_snapshots() -> Iterator[list[str]]:
    """The messages of `foredraft.cache.snapshot` from level WARNING on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("foredraft.cache.snapshot")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def loaded(directory: Path, signature: Signature = SIGNATURE) -> tuple[list[Plain], list[str]]:
    """What is loaded, and the warnings."""
    with warnings_of_snapshots() as messages:
        return plain(list(load_snapshot(directory, signature))), messages


def shards(directory: Path) -> list[Path]:
    """The shards of a directory with one snapshot, in order."""
    return sorted(directory.glob("*.safetensors"))


def manifest(directory: Path) -> Path:
    (path,) = directory.glob("*.json")
    return path


def assert_only_shard_is_lost(directory: Path, number: int) -> None:
    """What `NODES` are without a shard is loaded, with a warning that names the shard."""
    found, messages = loaded(directory)
    lost = {index for index, shard in enumerate(SHARD_OF) if shard == number}
    assert found == plain(without(NODES, lost))
    assert any(f"-{number:05d}.safetensors is ignored: " in message for message in messages)


# -- what is saved is loaded -----------------------------------------------------------------------------------------

TOKENS = st.integers(0, 3) | st.integers(0, 2**40)
PARTS = st.builds(
    SavedPart,
    group=st.integers(0, 9),
    continuation=st.lists(TOKENS, max_size=3).map(tuple),
    rows=st.binary(max_size=40).map(lambda data: rows(*data)),
)


@st.composite
def forests(draw: st.DrawFn) -> list[SavedNode]:
    """Trees of prefixes, several salts side by side; no prefix is there twice."""
    nodes: dict[tuple[str | None, int, tuple[int, ...]], SavedNode] = {}
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, len(nodes) - 1))
        salt = list(nodes.values())[parent].salt if parent >= 0 else draw(st.sampled_from(SALTS))
        token_ids = (draw(TOKENS), draw(TOKENS))
        parts = tuple(draw(st.lists(PARTS, max_size=3)))
        nodes.setdefault((salt, parent, token_ids), SavedNode(salt, parent, token_ids, parts))
    return list(nodes.values())


@given(forests(), st.integers(1, 5), st.sampled_from([1, 40, 1000]))
@settings(max_examples=60)
def test_what_is_loaded_is_what_was_saved(nodes: list[SavedNode], shard_nodes: int, shard_bytes: int) -> None:
    limits = patch.multiple(snapshot, SHARD_NODES=shard_nodes, SHARD_BYTES=shard_bytes)
    with TemporaryDirectory() as name, limits:
        directory = Path(name)
        assert save_snapshot(directory, SIGNATURE, iter(nodes)) == len(nodes)
        assert loaded(directory) == (plain(nodes), [])


@given(forests(), st.data())
@settings(max_examples=60)
def test_any_loss_of_shards_costs_their_nodes_and_what_follows_them(
    nodes: list[SavedNode], data: st.DataObject
) -> None:
    with TemporaryDirectory() as name, patch.object(snapshot, "SHARD_NODES", 1):
        directory = Path(name)
        save_snapshot(directory, SIGNATURE, nodes)
        lost = data.draw(st.sets(st.sampled_from(range(len(nodes))))) if nodes else set()
        for number in lost:
            shards(directory)[number].write_bytes(b"")
        found, messages = loaded(directory)
        assert found == plain(without(nodes, lost))
        assert len(messages) >= len(lost)


def test_a_directory_without_a_snapshot_is_empty_without_a_warning(tmp_path: Path) -> None:
    assert loaded(tmp_path) == ([], [])
    assert loaded(tmp_path / "missing") == ([], [])


def test_an_empty_snapshot_replaces_what_was_there(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "directory"
    assert save_snapshot(directory, SIGNATURE, NODES) == len(NODES)
    assert save_snapshot(directory, SIGNATURE, []) == 0
    assert loaded(directory) == ([], [])
    assert not shards(directory)


def test_a_snapshot_can_be_saved_from_itself(tmp_path: Path, two_a_shard: None) -> None:
    save_snapshot(tmp_path, SIGNATURE, NODES)
    save_snapshot(tmp_path, SIGNATURE, load_snapshot(tmp_path, SIGNATURE))
    assert loaded(tmp_path) == (plain(NODES), [])
    assert len(shards(tmp_path)) == 4


def test_rows_are_copied_before_the_next_node_is_asked_for(tmp_path: Path) -> None:
    staging = torch.zeros(3, dtype=torch.uint8)

    def nodes() -> Iterator[SavedNode]:
        for number in range(4):
            yield SavedNode(None, number - 1, (0, 0), (SavedPart(0, (), staging.fill_(number)),))

    save_snapshot(tmp_path, SIGNATURE, nodes())
    assert [node.parts[0].rows.tolist() for node in load_snapshot(tmp_path, SIGNATURE)] == [[n] * 3 for n in range(4)]


def test_loaded_rows_do_not_hold_their_shard(tmp_path: Path) -> None:
    save_snapshot(tmp_path, SIGNATURE, NODES)
    parts = [part for node in load_snapshot(tmp_path, SIGNATURE) for part in node.parts]
    assert parts
    assert all(part.rows.untyped_storage().nbytes() == part.rows.numel() for part in parts)


def test_a_shard_is_as_large_as_the_limit_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SHARD_BYTES", 10)  # a node has five bytes of rows
    large = SavedNode(None, -1, (9, 9), (SavedPart(0, (), torch.zeros(50, dtype=torch.uint8)),))
    save_snapshot(tmp_path, SIGNATURE, [*NODES, large])
    assert [load(path.read_bytes())["rows"].numel() for path in shards(tmp_path)] == [10, 10, 10, 10, 50]


def test_a_large_snapshot_is_read_shard_by_shard(tmp_path: Path, two_a_shard: None) -> None:
    save_snapshot(tmp_path, SIGNATURE, NODES)
    nodes = load_snapshot(tmp_path, SIGNATURE)
    next(nodes)
    shards(tmp_path)[3].unlink()
    assert len(list(nodes)) == 5


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (replace(NODES[0], parent=1), "parent"),
        (replace(NODES[0], parent=-2), "parent"),
        (replace(NODES[0], token_ids=(1,)), "token_ids must fill a block of 2: 1 tokens"),
        (replace(NODES[0], token_ids=(1, -1)), "whole numbers"),
        (replace(NODES[0], parts=(SavedPart(-1, (), rows(1)),)), "whole numbers"),
        (replace(NODES[0], parts=(SavedPart(0, (), torch.zeros(1)),)), "float32"),
        (replace(NODES[0], parts=(SavedPart(0, (), rows(1).unsqueeze(0)),)), r"\[1, 1\]"),
        (replace(NODES[0], parts=(SavedPart(0, (), rows(1, 2, 3)[::2]),)), "contiguous"),
    ],
)
def test_a_node_that_breaks_its_contract_is_refused(tmp_path: Path, node: SavedNode, message: str) -> None:
    save_snapshot(tmp_path, SIGNATURE, NODES)
    with pytest.raises(ValueError, match=message):
        save_snapshot(tmp_path, SIGNATURE, [NODES[0], node])
    assert loaded(tmp_path) == (plain(NODES), [])


# -- several snapshots in a directory --------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [field.name for field in fields(Signature)])
def test_snapshots_of_other_signatures_live_side_by_side(tmp_path: Path, field: str) -> None:
    changed: dict[str, Any] = {field: 3 if field == "block_size" else f"{getattr(SIGNATURE, field)}2"}
    other = replace(SIGNATURE, **changed)
    other_nodes = [replace(node, token_ids=(5,) * other.block_size) for node in NODES]
    save_snapshot(tmp_path, SIGNATURE, NODES)
    assert loaded(tmp_path, other) == ([], [])
    save_snapshot(tmp_path, other, other_nodes)
    assert loaded(tmp_path, other)[1] == []
    assert loaded(tmp_path) == (plain(NODES), [])
    save_snapshot(tmp_path, other, [])
    assert loaded(tmp_path) == (plain(NODES), [])


def test_another_version_of_the_format_is_another_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_snapshot(tmp_path, SIGNATURE, NODES)
    monkeypatch.setattr(snapshot, "FORMAT_VERSION", 2)
    assert loaded(tmp_path) == ([], [])
    save_snapshot(tmp_path, SIGNATURE, NODES[:1])
    monkeypatch.setattr(snapshot, "FORMAT_VERSION", 1)
    assert loaded(tmp_path) == (plain(NODES), [])


def test_a_manifest_under_the_name_of_another_signature_is_ignored(tmp_path: Path) -> None:
    other = replace(SIGNATURE, model="other")
    save_snapshot(tmp_path / "other", other, [])
    save_snapshot(tmp_path / "own", SIGNATURE, NODES)
    path = manifest(tmp_path / "own")
    shutil.copy(manifest(tmp_path / "other"), path)
    found, messages = loaded(tmp_path / "own")
    assert found == []
    assert messages == [f"{path} is ignored: ValueError('it is of another model, cache layout or format')"]


def test_files_of_others_are_left_alone(tmp_path: Path, two_a_shard: None) -> None:
    save_snapshot(tmp_path, SIGNATURE, NODES)
    stem = manifest(tmp_path).stem
    names = ["model.safetensors", f"{stem}.txt", f"{stem}-0-00000.safetensors", f"{stem}-notes.safetensors", "a.tmp"]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    save_snapshot(tmp_path, SIGNATURE, NODES[:2])
    assert loaded(tmp_path) == (plain(NODES[:2]), [])
    assert all((tmp_path / name).read_text() == name for name in names)
    assert len(list(tmp_path.iterdir())) == len(names) + 4  # the folder, the lock, the manifest, one shard


def test_saves_at_the_same_time_do_not_mix(tmp_path: Path, two_a_shard: None) -> None:
    versions = {seed: chain_and_branches(seed) for seed in (1, 2, 3)}
    start = threading.Barrier(len(versions))
    failures: list[BaseException] = []

    def save_often(nodes: list[SavedNode]) -> None:
        try:
            start.wait()
            for _ in range(5):
                save_snapshot(tmp_path, SIGNATURE, nodes)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save_often, args=(nodes,)) for nodes in versions.values()]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found, _ = loaded(tmp_path)  # perhaps less than all: the files of an old generation go away
        assert len({token_ids[0] for _, _, token_ids, _ in found}) <= 1  # the seed
    assert not failures
    found, messages = loaded(tmp_path)
    assert found in [plain(nodes) for nodes in versions.values()]
    assert messages == []
    assert len(shards(tmp_path)) == 4


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, two_a_shard: None) -> Path:
    """A directory with `NODES` in four shards."""
    save_snapshot(tmp_path, SIGNATURE, NODES)
    return tmp_path


@pytest.mark.parametrize("number", range(4))
def test_a_missing_shard_costs_its_nodes_and_what_follows_them(saved: Path, number: int) -> None:
    shards(saved)[number].unlink()
    assert_only_shard_is_lost(saved, number)


@pytest.mark.parametrize("salts", [("x", "x"), (None, ""), ("", None)])
def test_a_node_never_follows_another_prefix_that_ends_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salts: tuple[str | None, str | None]
) -> None:
    monkeypatch.setattr(snapshot, "SHARD_NODES", 1)
    firsts = [(0, 0), (1, 1)] if salts[0] == salts[1] else [(0, 0)] * 2
    roots = [SavedNode(salt, -1, first, ()) for salt, first in zip(salts, firsts)]
    seconds = [SavedNode(salt, parent, (5, 5), ()) for parent, salt in enumerate(salts)]
    third = SavedNode(salts[0], 2, (6, 6), ())
    save_snapshot(tmp_path, SIGNATURE, [*roots, *seconds, third])
    shards(tmp_path)[2].unlink()
    assert loaded(tmp_path)[0] == plain([*roots, seconds[1]])


def test_nodes_without_the_block_before_them_are_counted(saved: Path) -> None:
    path = shards(saved)[0]
    path.unlink()
    found, messages = loaded(saved)
    assert [node[:3] for node in found] == [("", -1, (0, 0)), ("x", -1, (0, 0))]
    assert f"{str(path)[:-17]}00001.safetensors: 2 blocks are ignored: those before them are missing" in messages


@pytest.mark.parametrize("number", range(4))
def test_a_shard_cut_at_any_length_is_ignored(saved: Path, number: int) -> None:
    path = shards(saved)[number]
    data = path.read_bytes()
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        assert_only_shard_is_lost(saved, number)
    path.write_bytes(data + b"\0")
    assert_only_shard_is_lost(saved, number)


@pytest.mark.parametrize("number", range(4))
def test_a_shard_with_any_byte_changed_is_ignored(saved: Path, number: int) -> None:
    path = shards(saved)[number]
    data = path.read_bytes()
    for position in range(number, len(data), 4):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        assert_only_shard_is_lost(saved, number)


def test_a_torn_shard_of_the_right_length_is_ignored(saved: Path) -> None:
    path = shards(saved)[1]
    path.write_bytes(path.read_bytes()[:-3] + bytes(3))
    assert_only_shard_is_lost(saved, 1)


def test_a_damaged_manifest_serves_all_or_nothing(saved: Path) -> None:
    path = manifest(saved)
    data = path.read_bytes()
    for position in range(0, len(data), 3):
        flipped, cut = bytearray(data), data[:position]
        flipped[position] ^= 1 << position % 8
        for damaged in (bytes(flipped), cut):
            path.write_bytes(damaged)
            found, messages = loaded(saved)
            assert found == []
            assert messages
            assert messages[0].startswith(f"{path} is ignored: ")
    save_snapshot(saved, SIGNATURE, NODES[:1])
    assert loaded(saved) == (plain(NODES[:1]), [])
    assert len(shards(saved)) == 1


def test_a_shard_in_place_of_another_is_ignored(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save_snapshot(other, SIGNATURE, chain_and_branches(seed=7))
    shutil.copy(shards(other)[1], shards(saved)[1])
    assert_only_shard_is_lost(saved, 1)
    shutil.copy(shards(saved)[0], shards(saved)[1])
    assert_only_shard_is_lost(saved, 1)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_what_is_no_file_is_ignored(saved: Path, make: Callable[[Path], None]) -> None:
    path = shards(saved)[1]
    path.unlink()
    make(path)
    assert_only_shard_is_lost(saved, 1)
    path = manifest(saved)
    path.unlink()
    make(path)
    found, messages = loaded(saved)
    assert found == []
    assert len(messages) == 1


# -- content that no save would write, with digests that are right ---------------------------------------------------


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()


def forge_manifest(directory: Path, body: Any) -> None:
    """Write a manifest with this body and the digest that belongs to it."""
    record = {"digest": digest(json.dumps(body, sort_keys=True).encode()), "body": body}
    manifest(directory).write_text(json.dumps(record))


def forge_shard(directory: Path, number: int, data: bytes) -> None:
    """Put `data` in the place of a shard, manifest included."""
    shards(directory)[number].write_bytes(data)
    body = json.loads(manifest(directory).read_text())["body"]
    body["shards"][number] = {"num_bytes": len(data), "digest": digest(data)}
    forge_manifest(directory, body)


def change(*path: str | int, to: Any) -> Callable[[Any], Any]:
    """Sets what lies at a path in JSON; ... takes it away."""

    def apply(value: Any) -> Any:
        *way, last = path
        place = value
        for step in way:
            place = place[step]
        if to is ...:
            del place[last]
        else:
            place[last] = to
        return value

    return apply


FORGED_NODES = {
    "not a list": lambda nodes: 5,
    "no object": lambda nodes: [1, 2],
    "null": lambda nodes: None,
    "no nodes for the rows": lambda nodes: [],
    "missing salt": change(0, "salt", to=...),
    "missing parent": change(0, "parent", to=...),
    "missing tokens": change(0, "token_ids", to=...),
    "missing parts": change(1, "parts", to=...),
    "missing group": change(1, "parts", 0, "group", to=...),
    "missing size": change(1, "parts", 0, "num_bytes", to=...),
    "salt a number": change(0, "salt", to=1),
    "parent a number": change(0, "parent", to=0),
    "tokens a text": change(0, "token_ids", to="12"),
    "too many tokens": change(0, "token_ids", to=[1, 2, 3]),
    "token negative": change(0, "token_ids", to=[1, -2]),
    "token a fraction": change(0, "token_ids", to=[1, 2.0]),
    "token a truth": change(0, "token_ids", to=[1, True]),
    "token nested": change(0, "token_ids", to=[1, [2]]),
    "parts an object": change(0, "parts", to={"0": 1}),
    "group a text": change(0, "parts", 0, "group", to="0"),
    "group negative": change(0, "parts", 0, "group", to=-1),
    "group a truth": change(0, "parts", 0, "group", to=False),
    "continuation a number": change(0, "parts", 0, "continuation", to=3),
    "continuation negative": change(0, "parts", 0, "continuation", to=[-3]),
    "size negative": change(0, "parts", 0, "num_bytes", to=-1),
    "size a truth": change(0, "parts", 1, "num_bytes", to=True),
    "size too small": change(0, "parts", 0, "num_bytes", to=1),
    "size huge": change(0, "parts", 0, "num_bytes", to=10**30),
    "size infinite": change(0, "parts", 0, "num_bytes", to=float("inf")),
}


@pytest.mark.parametrize("case", FORGED_NODES)
def test_a_shard_of_forged_nodes_is_ignored(saved: Path, case: str) -> None:
    tensors = load(shards(saved)[1].read_bytes())
    nodes = FORGED_NODES[case](json.loads(bytes(tensors["nodes"].tolist())))
    forge_shard(saved, 1, save(tensors | {"nodes": rows(*json.dumps(nodes).encode())}))
    assert_only_shard_is_lost(saved, 1)


FORGED_SHARDS = {
    "empty": b"",
    "no safetensors": b"PK\3\4 torch.load would take this",
    "huge header": (2**62).to_bytes(8, "little") + b"{}",
    "no tensors": save({}),
    "no rows": save({"nodes": rows(*b"[]")}),
    "no JSON": save({"nodes": rows(*b"[\xff"), "rows": rows()}),
    "deep JSON": save({"nodes": rows(*b"[" * 100_000), "rows": rows()}),
    "huge number": save({"nodes": rows(*b"[" + b"1" * 10_000 + b"]"), "rows": rows()}),
    "other dtype": save({"nodes": torch.zeros(2, dtype=torch.bfloat16), "rows": rows()}),
}


@pytest.mark.parametrize("case", FORGED_SHARDS)
def test_a_forged_shard_is_ignored(saved: Path, case: str) -> None:
    forge_shard(saved, 1, FORGED_SHARDS[case])
    assert_only_shard_is_lost(saved, 1)


@pytest.mark.parametrize("wrong", [lambda rows: rows.to(torch.int16), lambda rows: rows.unsqueeze(1)])
def test_a_shard_with_rows_of_another_shape_is_ignored(saved: Path, wrong: Callable[[Tensor], Tensor]) -> None:
    tensors = load(shards(saved)[1].read_bytes())
    forge_shard(saved, 1, save(tensors | {"rows": wrong(tensors["rows"])}))
    assert_only_shard_is_lost(saved, 1)


def test_a_node_with_a_parent_that_nobody_knows_is_left_out(saved: Path) -> None:
    tensors = load(shards(saved)[1].read_bytes())
    nodes = json.loads(bytes(tensors["nodes"].tolist()))
    nodes[0]["parent"] = "0" * 64
    forge_shard(saved, 1, save(tensors | {"nodes": rows(*json.dumps(nodes).encode())}))
    assert loaded(saved)[0] == plain(without(NODES, {2, 3}))


FORGED_BODIES = {
    "a number": lambda body: 5,
    "missing signature": change("signature", to=...),
    "missing generation": change("generation", to=...),
    "missing shards": change("shards", to=...),
    "signature a text": change("signature", to="x"),
    "version": change("signature", "format_version", to=2),
    "generation a number": change("generation", to=1),
    "generation a path": change("generation", to="../../../../secret"),
    "shards a number": change("shards", to=10**9),
    "shard a number": change("shards", 2, to=1),
    "size a text": change("shards", 2, "num_bytes", to="1"),
    "digest a number": change("shards", 2, "digest", to=1),
}


@pytest.mark.parametrize("case", FORGED_BODIES)
def test_a_forged_manifest_is_ignored(saved: Path, case: str) -> None:
    forge_manifest(saved, FORGED_BODIES[case](json.loads(manifest(saved).read_text())["body"]))
    found, messages = loaded(saved)
    assert found == []
    assert len(messages) == 1


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b'{"body": ' + b"1" * 10_000 + b"}"])
def test_a_manifest_of_garbage_is_ignored(saved: Path, data: bytes) -> None:
    manifest(saved).write_bytes(data)
    found, messages = loaded(saved)
    assert found == []
    assert len(messages) == 1
    save_snapshot(saved, SIGNATURE, NODES)
    assert loaded(saved) == (plain(NODES), [])


def test_a_file_that_is_larger_than_listed_is_not_read(saved: Path) -> None:
    os.truncate(shards(saved)[1], 2**36)  # sparse
    assert_only_shard_is_lost(saved, 1)
    assert "at most were expected" in loaded(saved)[1][0]
    os.truncate(manifest(saved), 2**36)
    found, messages = loaded(saved)
    assert found == []
    assert "at most were expected" in messages[0]


# -- crashes ---------------------------------------------------------------------------------------------------------

NEW = chain_and_branches(seed=9)[:5]
NUM_SYNCS = 3 + 1 + 2  # of three shards, the manifest, and the directory before and after the rename


class Crash(BaseException):
    """The process ends here."""


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, error: BaseException) -> None:
    """Let the `call`-th call of os.`name` raise `error` in place of what it does."""
    real, calls = getattr(os, name), iter(range(call + 1))

    def failing(*args: Any) -> Any:
        if next(calls, -1) == call:
            raise error
        return real(*args)

    monkeypatch.setattr(os, name, failing)


STOPS = [*(("fsync", call) for call in range(NUM_SYNCS)), ("replace", 0)]


@pytest.mark.parametrize(("name", "call"), STOPS)
def test_a_crash_leaves_the_old_or_the_new_snapshot(saved: Path, name: str, call: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, name, call, Crash())
        monkeypatch.setattr(snapshot, "_sweep", lambda files, keep: None)  # a process that is gone cleans nothing up
        with pytest.raises(Crash):
            save_snapshot(saved, SIGNATURE, NEW)
    is_replaced = (name, call) == ("fsync", NUM_SYNCS - 1)
    assert loaded(saved) == (plain(NEW if is_replaced else NODES), [])
    save_snapshot(saved, SIGNATURE, NODES[:4])
    assert loaded(saved) == (plain(NODES[:4]), [])
    assert len(shards(saved)) == 2
    assert not list(saved.glob("*.tmp"))


def test_a_crash_while_old_files_are_deleted_leaves_the_new_snapshot(saved: Path) -> None:
    for call in range(4):
        nodes = chain_and_branches(seed=call)
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(monkeypatch, "unlink", call, Crash())
            with pytest.raises(Crash):
                save_snapshot(saved, SIGNATURE, nodes)
        assert loaded(saved) == (plain(nodes), [])


@pytest.mark.parametrize(("name", "call"), STOPS)
def test_a_full_disk_is_an_error_that_leaves_no_files(saved: Path, name: str, call: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, name, call, OSError(ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space"):
            save_snapshot(saved, SIGNATURE, NEW)
    is_replaced = (name, call) == ("fsync", NUM_SYNCS - 1)  # the old files stay too: the rename may not last
    assert loaded(saved) == (plain(NEW if is_replaced else NODES), [])
    assert len(shards(saved)) == (4 + 3 if is_replaced else 4)
    assert not list(saved.glob("*.tmp"))


def test_an_error_of_the_nodes_leaves_the_old_snapshot(saved: Path) -> None:
    def nodes() -> Iterator[SavedNode]:
        yield from NEW
        raise RuntimeError("no more")

    before = sorted(saved.iterdir())
    with pytest.raises(RuntimeError, match="no more"):
        save_snapshot(saved, SIGNATURE, nodes())
    assert loaded(saved) == (plain(NODES), [])
    assert sorted(saved.iterdir()) == before


def test_old_files_that_cannot_be_deleted_are_a_warning(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "unlink", 0, PermissionError("not yours"))
    with warnings_of_snapshots() as messages:
        assert save_snapshot(saved, SIGNATURE, NEW) == len(NEW)
    assert messages == [f"{saved}: old snapshot files are not deleted: not yours"]
    assert loaded(saved) == (plain(NEW), [])


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for directory in (path, path / "below"):
        with pytest.raises(OSError, match="file"):
            save_snapshot(directory, SIGNATURE, NODES)
        found, messages = loaded(directory)
        assert found == []
        assert "Not a directory" in messages[0]
    assert path.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable(saved: Path) -> None:
    saved.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            save_snapshot(saved, SIGNATURE, NEW)
    finally:
        saved.chmod(0o700)
    assert loaded(saved) == (plain(NODES), [])
