"""What every family of models must pass: `FamilyContract`, whose subclasses name a `FamilyCase`.

    class TestLlama(FamilyContract):
        case = FamilyCase("llama", tiny_llama, num_modules=3, depths=(1, 2, 3))

The truth is transformers' (or the family's own straight reference), over the whole history in every call. Random models
accept almost no draft of their own: acceptance is scripted, or brought about by leaving few tokens to choose from, or
by chance.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from exactness import test_oracle, test_resident_oracle
from families.case import FamilyCase, FamilyModel, load
from families.histories import FEW, Machines
from handing import move_all, soil
from hypothesis.stateful import run_state_machine_as_test
from reference import RecordingDrafter, recording_engine
from safetensors.torch import load_file, save_file
from scripted import finish
from torch import Tensor

from foredraft import LLM
from foredraft.engine.engine import Engine
from foredraft.errors import ModelLoadError
from foredraft.request import Request
from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.sampler import SamplingTensors, probabilities, sample
from foredraft.sampling_params import SamplingParams

__all__ = ["FamilyCase", "FamilyContract"]

LENGTHS = (1, 2, 5, 17, 40, 70)
FEW_LENGTHS = (1, 6, 17)
BOUND = 1e-4
EXECUTIONS = ("host", "overlapped")


class FamilyContract:
    """The tests; a subclass has them all. Fixtures and what `depth` stands for are in the conftest beside this."""

    case: ClassVar[FamilyCase]

    # -- the target ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("execution", ["host", "reference"])
    @pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
    def test_logits_alone(self, model: FamilyModel, chunk: int, execution: str) -> None:
        engine = model.engine(0, max_num_seqs=1, max_num_batched_tokens=chunk, execution=execution)
        check_logits(model, engine, LENGTHS)

    @pytest.mark.parametrize("execution", ["host", "reference"])
    @pytest.mark.parametrize("budget", [7, 16, 1024])
    def test_logits_together(self, model: FamilyModel, budget: int, execution: str) -> None:
        """Prefill chunks of several lengths in a step, beside decodes."""
        engine = model.engine(0, max_num_seqs=6, max_num_batched_tokens=budget, execution=execution)
        sizes = check_logits(model, engine, LENGTHS)
        assert any(len(set(step)) > 1 for step in sizes)

    # -- drafts --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("is_chunked", [True, False])
    def test_drafts_whatever_is_accepted(self, model: FamilyModel, depth: int, is_chunked: bool) -> None:
        """The script accepts by the number of tokens: over prompts of so many lengths, any number from none to all."""
        budget = 3 * (depth + 1) if is_chunked else 1024
        scripted = Scripted(model, depth, budget=budget)
        requests = [scripted.add(length, 2 * depth + 8) for length in (*range(1, depth + 2), 20)]
        scripted.finish()
        accepted = scripted.engine.stats.speculation.accepted_by_depth
        assert accepted[-1] > 0
        assert accepted[0] < scripted.engine.stats.speculation.num_drafts
        assert all(request.num_tokens == request.max_total_tokens for request in requests)

    @pytest.mark.parametrize("execution", [*EXECUTIONS, "reference"])
    def test_drafts_of_a_greedy_run(self, model: FamilyModel, depth: int, execution: str) -> None:
        engine = model.engine(depth, execution=execution)
        check_own_drafts(model, engine, SamplingParams(max_tokens=depth + 8, ignore_eos=True))

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_drafts_of_a_sampled_run(self, model: FamilyModel, depth: int, execution: str) -> None:
        engine = model.engine(depth, execution=execution)
        params = SamplingParams(max_tokens=depth + 14, ignore_eos=True, temperature=1.5, seed=3)
        check_own_drafts(model, engine, params)
        speculation = engine.stats.speculation
        assert 0 < speculation.num_accepted_tokens < speculation.num_drafted_tokens

    # -- the output ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("execution", EXECUTIONS)
    @pytest.mark.parametrize("is_chunked", [True, False])
    def test_greedy_output_is_the_targets_own(
        self, model: FamilyModel, depth: int, is_chunked: bool, execution: str
    ) -> None:
        """Up to the longest sequence that is allowed, which the last request reaches."""
        limits = {"max_model_len": 40, "max_num_batched_tokens": 3 * (depth + 1) if is_chunked else 1024}
        for k in (0, depth):
            engine = model.engine(k, execution=execution, **limits)
            requests = run(engine, [model.prompt(length) for length in (3, 11, 28)], SamplingParams(max_tokens=16))
            assert [request.num_tokens for request in requests] == [3 + 16, 11 + 16, 40]
            for request in requests:
                prompt = request.terms.row_ids
                assert request.token_ids == model.reference.sequence(prompt, 16)[: request.num_tokens]

    @pytest.mark.parametrize("is_chunked", [True, False])
    def test_greedy_output_with_own_drafts_accepted(self, model: FamilyModel, depth: int, is_chunked: bool) -> None:
        """Of three tokens that are allowed, a module finds the right one now and then."""
        budget = 3 * (depth + 1) if is_chunked else 1024
        prompts = [model.prompt(length, seed=1) for length in (2, 9, 23)]
        allowed = random.Random(0).sample(range(model.case.vocab_size), 3)
        params = SamplingParams(max_tokens=24, ignore_eos=True, allowed_token_ids=allowed)
        outputs, accepted = [], []
        for k in (0, depth):
            engine = model.engine(k, max_num_batched_tokens=budget)
            outputs.append([request.token_ids for request in run(engine, prompts, params)])
            accepted.append(engine.stats.speculation.num_accepted_tokens)
        assert outputs[0] == outputs[1]
        assert accepted[1] > 0

    # -- rows, after any history ---------------------------------------------------------------------------------------

    def test_rows_are_those_of_one_prefill(self, machines: Machines) -> None:
        run_state_machine_as_test(machines.host, settings=FEW)
        for seed in range(2):
            test_oracle.walk(machines.host(), random.Random(seed))
        wanted = {f"accepted {number} of {machines.host.max_depth}" for number in range(machines.host.max_depth + 1)}
        assert wanted | {"hit", "miss", "module hit", "preempted", "chunk"} <= machines.host.happened

    def test_rows_on_the_device_are_those_of_one_prefill(self, machines: Machines) -> None:
        if not self.case.is_resident:
            pytest.skip("its decodes are run by the host")
        for seed in range(2):
            test_resident_oracle.walk(machines.device(), random.Random(seed))
        wanted = {f"accepted {number} of {machines.device.max_depth}" for number in (0, machines.device.max_depth)}
        assert wanted | {"hit", "module hit", "under way", "settled"} <= machines.device.happened

    # -- prefix hits, preemption, changes of depth ---------------------------------------------------------------------

    @pytest.mark.parametrize("num_equal", [0, 1, 3])
    def test_prefix_hits(self, model: FamilyModel, depth: int, num_equal: int) -> None:
        """The second prompt leaves the first one's text some tokens after a block; the third is the second again."""
        scripted = Scripted(model, depth)
        shared, others = model.prompt(20), model.prompt(12)
        different = [(token_id + 1) % model.case.vocab_size for token_id in others[num_equal:]]
        scripted.add([*shared, *others], 10)
        scripted.finish()
        second = scripted.add([*shared, *others[:num_equal], *different], 10)
        scripted.finish()
        third = scripted.add(second.terms.row_ids, 10)
        scripted.finish()
        assert second.num_cached_tokens == 20
        assert third.num_cached_tokens == 32

    @pytest.mark.parametrize(("first_depth", "second_depth"), [(0, None), (1, None), (1, 1)])
    def test_prefix_hits_across_depths(
        self, model: FamilyModel, depth: int, first_depth: int, second_depth: int | None
    ) -> None:
        """The target's rows are there, those of the modules in part or not at all; then all modules are to draft."""
        scripted = Scripted(model, depth)
        first = scripted.add(18, 10, num_speculative_tokens=first_depth)
        scripted.finish()
        second = scripted.add([*first.token_ids, *model.prompt(5)], 16, num_speculative_tokens=second_depth)

        def draft_all() -> None:
            if second.request_id in scripted.engine.scheduler:
                scripted.engine.set_num_speculative_tokens(second.request_id, depth)

        scripted.finish(draft_all)
        assert second.num_cached_tokens in (24, 28)  # with or without rows at which pending drafts were verified

    @pytest.mark.parametrize("is_chunked", [True, False])
    def test_preempted_requests(self, model: FamilyModel, is_chunked: bool) -> None:
        depth = min(3, max(model.case.depths))
        limits = {"num_blocks": 12, "max_model_len": 40, "budget": 16 if is_chunked else 1024}
        scripted = Scripted(model, depth, max_num_seqs=4, **limits)
        for length in (1, 5, 9, 12, 8):
            scripted.add(length, 24)
        scripted.finish()
        assert scripted.engine.stats.num_preemptions > 0

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_preempted_requests_with_a_seed(self, model: FamilyModel, execution: str) -> None:
        depth = min(3, max(model.case.depths))
        prompts = [model.prompt(length) for length in (1, 5, 9, 12)]
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.5, seed=3)
        outputs = []
        for num_blocks in (128, 12):
            limits = {"max_num_seqs": 4, "max_model_len": 40, "num_blocks": num_blocks}
            engine = model.engine(depth, execution=execution, **limits)
            outputs.append([request.token_ids for request in run(engine, prompts, params)])
            assert (engine.stats.num_preemptions > 0) == (num_blocks == 12)
        assert outputs[0] == outputs[1]

    @pytest.mark.parametrize("is_chunked", [True, False])
    def test_changes_of_depth(self, model: FamilyModel, is_chunked: bool) -> None:
        most = max(model.case.depths)
        depths = (most, most, 0, min(1, most), 0, 0, most - 1, most)
        scripted = Scripted(model, most, max_num_seqs=2, budget=2 * (most + 1) if is_chunked else 1024)
        for length in (1, 13):
            scripted.add(length, 30)

        def change_depth() -> None:
            for request in scripted.engine.scheduler.requests():
                step = scripted.engine.stats.num_steps + request.arrival
                scripted.engine.set_num_speculative_tokens(request.request_id, depths[step % len(depths)])

        change_depth()
        scripted.finish(change_depth)
        assert {len(drafts) for _, drafts in scripted.drafter.seen} >= set(depths) - {0}

    # -- moves to another engine ---------------------------------------------------------------------------------------

    def test_requests_that_move(self, model: FamilyModel, depth: int) -> None:
        """In the middle of their prompts, and later; drafts afterwards are what the modules make of all tokens."""
        num_drafts = 0
        for count in (1, 2, 5):
            old, new = (Scripted(model, depth, budget=3 * (depth + 1) + 4) for _ in range(2))
            for length in (2, 9, 20):
                old.add(length, 2 * depth + 8)
            for _ in range(count):
                old.engine.step()
            soil(new.engine)
            new.drafter.continuations = old.drafter.continuations
            new.requests = move_all(old.engine, new.engine)
            new.finish()
            num_drafts += len(new.drafter.logits)  # none, where the last ones were pending already
        assert num_drafts

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_requests_with_a_seed_that_move(self, model: FamilyModel, execution: str) -> None:
        depth = min(3, max(model.case.depths))
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.5, seed=3)
        outputs = []
        for is_moved in (False, True):
            engine = model.engine(depth, execution=execution)
            requests = [engine.add_request(f"{n}", model.prompt(n), params) for n in FEW_LENGTHS]
            for _ in range(4):
                engine.step()
            engine.settle()
            if is_moved:
                old, engine = engine, model.engine(depth, execution=execution)
                soil(engine)
                requests = move_all(old, engine)
            finish(engine)
            outputs.append([(request.token_ids, request.token_depths, request.stats) for request in requests])
        assert outputs[0] == outputs[1]

    # -- loading -------------------------------------------------------------------------------------------------------

    def test_a_missing_tensor_of_a_module_is_named(self, model: FamilyModel, tmp_path: Path) -> None:
        for index, (name, file) in enumerate(model.module_tensors(0).items()):
            path = model.without(tmp_path / str(index), name, file)
            with pytest.raises(ModelLoadError, match="missing") as error:
                load(path)
            assert_named(name, str(error.value), self.case.aliases)
            assert load(path, num_modules=0).mtp is None

    def test_stored_in_bfloat16(self, model: FamilyModel, tmp_path: Path) -> None:
        """As published; converted to float32 while it is read, it is what it was."""
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            path = tmp_path / str(dtype)
            shutil.copytree(model.path, path)
            for file in path.glob("*.safetensors"):
                tensors = {name: tensor.bfloat16().to(dtype) for name, tensor in load_file(file).items()}
                save_file(tensors, file, metadata={"format": "pt"})
            loaded = load(path)
            assert loaded.mtp is not None
            found.append({**loaded.target.state_dict(), **loaded.mtp.state_dict(prefix="mtp.")})
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())

    def test_a_missing_tensor_of_the_target_is_named(self, model: FamilyModel, tmp_path: Path) -> None:
        tensors = model.target_tensors()
        for index, (name, file) in enumerate(list(tensors.items())[:: max(1, len(tensors) // 6)]):
            path = model.without(tmp_path / str(index), name, file)
            with pytest.raises(ModelLoadError, match="missing") as error:
                load(path)
            assert_named(name, str(error.value), self.case.target_aliases)

    def test_a_surplus_tensor_of_a_module_is_named(self, model: FamilyModel, tmp_path: Path) -> None:
        name = f"{self.case.module_prefix(0)}surplus_part.weight"
        file = next(iter(model.module_tensors(0).values()))
        path = model.damaged(tmp_path / "surplus", file, lambda tensors: tensors.update({name: torch.ones(2)}))
        with pytest.raises(ModelLoadError, match=r"surplus: .*surplus_part\.weight"):
            load(path)

    @pytest.mark.parametrize("num_modules", [0, 1])
    def test_tensors_of_later_modules_are_not_read(self, model: FamilyModel, num_modules: int, tmp_path: Path) -> None:
        unread = {n: f for k in range(num_modules, self.case.num_modules) for n, f in model.module_tensors(k).items()}
        if not unread:
            pytest.skip("no module is left")
        (file,) = set(unread.values())

        def spoil(tensors: dict[str, Tensor]) -> None:
            for name in unread:
                tensors[name].fill_(torch.nan)

        spoilt = model.damaged(tmp_path / "spoilt", file, spoil)
        mtp = load(spoilt, num_modules=num_modules).mtp
        assert mtp is None or all(bool(tensor.isfinite().all()) for tensor in mtp.state_dict().values())
        whole, spared = (drafts_of(model, path, num_modules) for path in (model.path, spoilt))
        assert whole == spared
        whole, spared = (drafts_of(model, path, self.case.num_modules) for path in (model.path, spoilt))
        assert whole != spared  # where they are read, it shows


class Scripted:
    """An engine whose drafts are right as far as a script says; at its end all of them are compared."""

    def __init__(self, model: FamilyModel, depth: int, max_num_seqs: int = 3, **limits: int) -> None:
        self.model = model
        self.engine: Engine
        self.drafter: RecordingDrafter
        self.engine, self.drafter = recording_engine(model.loaded, depth, max_num_seqs, **limits, **model.case.settings)
        self.requests: list[Request] = []

    def add(self, prompt: int | Sequence[int], max_tokens: int, **options: Any) -> Request:
        """prompt: its tokens, or how many there should be."""
        token_ids = self.model.prompt(prompt) if isinstance(prompt, int) else prompt
        name = f"{len(self.requests)}"
        self.drafter.continuations[name] = self.model.reference.sequence(
            token_ids, max_tokens + self.engine.limits.max_depth
        )
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        self.requests.append(self.engine.add_request(name, token_ids, params))
        return self.requests[-1]

    def finish(self, after_step: Any = lambda: None) -> None:
        """Run all requests to their ends: tokens are the target's own, drafts what the modules make of them."""
        finish(self.engine, after_step)
        for request in self.requests:
            assert request.token_ids == self.drafter.continuations[request.request_id][: request.max_total_tokens]
        self.drafter.assert_equals(self.model.reference, {r.request_id: r.token_ids for r in self.requests})


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    """Serve prompts at once; returns their ended requests."""
    requests = [engine.add_request(f"{index}", prompt, params) for index, prompt in enumerate(prompts)]
    finish(engine)
    return requests


def check_logits(model: FamilyModel, engine: Engine, lengths: Sequence[int]) -> list[list[int]]:
    """The target's logits at every row that the runner computes, of prompts and of three tokens after each.

    Returns how many rows of each request were in each step. Rows are read before a commit, which may give them back.
    """
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = {f"{n}": engine.add_request(f"{n}", model.prompt(n), params) for n in lengths}
    storage = engine.runner.storage
    rows: dict[str, list[Tensor]] = {name: [] for name in requests}
    sizes = []
    while engine.has_unfinished:
        plan = engine.scheduler.plan()
        result = engine.runner.execute(plan)
        for part in plan.requests:
            end = part.first_row + len(part.token_ids)
            slots = storage.slots(part.blocks[storage.layout.hidden_group], end)[part.first_row :]
            rows[part.request_id].append(storage.hidden[slots].clone())
        sizes.append([len(part.token_ids) for part in plan.requests])
        engine.scheduler.commit(plan, result)
    for name, request in requests.items():
        ours = engine.runner.target.logits(torch.cat(rows[name]))
        theirs = model.reference.logits(request.token_ids[:-1])
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= BOUND * max(1.0, float(theirs.abs().max()))
    return sizes


def check_own_drafts(model: FamilyModel, engine: Engine, params: SamplingParams) -> None:
    """Every draft of every step of a few requests is the one that the reference makes of the same history.

    Where two tokens are as good within rounding, either will do.
    """
    requests = [engine.add_request(f"{n}", model.prompt(n), params) for n in FEW_LENGTHS]
    for request, num_tokens, drafts in drafting_steps(engine, requests):
        logits = model.reference.draft_logits(request.token_ids[:num_tokens], drafts)
        chosen = torch.tensor(drafts)
        if params.temperature == 0:
            lead = logits.amax(dim=-1) - logits.gather(1, chosen[:, None])[:, 0]
            assert bool((lead <= BOUND * logits.abs().amax(dim=-1)).all())
        else:
            assert bool((drawn(logits, num_tokens, params) == chosen).any(dim=0).all())


def drafting_steps(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[Request, int, tuple[int, ...]]]:
    """Run all steps; after each, every request that has pending drafts, with its number of tokens and those drafts."""
    num_drafting = {request.request_id: 0 for request in requests}
    while engine.has_unfinished:
        for update in engine.step():
            request = update.request
            if request.draft_token_ids and request.finish_reason is None:
                num_drafting[request.request_id] += 1
                yield request, request.num_tokens, request.draft_token_ids
    assert all(number > 1 for number in num_drafting.values())


def drawn(logits: Tensor, num_tokens: int, params: SamplingParams) -> Tensor:
    """The drafts [3, D] that a request draws from logits [D, V] after so many tokens: by the numbers that its seed
    gives, and by slightly smaller and larger ones."""
    assert params.seed is not None
    sampling = SamplingTensors.from_params([(params.temperature, 0, 1.0, params.seed)] * len(logits))
    keys = cycle_keys(torch.full((len(logits),), num_tokens), torch.arange(len(logits)))
    probs, numbers = probabilities(logits, sampling), uniform(sampling.seeds, keys, Stream.DRAFT)
    shifts = (-BOUND, 0.0, BOUND)
    return torch.stack([sample(probs, (numbers + shift).clamp(0, 1 - BOUND**2)) for shift in shifts])


def drafts_of(model: FamilyModel, path: Path, depth: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """All drafts and tokens of a few requests, from the checkpoint to the end."""
    llm = LLM(path, dtype="float32", device="cpu", num_speculative_tokens=depth, num_blocks=64, max_num_seqs=3)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [llm.engine.add_request(f"{n}", model.prompt(n), params) for n in FEW_LENGTHS]
    steps = []
    while llm.engine.has_unfinished:
        for update in llm.engine.step():
            steps.append((update.request.request_id, update.request.num_tokens, update.request.draft_token_ids))
    return [*steps, *((request.request_id, 0, tuple(request.token_ids)) for request in requests)]


def assert_named(name: str, message: str, aliases: Mapping[str, str]) -> None:
    """A message speaks of a tensor, if perhaps as a part of the one that transformers makes of several."""
    last = [part for part in name.split(".") if part not in ("weight", "bias")][-1]
    words = set(re.findall("[A-Za-z0-9]+", message))
    assert set(aliases.get(last, last).split("_")) <= words, f"{name} is not named: {message}"
