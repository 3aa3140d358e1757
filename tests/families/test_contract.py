"""The contract notices what a family can get wrong: each test puts one fault in."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import test_oracle
from families.case import FamilyCase, FamilyModel
from families.contract import FamilyContract
from families.histories import Machines, compare_with_prefill
from scripted import finish
from tiny_models import tiny_llama
from torch import Tensor

from foredraft.exactness import ExactRows
from foredraft.models import loader, mtp_weights
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.request import Request
from foredraft.runner import verification
from foredraft.sampling_params import SamplingParams
from foredraft.scheduler.scheduler import Scheduler
from foredraft.speculation import drafter
from foredraft.speculation.verifier import verify_greedy

CASE = FamilyCase(
    "llama",
    tiny_llama,
    num_modules=3,
    depths=(3,),
    other_state=lambda engine, request: {"state": torch.tensor(float(engine.cache.block_size))},
)


class Contract(FamilyContract):
    case = CASE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return FamilyModel(CASE, tmp_path_factory.mktemp("family") / CASE.name)


def late(positions: Tensor) -> Tensor:
    """Row 10 is taken for the one after it."""
    return positions + (positions == 10)


def target_positions(patch: pytest.MonkeyPatch) -> None:
    forward = TargetModel.forward
    patch.setattr(TargetModel, "forward", lambda self, ids, positions, rows: forward(self, ids, late(positions), rows))


def module_positions(patch: pytest.MonkeyPatch) -> None:
    forward = MtpModules.forward

    def faulty(self: MtpModules, module: int, ids: Tensor, positions: Tensor, hidden: Tensor, rows: Any) -> Tensor:
        return forward(self, module, ids, late(positions), hidden, rows)

    patch.setattr(MtpModules, "forward", faulty)


def lost_rows(patch: pytest.MonkeyPatch) -> None:
    """The last row of each pass is not stored."""
    write_slots = drafter._Chain.write_slots

    def faulty(self: drafter._Chain, rows: drafter.PassRows, group: int) -> Tensor:
        slots = write_slots(self, rows, group)
        slots[-1] = drafter.RESERVED_SLOT
        return slots

    patch.setattr(drafter._Chain, "write_slots", faulty)


def one_exact_row_too_many(patch: pytest.MonkeyPatch) -> None:
    after_verify = ExactRows.after_verify
    patch.setattr(ExactRows, "after_verify", lambda self, num_accepted: after_verify(self, num_accepted + 1))


def hits_in_all_modules(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactRows, "after_hit", lambda num_modules, num_rows, depth: ExactRows((num_rows,) * num_modules))


def window_of_the_first_module(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactRows, "window_start", lambda self, depth: self.num_exact_rows[0])


def forgotten_drafts(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def faulty(self: Scheduler, request: Request) -> None:
        preempt(self, request)
        request.draft_token_ids = ()

    patch.setattr(Scheduler, "preempt", faulty)


def reused_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafter, "cycle_keys", lambda positions, depth: positions)


def careless_verification(patch: pytest.MonkeyPatch) -> None:
    """The first draft is accepted whatever it is."""

    def faulty(drafts: Tensor, own: Tensor) -> Tensor:
        own = own.clone()
        own[:, :1][:, : drafts.shape[1]] = torch.where(drafts >= 0, drafts, own[:, : drafts.shape[1]])[:, :1]
        return verify_greedy(drafts, own)

    patch.setattr(verification, "verify_greedy", faulty)


def silent_loading(patch: pytest.MonkeyPatch) -> None:
    for module in (loader, mtp_weights):
        patch.setattr(module, "describe_problems", lambda missing, surplus, mismatched: [])


def all_modules_read(patch: pytest.MonkeyPatch) -> None:
    build = mtp_weights.build_mtp_model
    patch.setattr(loader, "build_mtp_model", lambda target, source, _, *others: build(target, source, 3, *others))


Fault = Callable[[pytest.MonkeyPatch], None]

FAULTS: list[tuple[Fault, str, tuple[Any, ...]]] = [
    (target_positions, "logits_alone", (16, "host")),
    (target_positions, "logits_together", (16, "reference")),
    (target_positions, "greedy_output_is_the_targets_own", (3, False, "overlapped")),
    (module_positions, "drafts_whatever_is_accepted", (3, True)),
    (module_positions, "drafts_of_a_greedy_run", (3, "host")),
    (module_positions, "drafts_of_a_sampled_run", (3, "overlapped")),
    (reused_numbers, "drafts_of_a_sampled_run", (3, "host")),
    (one_exact_row_too_many, "drafts_whatever_is_accepted", (3, False)),
    (one_exact_row_too_many, "preempted_requests", (True,)),
    (lost_rows, "prefix_hits", (3, 1)),
    (hits_in_all_modules, "prefix_hits_across_depths", (3, 1, 1)),
    (forgotten_drafts, "preempted_requests_with_a_seed", ("host",)),
    (window_of_the_first_module, "changes_of_depth", (False,)),
    (careless_verification, "greedy_output_with_own_drafts_accepted", (3, False)),
]
"""What is wrong, the test of the contract that must fail, and its arguments."""

FAULTS_OF_LOADING: list[tuple[Fault, str, tuple[Any, ...]]] = [
    (silent_loading, "a_missing_tensor_of_a_module_is_named", ()),
    (silent_loading, "a_missing_tensor_of_the_target_is_named", ()),
    (silent_loading, "a_surplus_tensor_of_a_module_is_named", ()),
    (all_modules_read, "tensors_of_later_modules_are_not_read", (1,)),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), FAULTS)
def test_a_fault_is_noticed(
    model: FamilyModel, monkeypatch: pytest.MonkeyPatch, fault: Fault, test: str, arguments: tuple[Any, ...]
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(Contract(), f"test_{test}")(model, *arguments)


@pytest.mark.parametrize(("fault", "test", "arguments"), FAULTS_OF_LOADING)
def test_a_fault_of_loading_is_noticed(
    model: FamilyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Fault,
    test: str,
    arguments: tuple[Any, ...],
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Contract(), f"test_{test}")(model, *arguments, tmp_path=tmp_path)


@pytest.mark.parametrize("fault", [lost_rows, one_exact_row_too_many, module_positions])
def test_a_wrong_row_is_noticed(model: FamilyModel, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """By the comparison itself, without the account of what was computed."""
    machines = Machines.over(model, monkeypatch)
    monkeypatch.setattr(test_oracle.Oracle, "check_counts", lambda self, request: None)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="counted as exact"):
        test_oracle.walk(machines.host(), random.Random(0))


def test_other_state_is_compared(model: FamilyModel) -> None:
    engine = model.engine(3)
    request = engine.add_request("a", model.prompt(9), SamplingParams(max_tokens=9))
    engine.step()
    with pytest.raises(AssertionError, match="state: counted as exact, but off by"):
        compare_with_prefill(model, engine, request)
    finish(engine)
