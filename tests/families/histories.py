"""The state machines of tests/exactness over a family's checkpoint, and rows compared with those of one prefill."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from exactness import test_oracle, test_resident_oracle
from exactness.test_oracle import Oracle
from exactness.test_resident_oracle import ResidentOracle
from families.case import FamilyModel
from hypothesis import settings
from scripted import held_rows
from torch import Tensor

from foredraft.cache.groups import CacheGroup, Owner
from foredraft.engine.engine import Engine
from foredraft.request import Request
from foredraft.sampling_params import SamplingParams

FEW = settings(test_oracle.ORACLE, max_examples=5, stateful_step_count=12)
MAX_DEPTH = 4
"""The machines' budgets have no room for more."""


@dataclass(frozen=True)
class Machines:
    """host: decodes that the host runs, accepted as scripted; device: with state on the device, accepted by chance."""

    host: type[Oracle]
    device: type[ResidentOracle]

    @classmethod
    def over(cls, model: FamilyModel, patch: pytest.MonkeyPatch) -> Machines:
        """Machines that run `model`, in the place of those that the modules of the machines know by name."""

        def compare(engine: Engine, kind: str, request: Request) -> None:
            compare_with_prefill(model, engine, request)

        def sequence(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(model.plain_sequence(prompt, test_oracle.MAX_NEW_TOKENS + 8))

        for module in (test_oracle, test_resident_oracle):
            patch.setattr(module, "model", lambda kind: model.loaded)
            patch.setattr(module, "compare_with_prefill", compare)
        patch.setattr(test_oracle, "sequence", sequence)
        depth = min(MAX_DEPTH, max(model.case.depths))
        of_family = {
            "max_depth": depth,
            "happened": set(),
            "engine_settings": model.case.settings,
            "row_id": lambda self, token_id: model.case.row_id(token_id),
        }
        return cls(type("HostMachine", (Oracle,), of_family), type("DeviceMachine", (ResidentOracle,), of_family))


def compare_with_prefill(model: FamilyModel, engine: Engine, request: Request) -> None:
    """The rows that a running request counts as computed or exact equal those of one prefill of all its tokens.

    All that its blocks hold is compared, keys and values or whatever else, and the other state of the family.
    """
    fresh = model.plain_engine
    prefilled = fresh.add_request("fresh", request.token_ids, SamplingParams(max_tokens=24, ignore_eos=True))
    try:
        fresh.step()
        for group in range(len(engine.cache.layout.groups)):
            if group != engine.cache.layout.state_group:
                _compare_group(engine, request, fresh, group, model.case.bound)
        ours, theirs = (model.case.other_state(one, r) for one, r in ((engine, request), (fresh, prefilled)))
        assert ours.keys() == theirs.keys()
        for name, state in ours.items():
            _assert_equal(state, theirs[name], name, model.case.bound)
    finally:
        fresh.abort("fresh")
    if engine.cache.layout.state_group is not None and request.num_state_rows:
        _compare_states(engine, request, fresh, model.case.bound)


def _compare_states(engine: Engine, request: Request, fresh: Engine, bound: float) -> None:
    """The states of recurrent layers are those after a prefill of so many tokens."""
    seen = request.token_ids[: request.num_state_rows]
    prefilled = fresh.add_request("fresh", seen, SamplingParams(max_tokens=2, ignore_eos=True))
    try:
        fresh.step()
        assert prefilled.num_state_rows == len(seen)
        ours, theirs = _states(engine, request), _states(fresh, prefilled)
        for layer, state in ours.items():
            _assert_equal(state, theirs[layer], f"state of layer {layer} after {len(seen)} rows", bound)
    finally:
        fresh.abort("fresh")


def _states(engine: Engine, request: Request) -> dict[int, Tensor]:
    """Of each recurrent layer, after the rows that it has seen."""
    layout = engine.cache.layout
    assert layout.state_group is not None
    num_rows = engine.cache.block_size * layout.groups[layout.state_group].span
    index = (request.num_state_rows - 1) // num_rows
    block = engine.cache.block_tables(request.request_id)[layout.state_group][index]
    return {layer: states[block] for layer, states in engine.runner.storage.states.items()}


def _compare_group(engine: Engine, request: Request, fresh: Engine, number: int, bound: float) -> None:
    group = engine.cache.layout.groups[number]
    ours, theirs = held_tensors(engine, request.request_id, number), held_tensors(fresh, "fresh", number)
    owners = layers_of_tensors(group) if group.owner is Owner.MODULES else [None] * len(ours)
    for index, (our_rows, their_rows) in enumerate(zip(ours, theirs)):
        module = owners[index]
        end = request.num_computed_tokens if module is None else request.exact.num_exact_rows[module]
        first = max(held_rows(engine, request.request_id, number, end)[0], held_rows(fresh, "fresh", number, end)[0])
        if module is not None:
            first += _num_inexact_rows(engine, request, module, first)
        what = f"{group.name}, tensor {index}, rows {first} to {end}"
        _assert_equal(our_rows[first:end], their_rows[first:end], what, bound)


def _num_inexact_rows(engine: Engine, request: Request, module: int, first: int) -> int:
    """How many rows from `first` on are not exact because windows before them reach beyond where modules began.

    Keys and values depend on the modules before; what else a module keeps depends on its own windows too.
    """
    layout, origin = engine.cache.layout, request.exact.origin
    depth = module + layout.has_inputs
    return max(0, origin + (layout.rebuild_rows[depth] or 0) - depth - first) if origin else 0


def layers_of_tensors(group: CacheGroup) -> list[int]:
    """The layer or module that each tensor of a group's blocks belongs to, in the order of `CacheStorage.block`."""
    kv = [layer for layer, shape in zip(group.layers, group.shapes) for _ in range(1 if shape.is_latent else 2)]
    return [*kv, *(shape.layer for shape in group.inputs)]


def held_tensors(engine: Engine, request_id: str, group: int) -> list[Tensor]:
    """Each tensor that the blocks of a request hold in a group, all its rows from 0 on; none where it has no block."""
    storage = engine.runner.storage
    blocks = (storage.block(group, block) for block in engine.cache.block_tables(request_id)[group])
    return [torch.cat(parts) for parts in zip(*blocks)]


def _assert_equal(ours: Tensor, theirs: Tensor, what: str, bound: float) -> None:
    assert ours.shape == theirs.shape
    if ours.numel():
        difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
        assert difference <= bound * largest, f"{what}: counted as exact, but off by {difference:.1e} of {largest:.1e}"
