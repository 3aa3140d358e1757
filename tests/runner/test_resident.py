"""Resident decoding: the shapes of its steps, what is sent to the device, and what padding may hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from overlap_bench import Bench, Outcome
from tiny_models import tiny_alternating, tiny_glm4_moe, tiny_llama, tiny_mistral

from foredraft.exactness import ExactRows
from foredraft.kernels.decode_state import (
    CYCLE_DEPTH,
    EXACT,
    MAX_TOTAL,
    NOBODY,
    NUM_DRAFTS,
    NUM_TOKENS,
    ORIGIN,
    RESERVED_SLOT,
    RING_SIZE,
    SEED,
    TOP_K,
    DecodeState,
)
from foredraft.kernels.torch import decode
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.plan import RequestPlan, RequestTerms, WindowPlan
from foredraft.runner.resident import decoder as resident_decoder
from foredraft.runner.resident.decoder import ResidentDecoder
from foredraft.runner.resident.graphs import GraphCache
from foredraft.runner.resident.mailbox import Mailbox, MailboxSize
from foredraft.runner.resident.shape import (
    GREEDY,
    MAX_WINDOW,
    WINDOW_SIZES,
    DraftShape,
    SamplingKind,
    lane_sizes,
    padded,
    window_need,
)
from foredraft.runner.resident.slot_state import SlotLayout, SlotState
from foredraft.runner.resident.step import run_drafts
from foredraft.sampling_params import SamplingParams

CPU = torch.device("cpu")
SYNTHETIC = {"synthetic_acceptance": "0.9,0.8"}
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": partial(tiny_llama, num_modules=4, vocab_size=8),
    "glm4_moe": tiny_glm4_moe,
    "mistral": partial(tiny_mistral, num_modules=3),
    "alternating": partial(tiny_alternating, sliding_window=8),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def get(kind: str) -> LoadedModel:
        if kind not in made:
            made[kind] = load_checkpoint(
                BUILDERS[kind](tmp_path_factory.mktemp("model")), dtype=torch.float32, device=CPU
            )
        return made[kind]

    return get


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 25, 64, 100])
def test_every_number_of_lanes_is_padded_a_little(most: int) -> None:
    sizes = lane_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        assert count <= padded(count, sizes) < max(2 * count, count + 8)


def test_what_a_batch_draws_with() -> None:
    plain = SamplingParams(temperature=1.0)
    greedy = SamplingParams(top_k=5, top_p=0.5)  # filters of a greedy request are none
    assert SamplingKind.of([greedy, SamplingParams()]) == GREEDY
    assert SamplingKind.of([greedy, plain]) == SamplingKind(is_sampled=True)
    assert SamplingKind.of([plain, SamplingParams(temperature=0.5, top_k=3)]) == SamplingKind(True, any_top_k=True)
    last = SamplingParams(temperature=0.5, top_p=0.9, min_p=0.1, typical_p=0.5)
    assert SamplingKind.of([last, plain]) == SamplingKind(True, False, True, True, True)


def plan_of(num_tokens: int, num_drafts: int = 0, window: WindowPlan | None = None, **params: Any) -> RequestPlan:
    """A decode after tokens 1000, 1001, ...; pending drafts go on so. The prompt is the first of them."""
    made = SamplingParams(max_tokens=500, seed=5, **params)
    terms = RequestTerms("r", (1000,), made, params.get("seed", 5), 501, frozenset(), 0)
    newest = 1000 + num_tokens - 1
    pending = tuple(range(newest, newest + num_drafts + 1))
    return RequestPlan(terms, pending, num_tokens - 1, num_drafts, num_tokens, True, ((),), window)


def window_plan(exact: ExactRows, num_tokens: int, depth: int) -> WindowPlan:
    start = exact.window_start(min(depth, len(exact.num_exact_rows)))
    return WindowPlan(start, num_tokens - 1, tuple(range(1000 + start + 1, 1000 + num_tokens)), exact, depth)


@st.composite
def decodes(draw: st.DrawFn) -> tuple[ExactRows, int, int, int]:
    """What is exact, n, pending drafts and the depth of the next ones, of any history that a scheduler may leave."""
    num_modules, num_tokens = draw(st.integers(1, 5)), draw(st.integers(8, 60))
    counts: list[int] = []
    for depth in range(1, num_modules + 1):
        counts.append(draw(st.integers(0, min([*counts, num_tokens - depth]))))
    exact = ExactRows(tuple(counts))
    num_drafts = draw(st.integers(0, num_modules))
    if num_drafts:
        exact = exact.after_draft(num_tokens, num_tokens - 1, draw(st.integers(num_drafts, num_modules)))
    return exact, num_tokens, num_drafts, draw(st.integers(1, num_modules))


@given(decodes())
def test_a_window_has_room_for_its_rows_whatever_is_accepted(case: tuple[ExactRows, int, int, int]) -> None:
    exact, num_tokens, num_drafts, depth = case
    need = window_need(plan_of(num_tokens, num_drafts, window_plan(exact, num_tokens, depth)))
    for num_accepted in range(num_drafts + 1):
        end = num_tokens + num_accepted
        assert end - exact.after_verify(num_accepted).window_start(depth) <= need


def test_a_request_that_does_not_draft_needs_no_window() -> None:
    assert window_need(plan_of(9)) == 0


# -- what is uploaded ------------------------------------------------------------------------------------------------

STEADY = ExactRows((0, 0, 0)).after_draft(50, 49, 3)
WINDOWS = {
    "none": (None, 50, 0),
    "none, with drafts of before": (None, 50, 3),
    "steady": (window_plan(STEADY, 50, 3), 50, 3),
    "first drafts": (window_plan(ExactRows((49, 48, 47)), 50, 3), 50, 0),
    "nothing known": (window_plan(ExactRows((49, 0, 0)), 50, 1), 50, 0),
    "a rise in depth": (window_plan(ExactRows((49, 48, 10)), 50, 3), 50, 0),
    "longer than the ring": (window_plan(ExactRows((299, 298, 20)), 300, 3), 300, 2),
    "around the ring": (window_plan(ExactRows((0, 0, 0)).after_draft(128, 127, 3), 128, 3), 128, 3),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_the_ring_holds_the_tokens_that_passes_read(name: str) -> None:
    window, num_tokens, num_drafts = WINDOWS[name]
    state = SlotState(SlotLayout(4, 3, 3, 1, 8, 16), CPU)
    state.ints.fill_(-7)
    state.upload([2], [plan_of(num_tokens, num_drafts, window)])
    ring = state.ints[2, state.layout.ring :].tolist()
    end = num_tokens + num_drafts
    first = num_tokens - 1 if window is None else window.start + 1
    for position in range(max(first, end - RING_SIZE), end):
        assert ring[position % RING_SIZE] == 1000 + position
    assert bool((state.ints[[0, 1, 3]] == -7).all()), "other slots are not touched"


def test_the_numbers_of_a_request() -> None:
    state = SlotState(SlotLayout(3, 3, 3, 1, 8, 16), CPU)
    exact = STEADY._replace(origin=6)
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.25, "typical_p": 0.75}
    sampled = plan_of(50, 3, window_plan(exact, 50, 3), **params)
    sampled = sampled._replace(terms=RequestTerms("s", (1000,), sampled.params, 2**63 + 9, 90, frozenset(), 0))
    greedy = plan_of(50, 0, None, top_k=7, top_p=0.5)
    state.upload([2, 1], [sampled, greedy])
    numbers = state.ints[2].tolist()
    assert [numbers[column] for column in (NUM_TOKENS, NUM_DRAFTS, CYCLE_DEPTH, MAX_TOTAL, ORIGIN)] == [50, 3, 3, 90, 6]
    assert numbers[SEED] % 2**64 == 2**63 + 9, "a seed of 64 bits goes through an int64"
    assert numbers[TOP_K] == 7
    assert numbers[EXACT : EXACT + 3] == list(exact.num_exact_rows)
    assert state.floats[2].tolist() == [0.5, pytest.approx(0.9), 0.25, 0.75]
    assert state.ints[1, TOP_K] == 0
    assert state.floats[1].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert not state.ints[NOBODY].any()


def test_orders_reach_the_mailbox() -> None:
    mailbox, tables = Mailbox(MailboxSize(4, 2, 3), CPU), torch.zeros(2, 3, 5, dtype=torch.int32)
    mailbox.send([3, 1], [2, 0], [(7, 70), (29, 290)])
    assert mailbox.slots(4).tolist() == [3, 1, NOBODY, NOBODY]
    assert mailbox.depths(4).tolist() == [2, 0, 0, 0]
    mailbox.apply_table_updates(tables)
    assert {index: int(tables.view(-1)[index]) for index in tables.view(-1).nonzero().flatten().tolist()} == {
        7: 70,
        29: 290,
    }
    mailbox.send([2], [1], [])
    assert mailbox.slots(2).tolist() == [2, NOBODY]
    mailbox.apply_table_updates(tables)
    assert int(tables.sum()) == 360, "no entry of the step before is put anywhere"


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_more_table_entries_than_the_mailbox_holds(load: Callable[[str], LoadedModel], max_num_seqs: int) -> None:
    """Requests that come with all their blocks at once."""
    settings = SYNTHETIC | {"block_size": 1, "num_blocks": 512, "max_num_batched_tokens": 256}
    prompts = [torch.arange(length).remainder(8).tolist() for length in (70, 40, 61)]
    found = {}
    for execution in ("reference", "overlapped"):
        bench = Bench(load("llama"), execution, **settings, max_num_seqs=max_num_seqs)
        for number, prompt in enumerate(prompts):
            bench.add(f"r{number}", prompt, temperature=number % 2)
        while bench.engine.has_unfinished:
            bench.step()
            if execution == "overlapped":
                check_tables(bench)
        found[execution] = bench.outcomes()
    assert found["overlapped"] == found["reference"]


def check_tables(bench: Bench) -> None:
    """The device has the blocks of each request that it decodes, in the order of the host."""
    resident = bench.engine.runner.resident
    assert resident is not None
    for name, slot in resident._slots.items():
        for group, blocks in enumerate(slot.tables):
            on_device = resident._state.tables[group, slot.index, : len(blocks)].tolist()
            assert on_device == list(blocks), name
        held = bench.engine.cache.block_tables(name) if name in bench.engine.scheduler else slot.tables
        assert [len(blocks) for blocks in held] >= [len(blocks) for blocks in slot.tables]


@given(decodes(), st.integers(0, 5))
def test_the_device_counts_exact_rows_as_the_host_does(
    case: tuple[ExactRows, int, int, int], num_accepted: int
) -> None:
    """After a verification, in the passes over the window that follows, and after the drafts."""
    exact, num_tokens, num_drafts, depth = case
    num_accepted = min(num_accepted, num_drafts)
    num_modules = len(exact.num_exact_rows)
    exact = exact._replace(origin=min(exact.num_exact_rows))
    slots = SlotState(SlotLayout(2, num_modules, num_modules, 1, 80, 16), CPU)
    slots.upload([1], [plan_of(num_tokens, num_drafts, window_plan(exact, num_tokens, depth))])
    slots.tables[0, 1] = torch.arange(1, 81)  # blocks of one row: row r is slot r + 1
    state = DecodeState(slots.ints, slots.tables, num_modules, 1, 4096)
    lanes, emitted = torch.tensor([NOBODY, 1]), torch.full((2, num_modules + 1), -1)
    emitted[1, : num_accepted + 1] = 9
    decode.commit_tokens(state, lanes, emitted, torch.zeros(emitted.shape))
    verified, committed = exact.after_verify(num_accepted), num_tokens + num_accepted + 1
    assert slots.ints[1, EXACT : state.ring].tolist() == list(verified.num_exact_rows)
    assert slots.ints[1, [NUM_TOKENS, NUM_DRAFTS, CYCLE_DEPTH]].tolist() == [committed, 0, 0]
    window = decode.draft_window(state, lanes, torch.tensor([0, depth]), 80, num_modules, 0)
    assert window.num_drafts.tolist() == [0, depth]
    assert int(window.starts[1]) == verified.window_start(depth)
    for index in range(depth):
        rows = decode.pass_rows(state, lanes, window, index, 0)
        stored = [slot - 1 for slot in rows.slots.tolist() if slot != RESERVED_SLOT]
        assert stored == list(range(verified.num_exact_rows[index], committed - 1)), "exact rows stay as they are"
        assert rows.num_rows.tolist() == [0, committed - 1 - verified.window_start(depth)]
        assert rows.origins.tolist() == [0, exact.origin]
    decode.finish_window(state, lanes, window)
    drafted = verified.after_draft(committed, committed - 1, depth)
    assert slots.ints[1, EXACT : state.ring].tolist() == list(drafted.num_exact_rows)
    assert slots.ints[1, [NUM_DRAFTS, CYCLE_DEPTH]].tolist() == [depth, depth]
    assert not slots.ints[NOBODY].any()


# -- padding ---------------------------------------------------------------------------------------------------------


def requests(bench: Bench) -> None:
    """Decodes of different lengths, depths and kinds; some end early, so that their blocks are free."""
    for number in range(7):
        bench.add(
            f"r{number}",
            [(3 * number + row) % 8 for row in range(2 + 3 * number)],
            max_tokens=4 + 4 * number,
            temperature=(0.0, 1.0, 0.7)[number % 3],
            top_k=(0, 5)[number % 2],
            num_speculative_tokens=(3, 1, 3, 0, 2)[number % 5],
            seed=number,
        )


Prepare = Callable[[Bench], Callable[[], None]]


def outcomes(loaded: LoadedModel, prepare: Prepare, **settings: Any) -> dict[str, Outcome]:
    """Run `requests` on the device; what `prepare` returns is called before every step."""
    bench = Bench(loaded, "overlapped", num_speculative_tokens=3, max_num_seqs=8, **settings)
    before_step = prepare(bench)
    requests(bench)
    while bench.engine.has_unfinished:
        before_step()
        bench.step()
    bench.assert_empty()
    assert bench.num_ahead > 0
    return bench.outcomes()


def poison(bench: Bench) -> Callable[[], None]:
    """NaN in all of the cache at first, and before every step in the reserved block and in all that are free and not
    cached."""
    storage, pools = bench.engine.runner.storage, bench.engine.cache.pools
    for group, pool in enumerate(pools):
        for block in range(pool.num_usable_blocks + 1):
            for rows in storage.block(group, block):
                rows.fill_(math.nan)

    def again() -> None:
        for group, pool in enumerate(pools):
            for block in range(pool.num_usable_blocks + 1):
                if block == 0 or (pool.is_free(block) and pool.contents[block] is None):
                    for rows in storage.block(group, block):
                        rows.fill_(math.nan)

    return again


def pad_lanes(bench: Bench) -> Callable[[], None]:
    """Every step has as many lanes as on a GPU that captured one size only."""
    resident = bench.engine.runner.resident
    assert resident is not None
    resident._lane_sizes = (8,)
    return lambda: None


def pad_and_poison(bench: Bench) -> Callable[[], None]:
    pad_lanes(bench)
    return poison(bench)


@pytest.mark.parametrize("settings", [SYNTHETIC, {}, {"verification": "block"}], ids=["synthetic", "real", "block"])
@pytest.mark.parametrize("prepare", [poison, pad_lanes, pad_and_poison])
@pytest.mark.parametrize("kind", BUILDERS)
def test_padding_changes_nothing_whatever_it_holds(
    load: Callable[[str], LoadedModel],
    kind: str,
    prepare: Prepare,
    settings: dict[str, Any],
) -> None:
    expected = Bench(load(kind), "reference", num_speculative_tokens=3, max_num_seqs=8, **settings)
    requests(expected)
    expected.finish()
    assert outcomes(load(kind), prepare, **settings) == expected.outcomes()


def test_a_row_that_is_not_its_own_is_noticed(load: Callable[[str], LoadedModel]) -> None:
    """NaN where a request does read changes its tokens: the tests above can fail."""

    def spoil(bench: Bench) -> Callable[[], None]:
        def again() -> None:
            for request in bench.engine.scheduler.requests():
                if request.output_token_ids:
                    block = bench.engine.cache.block_tables(request.request_id)[0][0]
                    bench.engine.runner.storage.block(0, block)[0].fill_(math.nan)

        return again

    expected = outcomes(load("llama"), lambda bench: lambda: None, enable_prefix_caching=False)
    assert outcomes(load("llama"), spoil, enable_prefix_caching=False) != expected


def test_nobody_stays_nobody(load: Callable[[str], LoadedModel]) -> None:
    bench = Bench(load("llama"), "overlapped", max_num_seqs=8, **SYNTHETIC)
    pad_lanes(bench)
    resident = bench.engine.runner.resident
    assert resident is not None
    for number in range(3):
        bench.add(f"r{number}", [number + 1], temperature=1.0)
    while bench.engine.has_unfinished:
        bench.step()
        ints = resident._state.ints[NOBODY]
        assert not ints[: EXACT + 4].any(), "the slot of padding has got tokens"
        assert not resident._state.tables[:, NOBODY].any()


# -- windows after a rise in depth, slots, graphs ---------------------------------------------------------------------


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[DraftShape]:
    """The shapes of all drafting that was launched."""
    seen: list[DraftShape] = []

    def watched(model: Any, slots: Any, mailbox: Any, shape: DraftShape) -> None:
        seen.append(shape)
        run_drafts(model, slots, mailbox, shape)

    monkeypatch.setattr(resident_decoder, "run_drafts", watched)
    return seen


@pytest.mark.parametrize("num_shallow", [10, 26, 45, 90])
def test_a_rise_in_depth(load: Callable[[str], LoadedModel], shapes: list[DraftShape], num_shallow: int) -> None:
    """Rows of deeper modules are made up for in one wide window; beyond the widest one the host does it."""
    found = {}
    for execution in ("reference", "synchronous", "overlapped"):
        shapes.clear()
        bench = Bench(load("llama"), execution, max_num_seqs=2, max_num_batched_tokens=256)
        request = bench.add("r", [1, 2, 3], max_tokens=130, num_speculative_tokens=1)
        while len(request.output_token_ids) < num_shallow:
            bench.step()
        bench.engine.set_num_speculative_tokens("r", 4)
        bench.finish()
        found[execution] = request.output_token_ids
        if execution != "reference":
            wide = [shape.num_rows for shape in shapes if shape.num_rows > 5]
            assert wide == ([padded(num_shallow, WINDOW_SIZES)] if num_shallow < MAX_WINDOW else [])
            assert {shape.depth for shape in shapes} == {1, 2, 3, 4}
    assert found["synchronous"] == found["overlapped"] == found["reference"]


def test_slots_are_given_out_and_taken_back(load: Callable[[str], LoadedModel]) -> None:
    bench = Bench(load("llama"), "synchronous", max_num_seqs=3)
    resident = bench.engine.runner.resident
    assert isinstance(resident, ResidentDecoder)
    for number in range(3):
        bench.add(f"r{number}", [1, 2], max_tokens=4 + 4 * number, temperature=1.0)
    bench.step(2)
    assert all(f"r{number}" in resident for number in range(3))
    assert sorted(slot.index for slot in resident._slots.values()) == [1, 2, 3]
    assert resident.surplus([]) == []
    probs = resident.take_probs("r0")
    assert len(probs) == 4
    assert all(float(one.sum()) == pytest.approx(1.0) for one in probs[: len(bench.requests["r0"].draft_token_ids)])
    resident.forget("r0")
    resident.forget("r0")  # what is not there is fine
    assert "r0" not in resident
    assert len(resident._free_slots()) == 1
    resident.forget_all()
    assert sorted(resident._free_slots()) == [1, 2, 3]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_without_a_gpu_nothing_is_captured(is_enabled: bool) -> None:
    calls: list[int] = []
    graphs = GraphCache(CPU, is_enabled=is_enabled)
    for _ in range(3):
        graphs.run("key", lambda: calls.append(1))
    assert len(calls) == 3
    assert graphs.stats.num_graphs == 0


def test_decodes_with_options_of_the_host_do_not_run_on_the_device(load: Callable[[str], LoadedModel]) -> None:
    for params in ({"repetition_penalty": 1.2}, {"logprobs": 0}, {"bad_words": [[1, 2]]}, {"min_tokens": 40}):
        bench = Bench(load("llama"), "overlapped")
        bench.add("r", [1, 2, 3], **({"max_tokens": 41} | params))
        bench.finish()
        assert bench.num_resident <= 1, params
    bench = Bench(load("llama"), "overlapped")
    bench.add("r", [1, 2, 3], prompt_logprobs=1)
    bench.finish()
    assert bench.num_ahead > 0, "once the prompt is scored"
