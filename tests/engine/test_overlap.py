"""Decodes on the device, one by one or the next before the last is read: what a request gets does not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_models import byte_llama
from overlap_bench import EXECUTIONS, RESIDENT, Bench, Outcome, same_in_all
from tiny_models import tiny_alternating, tiny_glm4_moe, tiny_llama, tiny_mistral

from foredraft import LLM, EngineConfig, SamplingParams
from foredraft.errors import ConfigError
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.plan import CopyKind, StepPlan
from foredraft.runner.resident.decoder import Flight, ResidentDecoder
from foredraft.stopping import FinishReason
from foredraft.structured_output import StructuredOutput

SYNTHETIC = {"synthetic_acceptance": "0.9,0.8"}
"""Drafts are accepted by chance: many are, and all that follows depends on what was drafted."""

Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Tiny checkpoints by kind; drafts of "llama", with 8 tokens, are often accepted at temperature 1."""
    builders: dict[str, Callable[[Path], Path]] = {
        "llama": partial(tiny_llama, num_modules=4, vocab_size=8),
        "wide llama": partial(tiny_llama, num_modules=4),
        "glm4_moe": tiny_glm4_moe,
        "mistral": partial(tiny_mistral, num_modules=3),
        "alternating": partial(tiny_alternating, sliding_window=8),
    }
    made: dict[str, LoadedModel] = {}

    def get(kind: str) -> LoadedModel:
        if kind not in made:
            path = builders[kind](tmp_path_factory.mktemp("model"))
            made[kind] = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
        return made[kind]

    return get


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(8, (length,), generator=torch.Generator().manual_seed(100 * length + seed)).tolist()


def crowd(bench: Bench) -> None:
    """Requests of all kinds that come one after another: decodes, chunks, hits, choices, depths, rules."""
    shared = prompt_of(13)
    options: list[dict[str, Any]] = [
        {"max_tokens": 20},
        {"max_tokens": 18, "temperature": 1.0},
        {"num_speculative_tokens": 1, "temperature": 0.8, "top_k": 5, "priority": -1},
        {"num_speculative_tokens": 0, "priority": 1},
        {"temperature": 1.0, "top_p": 0.8, "choices": 3},
        {"repetition_penalty": 1.2, "max_tokens": 9},
        {"logprobs": 2, "temperature": 0.5, "max_tokens": 9},
        {"temperature": 1.0, "min_p": 0.1, "typical_p": 0.9, "num_speculative_tokens": 2},
        {"stop_token_ids": [3], "priority": -1},
    ]
    for number, params in enumerate(options):
        prompt = shared[: 4 * (number % 4)] + prompt_of(1 + 2 * number, number)
        bench.add(f"r{number}", prompt, **({"seed": number} | params))
        bench.step(number % 3)
        if number == 5:
            bench.engine.reset_prefix_cache()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "synthetic": SYNTHETIC,
    "block": {"verification": "block"},
    "lossy-typical": {"verification": "lossy-typical"},
    "greedy drafts": {"draft_sampling": "greedy"},
    "few draft tokens": {"draft_vocab_size": 5},
    "int8 draft head": {"draft_head_bits": 8},
    "small budget": {"max_num_batched_tokens": 20},
    "one at a time": {"max_num_seqs": 1},
    "priority": {"scheduling_policy": "priority", "num_blocks": 20, "max_model_len": 40},
    "tiny pool": {"num_blocks": 14, "max_model_len": 40},
    "host cache": {"num_blocks": 16, "max_model_len": 40, "cpu_cache_gib": 0.0002},
    "nothing shared": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_crowd_gets_the_same(load: Load, name: str) -> None:
    benches = same_in_all(load("llama"), crowd, **SETTINGS[name])
    if name in ("tiny pool", "host cache"):
        assert benches["overlapped"].engine.scheduler.num_preemptions > 0
    if name == "host cache":
        assert {CopyKind.TO_HOST, CopyKind.TO_DEVICE} <= benches["overlapped"].copies


@pytest.mark.parametrize("name", ["synthetic", "plain", "tiny pool"])
@pytest.mark.parametrize("kind", ["glm4_moe", "mistral", "alternating"])
def test_a_crowd_gets_the_same_from_other_models(load: Load, kind: str, name: str) -> None:
    settings = SETTINGS[name] | {"num_speculative_tokens": 3}
    if name == "tiny pool":
        settings |= SYNTHETIC
    same_in_all(load(kind), crowd, **settings)


# -- where requests end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_among_accepted_drafts(load: Load, temperature: float) -> None:
    loaded = load("wide llama")
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 24}
    free = Bench(loaded, "reference", **SYNTHETIC)
    free.add("free", [1, 2, 3], **params)
    free.finish()
    outcome = free.outcomes()["free"]
    first_at = [index for index, token in enumerate(outcome.token_ids) if token not in outcome.token_ids[:index]]

    def scenario(bench: Bench) -> None:
        for index in first_at:
            bench.add(f"stop {index}", [1, 2, 3], stop_token_ids=[outcome.token_ids[index]], **params)

    benches = same_in_all(loaded, scenario, **SYNTHETIC)
    for index in first_at:
        found = benches["overlapped"].outcomes()[f"stop {index}"]
        assert found.token_ids == outcome.token_ids[: index + 1]
        assert found.finish_reason is FinishReason.STOP
    depths = (*outcome.depths, 0)
    assert any(0 < depths[index] < depths[index + 1] for index in first_at), "no stop had accepted drafts behind it"


def test_a_stop_string_among_accepted_drafts(tmp_path: Path) -> None:
    tiny_llama(tmp_path, num_modules=4, tokenizer=True)
    found: dict[str, list[tuple[Any, ...]]] = {}
    for execution in EXECUTIONS:
        llm = LLM(tmp_path, device="cpu", dtype="float32", num_blocks=64, execution=execution, **SYNTHETIC)
        (free,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=24, seed=1))
        words = free.text.split()
        stops = [" ".join(words[index : index + 2]) for index in range(1, len(words) - 1)]
        params = [SamplingParams(max_tokens=24, seed=1, stop=[stop]) for stop in stops]
        outputs = llm.generate([[1, 2, 3]] * len(stops), params)
        assert all(output.finish_reason is FinishReason.STOP for output in outputs)
        found[execution] = [(output.text, output.token_ids, output.finish_reason) for output in outputs]
        llm.engine.cache.check_integrity()
    assert found["synchronous"] == found["overlapped"] == found["reference"]


@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])
def test_budgets_and_the_end_of_the_context(load: Load, kind: str) -> None:
    """From one token to more than a step can bring, with drafts that would go further."""

    def scenario(bench: Bench) -> None:
        for number in range(1, 7):
            bench.add(f"budget {number}", prompt_of(5, number), max_tokens=number)
            bench.add(f"end {number}", prompt_of(24 - number, number), max_tokens=None, temperature=number % 2)

    settings = {"max_model_len": 24, "num_speculative_tokens": 3, "max_num_seqs": 3}
    benches = same_in_all(load(kind), scenario, **SYNTHETIC, **settings)
    for number in range(1, 7):
        outcomes = benches["overlapped"].outcomes()
        assert len(outcomes[f"budget {number}"].token_ids) == number
        assert len(outcomes[f"end {number}"].token_ids) == number
        assert outcomes[f"end {number}"].finish_reason is FinishReason.LENGTH


# -- what happens while a step is under way --------------------------------------------------------------------------


def alone(loaded: LoadedModel, prompt: list[int], settings: dict[str, Any], **params: Any) -> Outcome:
    """What the host's steps make of one request."""
    bench = Bench(loaded, "reference", **settings)
    bench.add("alone", prompt, **params)
    bench.finish()
    return bench.outcomes()["alone"]


def test_arrivals_and_their_chunks(load: Load) -> None:
    loaded, settings = load("llama"), SYNTHETIC | {"max_num_batched_tokens": 20}
    bench = Bench(loaded, "overlapped", **settings)
    bench.add("first", prompt_of(5), max_tokens=40)
    bench.step_until_under_way()
    bench.add("second", prompt_of(33), temperature=1.0)  # more than one step
    bench.finish()
    outcomes = bench.outcomes()
    assert outcomes["first"] == alone(loaded, prompt_of(5), settings, max_tokens=40)
    assert outcomes["second"] == alone(loaded, prompt_of(33), settings, temperature=1.0)


def test_an_aborted_request_gives_its_blocks_back_at_once(load: Load) -> None:
    """And another takes them, its id and its slot, while the step with the old one is still under way."""
    loaded = load("llama")
    bench = Bench(loaded, "overlapped", **SYNTHETIC, num_blocks=16, max_model_len=40, enable_prefix_caching=False)
    bench.add("stays", prompt_of(5), max_tokens=20)
    bench.add("goes", prompt_of(9), max_tokens=20)
    bench.step_until_under_way()
    pools = bench.engine.cache.pools
    held = bench.engine.cache.num_held_blocks("goes")
    before = [pool.num_free_blocks for pool in pools]
    assert bench.engine.abort("goes") is bench.requests["goes"]
    bench.engine.cache.check_integrity()
    assert [pool.num_free_blocks for pool in pools] == [free + number for free, number in zip(before, held)]
    assert bench.is_under_way
    kept = tuple(bench.requests["goes"].token_ids)
    aborted = bench.requests["goes"]
    bench.add("goes", prompt_of(11), temperature=1.0)
    bench.finish()
    assert tuple(aborted.token_ids) == kept
    assert bench.outcomes()["goes"] == alone(loaded, prompt_of(11), SYNTHETIC, temperature=1.0)
    assert bench.outcomes()["stays"] == alone(loaded, prompt_of(5), SYNTHETIC, max_tokens=20)


def test_all_aborted_and_the_next_request(load: Load) -> None:
    """A step under way of which nobody is left disturbs nothing."""
    loaded = load("llama")
    bench = Bench(loaded, "overlapped", **SYNTHETIC)
    bench.add("goes", prompt_of(5), max_tokens=20)
    bench.step_until_under_way()
    bench.engine.abort("goes")
    bench.assert_empty()
    bench.add("next", prompt_of(7))
    bench.finish()
    assert bench.outcomes()["next"] == alone(loaded, prompt_of(7), SYNTHETIC)


def test_the_prefix_cache_is_reset(load: Load) -> None:
    def scenario(bench: Bench) -> None:
        bench.add("first", prompt_of(9), max_tokens=24)
        bench.add("second", prompt_of(9), max_tokens=24, temperature=1.0)
        bench.step_until_under_way(4)
        bench.engine.reset_prefix_cache()
        bench.step(2)
        bench.add("third", prompt_of(9))
        bench.engine.reset_prefix_cache()

    same_in_all(load("llama"), scenario, **SYNTHETIC)


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "alternating"])
def test_depths_that_change(load: Load, kind: str) -> None:
    """Greedy tokens are the target's own at any depth, whenever it changes."""
    loaded, settings = load(kind), {"num_speculative_tokens": 3}
    for execution in EXECUTIONS:
        bench = Bench(loaded, execution, **settings)
        for name in ("a", "b"):
            bench.add(name, prompt_of(6), max_tokens=40, num_speculative_tokens=1)
        bench.step_until_under_way()
        for depth_a, depth_b in ((3, 0), (0, 3), (2, 1), (1, 2), (0, 0), (3, 3)):
            bench.engine.set_num_speculative_tokens("a", depth_a)
            bench.engine.set_num_speculative_tokens("b", depth_b)
            bench.step(3)
        bench.finish()
        expected = alone(loaded, prompt_of(6), settings, max_tokens=40, num_speculative_tokens=0).token_ids
        assert bench.outcomes()["a"].token_ids == bench.outcomes()["b"].token_ids == expected, execution


def test_drafts_that_were_launched_count_although_the_depth_is_zero_since(load: Load) -> None:
    """They are verified, and the rows behind them are known to be exact."""
    bench = Bench(load("llama"), "overlapped", **SYNTHETIC)
    request = bench.add("only", prompt_of(6), max_tokens=30)
    bench.step_until_under_way(4)
    bench.engine.set_num_speculative_tokens("only", 0)
    bench.step()
    assert len(request.draft_token_ids) == 4
    assert request.exact.num_exact_rows == tuple(request.num_tokens - depth for depth in range(1, 5))
    bench.finish()


def test_blocks_go_to_the_host_before_others_write_them(load: Load) -> None:
    """No step is launched ahead of copies: what it would write is still to be copied."""

    def scenario(bench: Bench) -> None:
        first = bench.add("first", prompt_of(25), max_tokens=2)
        while bench.engine.has_unfinished:
            bench.step()
        bench.add("second", prompt_of(3), max_tokens=36)  # takes the blocks of the first one by one
        while bench.engine.has_unfinished:
            bench.step()
        bench.add("again", first.prompt_token_ids, max_tokens=12)

    settings = SYNTHETIC | {"num_blocks": 12, "max_model_len": 40, "max_num_seqs": 1, "cpu_cache_gib": 0.001}
    benches = same_in_all(load("llama"), scenario, **settings)
    for bench in benches.values():
        assert bench.requests["again"].num_cached_tokens
        assert bench.copies == {CopyKind.TO_HOST, CopyKind.TO_DEVICE}


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_pending_drafts_survive_preemption(load: Load, verification: str) -> None:
    """With what they were drawn from: tokens with a seed are the same in a cache that is too small."""
    settings = {"verification": verification, "max_model_len": 40}
    loaded = load("llama")
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0}
    bench = Bench(loaded, "overlapped", num_blocks=14, **settings)
    for seed in range(4):
        bench.add(f"r{seed}", prompt_of(5, seed), seed=seed, **params)
    bench.finish()
    assert bench.engine.scheduler.num_preemptions > 0
    for seed in range(4):
        assert bench.outcomes()[f"r{seed}"] == alone(loaded, prompt_of(5, seed), settings, seed=seed, **params)


def test_preempted_requests_give_up_their_slots_to_others(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, surplus = load("llama"), ResidentDecoder.surplus
    given_up: list[str] = []

    def watched(self: ResidentDecoder, plans: Any) -> list[str]:
        given_up.extend(found := surplus(self, plans))
        return found

    monkeypatch.setattr(ResidentDecoder, "surplus", watched)
    settings = {"max_num_seqs": 2, "scheduling_policy": "priority"}
    for execution in RESIDENT:
        given_up.clear()
        bench = Bench(loaded, execution, **settings)
        for number in range(2):
            bench.add(f"r{number}", prompt_of(5, number), seed=number, temperature=1.0, max_tokens=30, priority=number)
        bench.step_until_under_way(3)
        bench.add("urgent", prompt_of(6), seed=7, temperature=1.0, priority=-1)
        bench.settle()
        bench.engine.scheduler.preempt(bench.requests["r1"])
        bench.finish()
        assert given_up == ["r1"]
        for number in range(2):
            expected = alone(loaded, prompt_of(5, number), {}, seed=number, temperature=1.0, max_tokens=30)
            assert bench.outcomes()[f"r{number}"] == expected, execution


# -- ends and failures -----------------------------------------------------------------------------------------------

PROMPTS = [prompt_of(5), prompt_of(9)]
PARAMS = SamplingParams(max_tokens=20, seed=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


def open_llm(path: Path, execution: str = "overlapped", **settings: Any) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 64}
    return LLM(path, execution=execution, **(defaults | settings))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[int, ...]]:
    return [output.token_ids for output in open_llm(path, "reference").generate(PROMPTS, PARAMS)]


def check_served(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
    llm.engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.cache.pools)
    assert llm.engine.runner.resident is not None
    assert not llm.engine.runner.resident._slots


def test_grammars_beside_plain_requests(path: Path) -> None:
    params = [
        PARAMS,
        SamplingParams(max_tokens=12, seed=1, temperature=1.0, structured_output=StructuredOutput(regex="[a-c]{4,9}")),
        SamplingParams(max_tokens=12, seed=2, temperature=1.0),
    ]
    found = {}
    for execution in EXECUTIONS:
        outputs = open_llm(path, execution, **SYNTHETIC).generate([*PROMPTS, prompt_of(7)], params)
        found[execution] = [(output.text, output.token_ids, output.finish_reason) for output in outputs]
    assert found["synchronous"] == found["overlapped"] == found["reference"]


@pytest.mark.parametrize("end", ["close", "abort", "read on"])
def test_streams(path: Path, expected: list[tuple[int, ...]], end: str) -> None:
    llm = open_llm(path)
    first, second = (llm.stream(prompt, PARAMS) for prompt in PROMPTS)
    for _ in range(4):
        next(first), next(second)
    assert llm.engine._under_way is not None
    if end == "close":
        first.close()
    elif end == "abort":
        llm.engine.abort(llm.engine.scheduler.unfinished_ids[0])
    last = list(second)[-1].output
    assert last is not None
    assert last.token_ids == expected[1]
    first.close()
    check_served(llm, expected)


def test_closing_with_a_step_under_way(path: Path, expected: list[tuple[int, ...]], tmp_path: Path) -> None:
    """What is saved then is found again."""
    settings: dict[str, Any] = {"cpu_cache_gib": 0.001, "cache_dir": tmp_path / "kept"}
    llm = open_llm(path, **settings)
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(6):
        [next(stream) for stream in streams]
    assert llm.engine._under_way is not None
    llm.close()
    for stream in streams:
        last = list(stream)[-1].output
        assert last is not None
        assert last.finish_reason is FinishReason.ABORT
    check_served(llm, expected)
    again = open_llm(path, **settings)
    check_served(again, expected)
    assert again.stats.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("place", "number"), [("launch", 2), ("launch_ahead", 3), ("collect", 3), ("commit", 3), ("plan_ahead", 3)]
)
def test_a_failure_ends_the_requests_and_nothing_else(
    path: Path, expected: list[tuple[int, ...]], place: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(path)
    part = llm.engine.scheduler if place in ("commit", "plan_ahead") else llm.engine.runner
    whole, calls = getattr(part, place), 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise MemoryError("no more")
        return whole(*args)

    monkeypatch.setattr(part, place, fails)
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    with pytest.raises(MemoryError, match="no more"):
        [list(stream) for stream in streams]
    assert not llm.engine.has_unfinished
    assert llm.engine._under_way is None
    for stream in streams:
        stream.close()
    monkeypatch.undo()
    check_served(llm, expected)


def test_a_failure_of_the_device_while_a_step_is_read(
    path: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it is given up too."""
    llm = open_llm(path)
    collect, calls = Flight.collect, 0

    def fails(self: Flight) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the device has gone")
        return collect(self)

    monkeypatch.setattr(Flight, "collect", fails)
    with pytest.raises(RuntimeError, match="has gone"):
        llm.generate(PROMPTS, PARAMS)
    check_served(llm, expected)


def test_what_is_read_is_what_the_plan_has_become(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that was launched for two requests, of which one has ended since, one is committed."""
    bench = Bench(load("llama"), "overlapped", **SYNTHETIC)
    bench.add("stays", prompt_of(5), max_tokens=30)
    bench.add("goes", prompt_of(6), max_tokens=30)
    bench.step_until_under_way()
    collect, plans = bench.engine.runner.collect, []

    def watched(plan: StepPlan, flight: Flight) -> Any:
        plans.append((set(flight.request_ids), [one.request_id for one in plan.requests]))
        return collect(plan, flight)

    monkeypatch.setattr(bench.engine.runner, "collect", watched)
    bench.engine.abort("goes")
    bench.step()
    assert plans == [({"stays", "goes"}, ["stays"])]


# -- what broke once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [62, 63, 128])
def test_one_module_chained_over_more_drafts_than_the_device_keeps(tmp_path: Path, depth: int) -> None:
    """The second request finds its prompt in the cache, so that its first step is a decode that drafts."""
    path = tiny_llama(tmp_path / "model", num_modules=1, max_position_embeddings=1024)
    found = []
    for execution in ("host", "synchronous", "overlapped"):
        llm = LLM(path, device="cpu", execution=execution, num_speculative_tokens=depth, max_num_seqs=1, block_size=4)
        wanted = SamplingParams(max_tokens=2 * depth + 20, ignore_eos=True, temperature=0.0)
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        found.append([llm.generate(prompt, wanted)[0].token_ids for _ in range(2)])
    assert found[0] == found[1] == found[2]


def test_slots_are_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks a change off: Ctrl-C while a request is forgotten, for instance."""
    llm = LLM(tiny_llama(tmp_path / "model"), device="cpu", execution="overlapped", max_num_seqs=1)
    wanted = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    expected = llm.generate([1, 2, 3], wanted)[0].token_ids
    resident = llm.engine.runner.resident
    assert resident is not None
    forget = resident.forget

    def interrupted(request_id: str) -> None:
        forget(request_id)
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(resident, "forget", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([1, 2, 3], wanted)
        assert llm.generate([1, 2, 3], wanted)[0].token_ids == expected
        llm.engine.cache.check_integrity()


@pytest.mark.parametrize("execution", ["host", "reference"])
def test_graphs_that_nothing_would_use_are_refused(execution: Any) -> None:
    config = EngineConfig(cuda_graphs="at-start", execution=execution)
    with pytest.raises(ConfigError, match="cuda_graphs=at-start has no effect on cuda with execution="):
        config.check_device("cuda")
    EngineConfig(cuda_graphs="at-start").check_device("cuda")
