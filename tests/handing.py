"""Requests that move between engines in tests."""

from __future__ import annotations

from foredraft.cache.row_parts import parts_of
from foredraft.engine.engine import Engine
from foredraft.engine.handover import Handover
from foredraft.engine.handover_bytes import write_bytes
from foredraft.errors import HandoverError
from foredraft.request import Request


def to_bytes(handover: Handover) -> bytearray:
    """All that is written of a handover."""
    data = bytearray()
    write_bytes(handover.header(), handover.tensors, data.extend)
    return data


def from_bytes(data: bytes | bytearray) -> Handover:
    """What is read of so many bytes."""
    place = 0

    def fill(memory: memoryview) -> None:
        nonlocal place
        if len(data) - place < len(memory):
            raise HandoverError("there are too few bytes")
        memory[:] = data[place : place + len(memory)]
        place += len(memory)

    handover = Handover.from_source(fill)
    assert place == len(data)
    return handover


def soil(engine: Engine) -> None:
    """Put numbers into a new engine's cache that show where a row is read that was not written."""
    for part in parts_of(engine.runner.storage):
        part.tensor.fill_(37.0)


def move(old: Engine, new: Engine, request_id: str, *, recompute: bool = False) -> Request:
    """One request, by way of bytes."""
    handover = old.export_request(request_id)
    old.cache.check_integrity()
    request = new.import_request(from_bytes(to_bytes(handover)), recompute=recompute)
    new.cache.check_integrity()
    return request


def move_all(old: Engine, new: Engine) -> list[Request]:
    """All requests of an engine; those that find no room compute their rows again."""
    requests = [move(old, new, request_id, recompute=True) for request_id in old.scheduler.unfinished_ids]
    pools = old.cache.pools
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in pools), "blocks were left behind"
    return requests
