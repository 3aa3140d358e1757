"""One decode step of many lanes on tensors of fixed shape: the target's rows and their verification, then the passes.

What `ModelRunner` and `Drafter` do request by request on the host is here arithmetic on one row of numbers for each
request (`kernels/torch/decode.py`), so that nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.kernels.decode_ops import DecodeKernels
from foredraft.kernels.decode_state import NUM_TOKENS, SEED, TOP_K, DecodeState, DraftWindow, PassRows, TargetRows
from foredraft.kernels.lanes import Lanes
from foredraft.kernels.ops import Kernels
from foredraft.models.attention import PagedAttention
from foredraft.models.draft_head import DraftHead
from foredraft.models.mtp import MtpModules
from foredraft.models.row_layout import GroupRows
from foredraft.models.target import TargetModel
from foredraft.runner.resident.mailbox import Mailbox
from foredraft.runner.resident.shape import DraftShape, SamplingKind, TargetShape
from foredraft.runner.resident.slot_state import MIN_P, TEMPERATURE, TOP_P, TYPICAL_P, SlotState
from foredraft.runner.verification import VerificationSettings, accept_by_chance
from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.sampler import SamplingTensors, probabilities, sample
from foredraft.speculation.verifier import block_verify, rejection_sample, typical_accept, verify_greedy


@dataclass(frozen=True)
class ResidentModel:
    """What steps run: the model, its cache and how drafts are decided. num_positions: those that the model has.

    modules, head: None where no drafts are made.
    """

    target: TargetModel
    modules: MtpModules | None
    storage: CacheStorage
    head: DraftHead | None
    settings: VerificationSettings
    num_positions: int
    kernels: Kernels
    decode: DecodeKernels


class LaneStep:
    """The lanes of a step: which slot each has, and what the device keeps there."""

    def __init__(self, model: ResidentModel, slots: SlotState, mailbox: Mailbox, num_lanes: int) -> None:
        self.model = model
        self.slots = slots
        self.mailbox = mailbox
        self.num_lanes = num_lanes
        self.lanes = mailbox.slots(num_lanes)
        layout, storage = slots.layout, model.storage
        self.state = DecodeState(slots.ints, slots.tables, layout.num_modules, storage.block_size, model.num_positions)
        self.tables = slots.tables.index_select(1, self.lanes)

    def column(self, index: int) -> Tensor:
        """One number of each lane's request, [B]."""
        return self.slots.ints[:, index].index_select(0, self.lanes)

    def group_rows(
        self, group: int, slots: Tensor, rows: TargetRows | PassRows, origins: Tensor, most: int
    ) -> GroupRows:
        """What a pass does in one cache group; most: rows of a lane."""
        lanes = Lanes(self.tables[group], rows.first_rows, rows.num_rows, rows.flat_rows, origins, most)
        return GroupRows(slots, lanes, self.model.storage.layout.groups[group].window)

    def sampling(self, kind: SamplingKind, repeats: int) -> SamplingTensors:
        """The sampling settings of each lane, each repeated for so many rows."""
        floats = self.slots.floats.index_select(0, self.lanes).repeat_interleave(repeats, dim=0)
        return SamplingTensors(
            temperature=floats[:, TEMPERATURE],
            top_k=self.column(TOP_K).repeat_interleave(repeats),
            top_p=floats[:, TOP_P],
            seeds=self.column(SEED).repeat_interleave(repeats),
            min_p=floats[:, MIN_P],
            typical_p=floats[:, TYPICAL_P],
            all_greedy=not kind.is_sampled,
            any_greedy=True,
            any_top_k=kind.any_top_k,
            any_top_p=kind.any_top_p,
            any_min_p=kind.any_min_p,
            any_typical_p=kind.any_typical_p,
            num_candidates=0,
        )


def run_target(model: ResidentModel, slots: SlotState, mailbox: Mailbox, shape: TargetShape) -> None:
    """Run the newest token and the pending drafts of each lane, and decide what follows them.

    Effects: rows in the cache, n and E_k raised, emitted tokens in the ring and in the mailbox ([B, R], -1 padded).
    """
    mailbox.apply_table_updates(slots.tables)
    step = LaneStep(model, slots, mailbox, shape.num_lanes)
    rows = model.decode.target_rows(step.state, step.lanes, shape.num_rows)
    hidden = _target_forward(step, rows, shape.num_rows)
    emitted = mailbox.emitted(shape.num_lanes, shape.num_rows)
    row_sums = hidden.sum(dim=-1, dtype=torch.float32).view_as(emitted)
    if not shape.kind.is_sampled and model.settings.synthetic_rates is None:
        own = model.target.greedy_ids(hidden).view_as(emitted)
        model.decode.commit_greedy(step.state, step.lanes, rows.drafts, own, emitted, row_sums)
    else:
        emitted.copy_(_decide(step, rows.drafts, hidden, shape.kind))
        model.decode.commit_tokens(step.state, step.lanes, emitted, row_sums)


def _target_forward(step: LaneStep, rows: TargetRows, num_rows: int) -> Tensor:
    """The target's forward; h0 [B * R, H] is stored too."""
    storage, layout = step.model.storage, step.model.storage.layout
    origins = torch.zeros_like(rows.first_rows)
    by_group = {
        group: step.group_rows(group, rows.slots[group], rows, origins, num_rows)
        for group in layout.target_groups
        if layout.groups[group].holds_layers
    }
    paged = PagedAttention.of_target(storage, by_group, step.model.kernels)
    hidden = step.model.target.forward(rows.token_ids, rows.positions, paged)
    storage.hidden.index_copy_(0, rows.slots[layout.hidden_group], hidden)
    return hidden


def _decide(step: LaneStep, drafts: Tensor, hidden: Tensor, kind: SamplingKind) -> Tensor:
    """drafts [B, R-1], -1 padded; hidden [B * R, H]. Returns ids [B, R], -1 after the last emitted token."""
    settings, shape = step.model.settings, (step.num_lanes, drafts.shape[1] + 1)
    seeds, positions = step.column(SEED), step.column(NUM_TOKENS)
    if not kind.is_sampled:
        own = step.model.target.greedy_ids(hidden).view(shape)
        return _by_chance(settings, drafts, own, seeds, positions)
    logits = step.model.target.logits(hidden)
    sampling = step.sampling(kind, shape[1])
    target_probs = probabilities(logits, sampling).view(*shape, -1)
    if settings.synthetic_rates is not None:
        columns = torch.arange(shape[1], device=drafts.device)
        drawn = uniform(seeds[:, None], positions[:, None] + columns, Stream.RECOVER)
        own = sample(target_probs.flatten(0, 1), drawn.flatten()).view(shape)
        return _by_chance(settings, drafts, own, seeds, positions)
    sampled = _verify_sampled(step, drafts, target_probs, seeds, positions)
    is_greedy = sampling.temperature.view(shape)[:, :1] == 0
    return torch.where(is_greedy, verify_greedy(drafts, logits.argmax(dim=-1).view(shape)), sampled)


def _verify_sampled(step: LaneStep, drafts: Tensor, target_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    settings = step.model.settings
    if settings.method == "lossy-typical":
        return typical_accept(drafts, target_probs, seeds, positions, settings.epsilon, settings.delta)
    verify = block_verify if settings.method == "block" else rejection_sample
    if settings.greedy_drafts or drafts.shape[1] == 0:
        return verify(drafts, None, target_probs, seeds, positions)
    assert step.model.head is not None
    found = step.slots.draft_probs[step.lanes, : drafts.shape[1]]
    draft_probs, token_ids = torch.zeros_like(target_probs[:, 1:]), step.model.head.token_ids
    if token_ids is None:
        draft_probs[..., : found.shape[-1]] = found
    else:
        draft_probs.index_copy_(2, token_ids, found)
    return verify(drafts, draft_probs, target_probs, seeds, positions)


def _by_chance(settings: VerificationSettings, drafts: Tensor, own: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    rates = settings.synthetic_rates
    assert rates is not None
    by_depth = torch.empty(drafts.shape[1], device=drafts.device)
    for depth in range(drafts.shape[1]):  # filled on the device: a copy from the host cannot be captured
        by_depth[depth].fill_(rates[min(depth, len(rates) - 1)])
    return accept_by_chance(drafts, drafts >= 0, own, by_depth, seeds, positions)


def run_drafts(model: ResidentModel, slots: SlotState, mailbox: Mailbox, shape: DraftShape) -> None:
    """Run the passes over the window of each lane and make its drafts, as many as the mailbox says and as are of use.

    Effects: module rows in the cache, E_k raised, drafts in the ring and in the mailbox ([B, depth], -1 padded).
    """
    assert model.modules is not None
    step, decode, layout = LaneStep(model, slots, mailbox, shape.num_lanes), model.decode, model.storage.layout
    depths, drafts = mailbox.depths(shape.num_lanes), mailbox.drafts(shape.num_lanes, shape.depth)
    window = decode.draft_window(step.state, step.lanes, depths, shape.num_rows, shape.depth, layout.hidden_group)
    of_target = hidden = model.storage.hidden.index_select(0, window.hidden_slots)
    for index in range(shape.depth):
        module = index if index < model.modules.num_modules else 0
        if index >= model.modules.num_modules:  # a further draft of a single module reads its last output
            hidden = _last_rows(hidden, shape.num_lanes)
        elif not model.modules.is_chained:
            hidden = of_target
        hidden = _run_pass(step, window, index, module, hidden)
        chosen = _choose(step, index, module, _last_rows(hidden, shape.num_lanes), shape.kind)
        decode.record_draft(step.state, step.lanes, window, index, chosen, drafts)
    decode.finish_window(step.state, step.lanes, window)


def _last_rows(hidden: Tensor, num_lanes: int) -> Tensor:
    return hidden.view(num_lanes, -1, hidden.shape[-1])[:, -1]


def _run_pass(step: LaneStep, window: DraftWindow, index: int, module: int, hidden: Tensor) -> Tensor:
    storage, modules = step.model.storage, step.model.modules
    assert modules is not None
    by_group: dict[int, GroupRows] = {}
    for group in storage.layout.groups_of_module[module]:
        rows = step.model.decode.pass_rows(step.state, step.lanes, window, index, group)
        most = len(rows.token_ids) // step.num_lanes
        by_group[group] = step.group_rows(group, rows.slots, rows, rows.origins, most)
    paged = PagedAttention.of_module(storage, module, by_group, step.model.kernels)
    return modules.forward(module, rows.token_ids, rows.positions, hidden, paged)


def _choose(step: LaneStep, index: int, module: int, last: Tensor, kind: SamplingKind) -> Tensor:
    """Draft number `index` of each lane from the last row of its pass, last [B, H], which a module ran."""
    assert step.model.head is not None
    head = step.model.head.for_module(module)
    if not kind.is_sampled or step.model.settings.greedy_drafts:
        return head.argmax(last)
    probs = probabilities(head.logits(last), step.sampling(kind, 1))
    step.slots.draft_probs[step.lanes, index] = probs
    keys = cycle_keys(step.column(NUM_TOKENS), index)
    return head.full_ids(sample(probs, uniform(step.column(SEED), keys, Stream.DRAFT)))
