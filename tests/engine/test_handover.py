"""Requests that are handed over: nothing that comes after it differs from what would have come without."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from byte_models import byte_llama
from handing import from_bytes, move, soil, to_bytes
from reference import Checkpoint, RecordingDrafter, recording_engine
from scripted import finish
from tiny_models import tiny_llama
from torch import Tensor

from foredraft import LLM
from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.errors import EngineBusyError, HandoverError, RequestError
from foredraft.exactness import ExactRows
from foredraft.logits_processor import TokenHistory
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.request import Request, RequestStatus
from foredraft.sampling_params import SamplingParams
from foredraft.scheduler.queue import MAX_OVERTAKEN
from foredraft.structured_output import StructuredOutput

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.2, seed=5)


class After(NamedTuple):
    """A request after a step."""

    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    num_computed_tokens: int
    exact: ExactRows


def after(request: Request) -> After:
    return After(tuple(request.token_ids), request.draft_token_ids, request.num_computed_tokens, request.exact)


def steps(engine: Engine, request: Request, count: int = 1000) -> list[After]:
    """Make steps, until the request ends at the latest."""
    seen: list[After] = []
    while request.finish_reason is None and len(seen) < count:
        engine.step()
        engine.cache.check_integrity()
        seen.append(after(request))
    return seen


def loaded(path: Path, **options: Any) -> LoadedModel:
    return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"), **options)


def engine_of(model: LoadedModel, **settings: Any) -> Engine:
    room: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 3, "max_model_len": 80}
    engine = build_engine(model, EngineConfig(**(room | settings)))
    soil(engine)
    return engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tokens only, so that modules which know nothing find the right one now and then."""
    return tiny_llama(tmp_path_factory.mktemp("few") / "model", vocab_size=8, num_modules=3, seed=2)


@pytest.fixture(scope="module")
def few(path: Path) -> LoadedModel:
    return loaded(path)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Every byte is a token."""
    return loaded(byte_llama(tmp_path_factory.mktemp("bytes") / "model"))


PROMPT_OF_FEW = [token % 8 for token in PROMPT]

# -- drafts, whatever was accepted before ----------------------------------------------------------------------------

KINDS = [
    ("llama", 0),
    ("llama", 1),
    ("llama", 3),
    ("eight modules", 8),
    ("glm4_moe", 3),
    ("qwen3", 2),
    ("qwen2 sliding", 2),
    ("mistral sliding", 2),
]


class Told:
    """An engine whose drafts are right as far as the number of tokens says, from none to all; each is recorded."""

    def __init__(self, checkpoint: Checkpoint, depth: int, budget: int, **settings: Any) -> None:
        self.reference = checkpoint.reference
        self.engine: Engine
        self.drafter: RecordingDrafter
        self.engine, self.drafter = recording_engine(checkpoint.loaded, depth, 2, budget, **settings)
        soil(self.engine)

    def tell(self, length: int) -> list[int]:
        """A prompt of so many tokens, with the drafts for it."""
        self.drafter.continuations["one"] = self.reference.sequence(PROMPT[:length], 40)
        return PROMPT[:length]

    def begin(self, count: int, length: int = len(PROMPT)) -> tuple[Request, list[After]]:
        request = self.engine.add_request("one", self.tell(length), GREEDY)
        return request, steps(self.engine, request, count)

    def check(self, request: Request) -> None:
        """Tokens are the target's own, every draft what the modules make of the whole history."""
        assert request.token_ids == self.drafter.continuations["one"][: request.num_tokens]
        self.drafter.assert_equals(self.reference, {"one": request.token_ids})


LENGTHS = {0: (23, 22), 1: (23, 22), 2: (22, 23), 3: (17, 23), 8: (16, 19, 20, 21)}
"""Prompts after which, with so many drafts a step, any number of them is accepted in one or another."""


@pytest.mark.parametrize(("kind", "depth"), KINDS)
def test_nothing_differs_after_a_move(checkpoints: Callable[[str], Checkpoint], kind: str, depth: int) -> None:
    """At any step: in the middle of a prompt, and with any number of drafts accepted before and after."""
    checkpoint = checkpoints(kind)
    accepted = set()
    for length, budget in zip(LENGTHS[depth], (12, 64, 64, 64)):
        budget = max(budget, 2 * depth + 2)
        request, unmoved = Told(checkpoint, depth, budget).begin(1000, length)
        for count in range(1, len(unmoved)):
            old, new = Told(checkpoint, depth, budget), Told(checkpoint, depth, budget)
            new.tell(length)
            _, before = old.begin(count, length)
            moved = move(old.engine, new.engine, "one")
            assert after(moved) == before[-1]
            assert [*before, *steps(new.engine, moved)] == unmoved
            assert moved.stats == request.stats
            assert moved.token_depths == request.token_depths
            new.check(moved)
            accepted.update(moved.token_depths)
    assert accepted == set(range(depth + 1))


@pytest.mark.parametrize("kind", ["llama", "qwen2 sliding", "mistral sliding"])
@pytest.mark.parametrize(("old_size", "new_size"), [(4, 16), (4, 3), (5, 4), (16, 4)])
def test_blocks_may_be_of_another_size(
    checkpoints: Callable[[str], Checkpoint], kind: str, old_size: int, new_size: int
) -> None:
    checkpoint, depth = checkpoints(kind), 2
    for count in (1, 2, 5):
        old, new = (
            build_engine(
                checkpoint.loaded,
                EngineConfig(num_speculative_tokens=depth, block_size=size, num_blocks=60, max_model_len=60),
                RecordingDrafter,
            )
            for size in (old_size, new_size)
        )
        soil(new)
        for engine in (old, new):
            told(engine).continuations["one"] = checkpoint.reference.sequence(PROMPT, 40)
        steps(old, old.add_request("one", PROMPT, GREEDY), count)
        moved = move(old, new, "one")
        steps(new, moved)
        assert moved.token_ids == checkpoint.reference.sequence(PROMPT, 40)[: moved.num_tokens]
        told(new).assert_equals(checkpoint.reference, {"one": moved.token_ids})
        # What others find of it is right as well: the whole of it again, with drafts.
        told(new).continuations["two"] = told(new).continuations["one"]
        again = new.add_request("two", moved.token_ids[:-8], SamplingParams(max_tokens=8, ignore_eos=True))
        finish(new)
        assert again.token_ids == moved.token_ids
        told(new).assert_equals(checkpoint.reference, {"one": moved.token_ids, "two": again.token_ids})


@pytest.mark.parametrize("kind", ["mistral sliding", "qwen2 sliding"])
def test_a_block_that_came_in_part_is_not_sent_on_as_whole(checkpoints: Callable[[str], Checkpoint], kind: str) -> None:
    """What the third engine shares with others are rows of the first one, not what lay before them in the second."""
    first, second, third, fresh = (
        build_engine(
            checkpoints(kind).loaded,
            EngineConfig(num_speculative_tokens=2, block_size=size, num_blocks=60, max_model_len=60),
        )
        for size in (4, 16, 4, 4)
    )
    for engine in (first, second, third):
        soil(engine)
    request = first.add_request("one", PROMPT[:7], SamplingParams(max_tokens=20, ignore_eos=True))
    while len(request.output_token_ids) < 9:  # the windows have left the first block behind
        first.step(ahead=False)
    moved = move(second, third, move(first, second, "one").request_id)
    finish(third)
    assert moved.error is None
    outputs = []
    for engine in (third, fresh):
        other = engine.add_request("two", [*PROMPT[:4], 7, 8], SamplingParams(max_tokens=8, ignore_eos=True))
        finish(engine)
        outputs.append(other.token_ids)
    assert outputs[0] == outputs[1]


def test_a_request_that_was_preempted_elsewhere_moves_on(checkpoints: Callable[[str], Checkpoint]) -> None:
    """Its rows are computed anew there, those too that had been left behind when it came."""
    first, second, third = (
        build_engine(
            checkpoints("mistral sliding").loaded,
            EngineConfig(
                num_speculative_tokens=2,
                block_size=4,
                num_blocks=60,
                max_model_len=60,
                max_num_seqs=2,
                max_num_batched_tokens=6,
                enable_prefix_caching=False,
            ),
        )
        for _ in range(3)
    )
    request = first.add_request("one", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    while len(request.output_token_ids) < 9:
        first.step(ahead=False)
    moved = move(first, second, "one")
    second.scheduler.preempt(moved)
    second.step(ahead=False)
    assert 0 < moved.num_computed_tokens <= 6
    again = move(second, third, "one")
    finish(third)
    expected = checkpoints("mistral sliding").reference.sequence(PROMPT, 30)
    assert again.token_ids == expected[: len(PROMPT) + 30]


def told(engine: Engine) -> RecordingDrafter:
    drafter = engine.runner._drafter
    assert isinstance(drafter, RecordingDrafter)
    return drafter


@pytest.mark.parametrize("kind", ["eight modules", "mistral sliding"])
@pytest.mark.parametrize(("old_depth", "new_depth"), [(0, 2), (1, 2), (2, 1), (2, 0), (8, 3), (3, 8)])
def test_engines_may_have_more_modules_or_fewer(
    checkpoints: Callable[[str], Checkpoint], kind: str, old_depth: int, new_depth: int
) -> None:
    """Whoever has more rebuilds them, where it can, and drafts with all of them."""
    checkpoint = checkpoints(kind)
    most = 8 if kind == "eight modules" else 2
    old_depth, new_depth = min(old_depth, most), min(new_depth, most)
    drafted = {0}
    for count in (1, 2, 3):
        old, new = Told(checkpoint, old_depth, 64), Told(checkpoint, new_depth, 64)
        new.tell(len(PROMPT))
        old.begin(count)
        moved = move(old.engine, new.engine, "one")
        assert moved.status is RequestStatus.RUNNING
        steps(new.engine, moved)
        new.check(moved)
        drafted.update(len(drafts) for _, drafts in new.drafter.seen)
    assert max(drafted) == new_depth


@pytest.mark.parametrize("kind", ["llama", "mistral sliding"])
def test_an_engine_without_modules_hands_over_to_one_with(
    checkpoints: Callable[[str], Checkpoint], path_of: Callable[[str], Path], kind: str
) -> None:
    """Of a target with windows only it keeps h0 of its last row, from which no module can be rebuilt."""
    checkpoint = checkpoints(kind)
    old, new = engine_of(loaded(path_of(kind), num_modules=0)), Told(checkpoint, 2, 64)
    new.tell(len(PROMPT))
    steps(old, old.add_request("one", PROMPT, GREEDY), 1)
    handover = from_bytes(to_bytes(old.export_request("one")))
    if kind == "llama":
        moved = new.engine.import_request(handover)
        assert moved.status is RequestStatus.RUNNING
    else:
        with pytest.raises(EngineBusyError, match="begun with fewer modules"):
            new.engine.import_request(handover)
        moved = new.engine.import_request(handover, recompute=True)
        assert moved.status is RequestStatus.WAITING
    steps(new.engine, moved)
    new.check(moved)
    assert moved.stats.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoints of the conftest, by kind, as files."""
    from engine.conftest import BUILDERS

    return lambda kind: BUILDERS[kind][0](tmp_path_factory.mktemp("files") / "model")


# -- tokens that are drawn, and options ------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "seed": 5},
    "filtered": {"temperature": 1.2, "seed": 6, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 1.2, "seed": 7, "presence_penalty": 0.7, "repetition_penalty": 1.3},
    "greedy penalties": {"frequency_penalty": 0.9},
    "bad words": {"temperature": 1.0, "seed": 8, "bad_words": [[1, 2], [5]], "min_tokens": 9, "stop_token_ids": [3]},
    "scores": {"temperature": 1.0, "seed": 9, "logprobs": 2, "prompt_logprobs": 1},
    "fewer drafts": {"temperature": 1.0, "seed": 10, "num_speculative_tokens": 1},
}


def continued(
    engines: Sequence[Engine], prompt: Sequence[int], params: SamplingParams, counts: Sequence[int]
) -> dict[str, Any]:
    """All that comes of a request which moves along `engines`, after so many steps in each but the last."""
    request = engines[0].add_request("one", prompt, params)
    text = engines[0].text_of("one")
    for old, new, count in zip(engines, engines[1:], counts):
        for number in range(count):
            old.step(ahead=number + 1 < count)
            assert request.finish_reason is None
        old.settle()
        request = move(old, new, "one")
        text = new.text_of("one")
    finish(engines[-1])
    return {
        "tokens": request.token_ids,
        "depths": request.token_depths,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "stats": request.stats,
        "text": text.take_pieces(),
        "reason": request.finish_reason,
    }


@pytest.mark.parametrize("execution", ["host", "overlapped"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_the_same(few: LoadedModel, name: str, execution: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **OPTIONS[name])
    settings = {"execution": execution, "max_num_batched_tokens": 16}
    unmoved = continued([engine_of(few, **settings)], PROMPT_OF_FEW, params, ())
    for count in (1, 2, 3, 5):
        engines = [engine_of(few, **settings) for _ in range(3)]
        assert continued(engines, PROMPT_OF_FEW, params, (count, 2)) == unmoved
    assert unmoved["stats"].num_accepted_tokens > 0 or name == "greedy"


@pytest.mark.parametrize(
    "options", [{}, {"verification": "block"}, {"draft_sampling": "greedy"}, {"draft_vocab_size": 5}]
)
def test_tokens_are_the_same_however_drafts_are_made(few: LoadedModel, options: dict[str, Any]) -> None:
    for execution in ("host", "overlapped"):
        settings = {"execution": execution, **options}
        unmoved = continued([engine_of(few, **settings)], PROMPT_OF_FEW, SAMPLED, ())
        engines = [engine_of(few, **settings) for _ in range(2)]
        assert continued(engines, PROMPT_OF_FEW, SAMPLED, (3,)) == unmoved


@pytest.mark.parametrize("new", [{"draft_sampling": "greedy"}, {"draft_vocab_size": 5}])
def test_drafts_that_were_drawn_in_another_way_are_dropped(few: LoadedModel, new: dict[str, Any]) -> None:
    for execution in ("host", "overlapped"):
        for first, second in (({}, new), (new, {})):
            old, new_one = (engine_of(few, execution=execution, **options) for options in (first, second))
            steps(old, old.add_request("one", PROMPT_OF_FEW, SAMPLED), 3)
            old.settle()
            moved = move(old, new_one, "one")
            assert moved.draft_token_ids == ()
            assert moved.exact.cycle is None
            finish(new_one)
            assert moved.num_tokens == moved.max_total_tokens


def test_a_grammar_goes_on_where_it_was(writer: LoadedModel) -> None:
    for wanted in (
        StructuredOutput(regex="[a-f]{9}-[0-9]{9}"),
        StructuredOutput(json_schema={"enum": ["north", "northern", "nothing"]}),
        StructuredOutput(choice=["eleven elephants", "eleven elegant eels"]),
    ):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=60, structured_output=wanted, temperature=temperature, seed=3)
            unmoved = continued([engine_of(writer)], b"say: ", params, ())
            for count in (1, 2, 3):
                engines = [engine_of(writer) for _ in range(2)]
                assert continued(engines, b"say: ", params, (count,)) == unmoved
            assert unmoved["reason"] == "stop"


def test_a_stop_string_that_was_begun_is_completed(writer: LoadedModel) -> None:
    plain = continued([engine_of(writer)], b"abc", SamplingParams(max_tokens=30, ignore_eos=True), ())
    text = bytes(plain["tokens"][3:]).decode(errors="replace")
    stop = next(text[i : i + 3] for i in range(6, 20) if "�" not in text[i : i + 3])
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=stop, num_speculative_tokens=0)
    unmoved = continued([engine_of(writer)], b"abc", params, ())
    assert unmoved["reason"] == "stop"
    for count in range(1, len(unmoved["tokens"]) - 3):
        assert continued([engine_of(writer), engine_of(writer)], b"abc", params, (count,)) == unmoved


# -- requests that hold no rows, choices -----------------------------------------------------------------------------


def test_a_request_that_waits_begins_elsewhere(few: LoadedModel) -> None:
    unmoved = continued([engine_of(few)], PROMPT_OF_FEW, SAMPLED, ())
    assert continued([engine_of(few), engine_of(few)], PROMPT_OF_FEW, SAMPLED, (0,)) == unmoved


@pytest.mark.parametrize("execution", ["host", "overlapped"])
def test_a_preempted_request_keeps_its_drafts(few: LoadedModel, execution: str) -> None:
    unmoved = continued([engine_of(few, execution=execution)], PROMPT_OF_FEW, SAMPLED, ())
    old, new = (engine_of(few, execution=execution) for _ in range(2))
    request = old.add_request("one", PROMPT_OF_FEW, SAMPLED)
    steps(old, request, 4)
    old.settle()
    old.scheduler.preempt(request)
    moved = move(old, new, "one")
    assert moved.status is RequestStatus.WAITING
    assert moved.draft_token_ids
    finish(new)
    assert moved.token_ids == unmoved["tokens"]


def test_choices_part_company(few: LoadedModel) -> None:
    """Each is handed over by itself, also while the others wait for the first one's rows."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, n=3, prompt_logprobs=1)

    def begin(engine: Engine) -> list[Request]:
        first = engine.add_request("0", PROMPT_OF_FEW, params)
        others = [engine.add_request(f"{k}", PROMPT_OF_FEW, params, choice=k, leader=first) for k in (1, 2)]
        return [first, *others]

    unmoved = engine_of(few)
    expected = begin(unmoved)
    finish(unmoved)
    for count in (0, 1, 3):
        old, new = engine_of(few), engine_of(few)
        requests = begin(old)
        for _ in range(count):
            old.step()
        requests[0] = move(old, new, "0")
        requests[2] = move(old, new, "2")
        finish(old)
        finish(new)
        assert [r.token_ids for r in requests] == [r.token_ids for r in expected]
        assert requests[0].prompt_logprobs == expected[0].prompt_logprobs
        assert len({tuple(r.token_ids) for r in requests}) > 1


# -- room, limits, the cache -----------------------------------------------------------------------------------------


def test_without_room_nothing_changes(few: LoadedModel) -> None:
    unmoved = continued([engine_of(few)], PROMPT_OF_FEW, SAMPLED, ())
    for settings in ({"max_num_seqs": 1}, {"num_blocks": 13, "max_model_len": 48}):
        old, new = engine_of(few), engine_of(few, enable_prefix_caching=False, **settings)
        other = new.add_request("other", PROMPT_OF_FEW[::-1], SamplingParams(max_tokens=16, ignore_eos=True))
        steps(new, other, 2)
        steps(old, old.add_request("one", PROMPT_OF_FEW, SAMPLED), 4)
        handover = old.export_request("one")
        before = after(other), new.scheduler.unfinished_ids, new.stats.num_requests
        with pytest.raises(EngineBusyError, match="no room"):
            new.import_request(handover)
        assert (after(other), new.scheduler.unfinished_ids, new.stats.num_requests) == before
        new.cache.check_integrity()
        moved = new.import_request(handover, recompute=True)
        assert moved.status is RequestStatus.WAITING
        finish(new)
        assert moved.token_ids == unmoved["tokens"]
        assert other.num_tokens == other.max_total_tokens


def test_those_who_wait_are_not_overtaken_for_ever(few: LoadedModel) -> None:
    new = engine_of(few, max_num_seqs=1)
    waiting = new.add_request("waiting", PROMPT_OF_FEW, GREEDY)
    for number in range(MAX_OVERTAKEN + 1):
        old = engine_of(few)
        steps(old, old.add_request(f"{number}", PROMPT_OF_FEW, GREEDY), 1)
        handover = old.export_request(f"{number}")
        if number == MAX_OVERTAKEN:
            with pytest.raises(EngineBusyError):
                new.import_request(handover)
        else:
            new.abort(new.import_request(handover).request_id)
        assert waiting.num_overtaken == min(number + 1, MAX_OVERTAKEN)


def test_rows_that_were_handed_over_are_found_by_others(few: LoadedModel) -> None:
    """On either side; and what the new engine has already is not kept twice."""
    old, new = engine_of(few), engine_of(few)
    steps(new, new.add_request("before", PROMPT_OF_FEW, GREEDY))
    steps(old, old.add_request("one", PROMPT_OF_FEW, GREEDY), 4)
    used = sum(pool.num_free_blocks for pool in new.cache.pools)
    moved = move(old, new, "one")
    held = sum(new.cache.num_held_blocks("one"))
    assert sum(pool.num_free_blocks for pool in new.cache.pools) == used - held
    finish(new)
    for engine in (old, new):
        request = engine.add_request("next", [*moved.token_ids[:28], 1], GREEDY)
        finish(engine)
        assert request.num_cached_tokens == (28 if engine is new else 24)
        alone = engine_of(few)
        expected = alone.add_request("next", request.prompt_token_ids, GREEDY)
        finish(alone)
        assert request.token_ids == expected.token_ids
        assert request.stats.accepted_by_depth == expected.stats.accepted_by_depth


def test_blocks_that_move_to_the_host_do_so_before_their_place_is_taken(few: LoadedModel) -> None:
    """The blocks that a request gets may hold what is only now to be copied to the host."""
    settings = {"num_blocks": 14, "max_model_len": 48, "cpu_cache_gib": 0.01, "max_num_seqs": 1}
    new = engine_of(few, **settings)
    first = new.add_request("first", PROMPT_OF_FEW[::-1], GREEDY)
    finish(new)
    old = engine_of(few)
    steps(old, old.add_request("one", PROMPT_OF_FEW, GREEDY), 5)
    moved = move(old, new, "one")
    finish(new)
    unmoved = continued([engine_of(few)], PROMPT_OF_FEW, GREEDY, ())
    assert moved.token_ids == unmoved["tokens"]
    again = new.add_request("again", first.token_ids[:-4], SamplingParams(max_tokens=4, ignore_eos=True))
    finish(new)
    assert again.num_cached_tokens == 36
    assert again.token_ids == first.token_ids


def test_limits_are_those_of_the_new_engine(few: LoadedModel) -> None:
    params = SamplingParams(ignore_eos=True)
    old, larger, smaller = (engine_of(few, max_model_len=length) for length in (40, 60, 26))
    steps(old, old.add_request("one", PROMPT_OF_FEW, params), 4)
    handover = old.export_request("one")
    with pytest.raises(RequestError, match="max_model_len=26"):
        smaller.import_request(handover)
    moved = larger.import_request(handover)
    finish(larger)
    assert moved.num_tokens == 60


def test_a_handover_may_be_taken_twice_under_other_ids(few: LoadedModel) -> None:
    old, new = engine_of(few), engine_of(few)
    steps(old, old.add_request("one", PROMPT_OF_FEW, SAMPLED), 4)
    handover = old.export_request("one")
    first, second = new.import_request(handover), new.import_request(handover, "two")
    with pytest.raises(RequestError, match="'two' is in use"):
        new.import_request(handover, "two")
    finish(new)
    assert first.token_ids == second.token_ids
    assert new.stats.num_requests == 2


# -- what is refused -------------------------------------------------------------------------------------------------


class Even:
    """A caller's own rule."""

    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        return logits


def test_requests_that_cannot_leave(few: LoadedModel) -> None:
    engine = engine_of(few, execution="overlapped")
    with pytest.raises(RequestError, match="'none' is not that of a request that has not ended"):
        engine.export_request("none")
    own = engine.add_request("own", PROMPT_OF_FEW, SamplingParams(max_tokens=4, logits_processors=[Even()]))
    with pytest.raises(RequestError, match="logits_processors cannot be handed over"):
        engine.export_request("own")
    engine.abort(own.request_id)
    request = engine.add_request("one", PROMPT_OF_FEW, GREEDY)
    steps(engine, request, 3)
    with pytest.raises(RequestError, match="call settle first"):
        engine.export_request("one")
    num_tokens = request.num_tokens
    (update,) = engine.settle()
    assert update.request is request
    assert request.num_tokens > num_tokens
    assert engine.settle() == []
    engine.export_request("one")
    assert request.finish_reason == "abort"
    assert not engine.has_unfinished


def test_settling_when_all_have_gone(few: LoadedModel) -> None:
    engine = engine_of(few, execution="overlapped")
    steps(engine, engine.add_request("one", PROMPT_OF_FEW, GREEDY), 3)
    engine.abort("one")
    assert engine.settle() == []
    engine.cache.check_integrity()


def test_other_models_are_told_apart(few: LoadedModel, path: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", vocab_size=8, num_modules=3, seed=3)
    old = engine_of(few)
    steps(old, old.add_request("one", PROMPT_OF_FEW, GREEDY), 4)
    handover = old.export_request("one")
    half = load_checkpoint(path, dtype=torch.bfloat16, device=torch.device("cpu"))
    for what, model in (
        ("another target model", loaded(other)),
        ("another MTP module 1", loaded(path, mtp=other)),
        ("another dtype: torch.float32, and here it is torch.bfloat16", half),
    ):
        engine = engine_of(model)
        with pytest.raises(HandoverError, match=what):
            engine.import_request(handover)
        assert not engine.has_unfinished
        engine.cache.check_integrity()


def sent(model: LoadedModel) -> bytearray:
    engine = engine_of(model)
    steps(engine, engine.add_request("one", PROMPT_OF_FEW, SAMPLED), 4)
    return to_bytes(engine.export_request("one"))


def test_changed_bytes_are_noticed_wherever_they_are(few: LoadedModel) -> None:
    data = sent(few)
    header_end = 16 + int.from_bytes(data[8:16], "little")
    places = [0, 7, 8, 15, 16, 40, header_end - 1, header_end, header_end + 31, header_end + 32, len(data) - 1]
    for place in (*places, *range(100, len(data), len(data) // 50)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with pytest.raises(HandoverError):
            from_bytes(changed)


def test_missing_bytes_are_noticed(few: LoadedModel) -> None:
    data = sent(few)
    for length in (0, 1, 15, 16, 200, len(data) // 2, len(data) - 1):
        with pytest.raises(HandoverError):
            from_bytes(data[:length])


def test_a_header_that_lies_is_refused(few: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole bytes that say what cannot be."""
    engine = engine_of(few)
    steps(engine, engine.add_request("one", PROMPT_OF_FEW, SAMPLED), 4)
    handover = engine.export_request("one")
    header = handover.header()
    for changes, message in (
        ({"format": 2}, "format 2"),
        ({"seed": -1}, "seed must hold integers"),
        ({"seed": "1"}, "seed must hold integers"),
        ({"num_computed_tokens": 900}, "num_computed_tokens=900"),
        ({"exact": [[24, 25, 23], None, 0, 0]}, "num_exact_rows"),
        ({"token_depths": []}, "differ in number"),
        ({"params": {**header["params"], "temperature": -1}}, "temperature"),
        ({"params": {**header["params"], "unknown": 1}}, "unknown"),
        ({"unknown": 1}, "unknown"),
        ({"scored_prompt": []}, "scored_prompt has 0 of"),
        ({"scored_prompt": [None] * 1000}, "scored_prompt has 1000 of"),
        ({"windows": None}, "windows must be an object"),
        ({"stats": {**header["stats"], "num_cycles": "1"}}, "num_cycles must hold integers"),
        ({"stats": {**header["stats"], "drafted_by_depth": 1}}, "not iterable"),
        ({"stats": {**header["stats"], "drafted_by_depth": [1] * 99}}, "differ in number"),
    ):
        monkeypatch.setattr(type(handover), "header", lambda self, changes=changes: {**header, **changes})
        with pytest.raises(HandoverError, match=message):
            from_bytes(to_bytes(handover))


def test_rows_of_another_layout_are_refused(few: LoadedModel) -> None:
    new = engine_of(few)
    handover = from_bytes(sent(few))
    for one in handover.tensors:
        if one.name in ("target.0.key", "h0", "module.0.value"):
            others = [other for other in handover.tensors if other is not one]
            for tensors in (
                others,
                [*others, type(one)(one.name, one.tensor[:-1], one.first)],
                [*others, type(one)(one.name, one.tensor[:, 1:].contiguous(), one.first)],
                [*others, type(one)(one.name, one.tensor.double(), one.first)],
            ):
                damaged = from_bytes(to_bytes(handover))
                object.__setattr__(damaged, "tensors", tuple(tensors))
                with pytest.raises(HandoverError, match=f"layout: .*{one.name}"):
                    new.import_request(damaged)
                assert not new.has_unfinished


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_holds_it_all(few: LoadedModel, tmp_path: Path) -> None:
    unmoved = continued([engine_of(few)], PROMPT_OF_FEW, SAMPLED, ())
    old, new = engine_of(few), engine_of(few)
    steps(old, old.add_request("one", PROMPT_OF_FEW, SAMPLED), 4)
    handover = old.export_request("one")
    file = tmp_path / "one.handover"
    file.write_bytes(b"what was there before")
    handover.write(file)
    assert file.read_bytes() == to_bytes(handover)
    assert [path.name for path in tmp_path.iterdir()] == ["one.handover"]
    moved = new.import_request(type(handover).read(file))
    finish(new)
    assert moved.token_ids == unmoved["tokens"]


def test_files_that_are_not_whole(few: LoadedModel, tmp_path: Path) -> None:
    data, file = sent(few), tmp_path / "one"
    handover = from_bytes(data)
    for content, message in (
        (data[:-5], "cut off"),
        (data + b"x", "goes on after its end"),
        (b"x" * 99, "no handover"),
    ):
        file.write_bytes(content)
        with pytest.raises(HandoverError, match=message):
            type(handover).read(file)
    with pytest.raises(HandoverError, match="cannot be read"):
        type(handover).read(tmp_path / "none")
    with pytest.raises(HandoverError, match="cannot be written"):
        handover.write(tmp_path / "none" / "one")


def test_a_file_that_is_not_finished_is_not_there(
    few: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handover = from_bytes(sent(few))
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(HandoverError, match="the disk is full"):
        handover.write(tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


# -- the built-in model ----------------------------------------------------------------------------------------------


def test_the_builtin_model_goes_on_drafting(builtin_llm: LLM) -> None:
    config = EngineConfig(num_blocks=24, max_model_len=256, num_speculative_tokens=8)
    old, new = (build_engine(builtin_llm.loaded, config) for _ in range(2))
    prompt = builtin_llm.token_ids("The three primary colours are red, yellow and")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    unmoved = builtin_llm.engine.add_request("unmoved", prompt, params)
    finish(builtin_llm.engine)
    steps(old, old.add_request("one", prompt, params), 3)
    moved = move(old, new, "one")
    finish(new)
    assert moved.token_ids == unmoved.token_ids
    assert moved.token_depths == unmoved.token_depths
    assert moved.stats == unmoved.stats
    assert moved.stats.num_accepted_tokens > 8


# -- through LLM -----------------------------------------------------------------------------------------------------


def test_one_llm_runs_the_prompt_and_another_answers(path: Path) -> None:
    settings = {"num_blocks": 64, "max_num_seqs": 2, "max_model_len": 80, "block_size": 4}
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=4, logprobs=1)
    prompts = [PROMPT_OF_FEW[: 10 + number] for number in range(5)]
    expected = LLM(path, **settings).generate(prompts, params)
    prefills = LLM(path, **settings, execution="overlapped")
    decodes = LLM(path, **settings)
    other = prefills.stream(PROMPT_OF_FEW[::-1], params)  # which is not disturbed
    streams = [decodes.resume(from_bytes(to_bytes(prefills.prefill(prompt, params)))) for prompt in prompts]
    for stream, whole in zip(streams, expected):
        chunks = list(stream)
        output = chunks[-1].output
        assert output is not None
        (choice,), (alone,) = output.choices, whole.choices
        assert (choice.token_ids, choice.token_depths) == (alone.token_ids, alone.token_depths)
        assert choice.stats.accepted_by_depth == alone.stats.accepted_by_depth
        assert choice.logprobs is not None
        assert [one.token_id for one in choice.logprobs] == list(choice.token_ids)
        assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
        assert len(chunks) > 2
    (undisturbed,) = LLM(path, **settings).generate([PROMPT_OF_FEW[::-1]], params)
    assert sum((chunk.token_ids for chunk in other), ()) == undisturbed.token_ids
    assert not prefills.engine.has_unfinished
    assert not decodes.engine.has_unfinished


def test_what_cannot_be_prefilled(path: Path) -> None:
    llm = LLM(path, num_blocks=64, max_model_len=80)
    with pytest.raises(RequestError, match="n must be 1"):
        llm.prefill(PROMPT_OF_FEW, SamplingParams(n=2))
    with pytest.raises(RequestError, match="the request has ended \\(finish_reason length\\)"):
        llm.prefill(PROMPT_OF_FEW, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.prefill(PROMPT_OF_FEW, {"max_tokens": 2})  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_a_stream_that_is_resumed_may_be_closed(path: Path) -> None:
    llm = LLM(path, num_blocks=64, max_model_len=80)
    stream = llm.resume(llm.prefill(PROMPT_OF_FEW, GREEDY))
    assert len(next(stream).token_ids) == 1
    stream.close()
    assert not llm.engine.has_unfinished


def test_the_example_of_the_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "handover.md").read_text(encoding="utf-8")
    listening, sending, stepping = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    steps_of_both = stepping.replace("path/to/checkpoint", str(path)).replace("max_tokens=64", "max_tokens=16")
    found: dict[str, Any] = {}
    exec(steps_of_both.replace("8]", "4]"), found)
    assert len(found["request"].output_token_ids) == 16
    llm = LLM(path, num_blocks=64, max_model_len=80)
    unmoved = llm.engine.add_request("a", [5, 6, 7, 4], found["request"].params)
    finish(llm.engine)
    assert found["request"].token_ids == unmoved.token_ids
    for example in (listening, sending):
        compile(example, "handover.md", "exec")
