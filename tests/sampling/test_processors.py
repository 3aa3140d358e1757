"""The rules that act on logits: each row by its own history, as transformers would apply them to that row alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import FakeModel, at_positions, one_after_another, right
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from foredraft import SamplingParams
from foredraft.logits_processor import TokenHistory
from foredraft.outputs import RequestOutput
from foredraft.plan import RequestTerms
from foredraft.sampling.processors import RuledRows, apply_rules
from foredraft.sampling.sampling_state import SamplingState
from foredraft.stopping import FinishReason

VOCAB_SIZE = 12
STOP_IDS = (2, 7)
SEEDS = range(40)


def state_of(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = (), name: str = "r"
) -> SamplingState:
    """The rules of a request that has written `output`."""
    bad_words = tuple(tuple(word) for word in params.bad_words if not isinstance(word, str))
    stops = frozenset(STOP_IDS)
    terms = RequestTerms(name, tuple(prompt), params, 0, 1000, stops, arrival=0, bad_words=bad_words)
    state = SamplingState(terms, VOCAB_SIZE)
    state.commit(output)
    return state


def random_ids(chance: random.Random, low: int, high: int) -> list[int]:
    return [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(low, high))]


def random_params(chance: random.Random) -> SamplingParams:
    """Any of the rules; few tokens, so that bad words and repetitions do occur."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if chance.random() < 0.6 else otherwise

    words = [random_ids(chance, 1, 3) for _ in range(chance.randint(1, 40))]
    return SamplingParams(
        logit_bias=maybe({token_id: chance.uniform(-3, 3) for token_id in random_ids(chance, 1, 4)}, ()),
        repetition_penalty=maybe(chance.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(chance.uniform(-1, 1), 0.0),
        frequency_penalty=maybe(chance.uniform(-1, 1), 0.0),
        bad_words=maybe(words, ()),
        min_tokens=maybe(chance.randint(1, 8), 0),
        allowed_token_ids=maybe(random_ids(chance, 3, 9), None),
    )


def expected_row(state: SamplingState, drafts: Sequence[int], logits: Tensor) -> Tensor:
    """One row [V] by transformers, with the penalties that it has not in their place."""
    params, prompt = state.params, state.terms.prompt_token_ids
    output = [*state.output_token_ids, *drafts]
    ids = torch.tensor([[*prompt, *output]])
    first, last = LogitsProcessorList(), LogitsProcessorList()
    if params.biases:
        first.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in params.biases]))
    if params.repetition_penalty != 1.0:
        first.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if state.terms.bad_words:
        last.append(NoBadWordsLogitsProcessor([list(word) for word in state.terms.bad_words]))
    if params.min_tokens:
        last.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(STOP_IDS)))
    scores = applied(first, ids, logits[None].clone())
    for token_id in set(output):
        count = output.count(token_id)
        scores[0, token_id] -= params.frequency_penalty * count + params.presence_penalty
    scores = applied(last, ids, scores)
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        if bool(
            (scores[0, allowed] == -torch.inf).all()
        ):  # transformers gives up the other rules; here nothing is left
            return torch.full_like(logits, -torch.inf)
        scores = applied(PrefixConstrainedLogitsProcessor(lambda batch, sent: allowed, 1), ids, scores)
    return scores[0]


def applied(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    found: Tensor = processor(ids, scores)
    return found


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_row_is_as_transformers_makes_it(seed: int) -> None:
    """Several requests with different numbers of drafts, between rows of a request without rules."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    states: list[SamplingState] = []
    drafts, first_rows, num_rows = [], [], chance.randint(0, 2)
    for _ in range(chance.randint(1, 4)):
        prompt, output = random_ids(chance, 1, 4), random_ids(chance, 0, 4)
        states.append(state_of(random_params(chance), prompt, output, name=f"r{len(states)}"))
        drafts.append(tuple(random_ids(chance, 0, 5)))
        first_rows.append(num_rows)
        num_rows += len(drafts[-1]) + 1 + chance.randint(0, 2)
    logits = torch.randn(num_rows, VOCAB_SIZE)
    before = logits.clone()
    ours, errors = apply_rules(logits, [RuledRows(*each) for each in zip(states, first_rows, drafts)])
    assert torch.equal(logits, before)
    theirs, dead = before.clone(), dict[str, int]()
    for state, first, tokens in zip(states, first_rows, drafts):
        for j in range(len(tokens) + 1):
            theirs[first + j] = expected_row(state, tokens[:j], before[first + j])
            if bool((theirs[first + j] == -torch.inf).all()):
                dead.setdefault(state.terms.request_id, j)
    assert_same(ours, theirs)
    assert {name: error.num_drafts for name, error in errors.items()} == dead


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_without_rules_keep_their_bits(dtype: torch.dtype) -> None:
    logits = torch.randn(4, VOCAB_SIZE).to(dtype)
    logits[1, 3], logits[2, 3] = -0.0, -torch.inf
    state = state_of(SamplingParams(logit_bias={1: 2.0}), [3])
    scores, _ = apply_rules(logits, [RuledRows(state, 3, ())])
    assert scores.dtype == torch.float32
    assert torch.equal(scores[:3].view(torch.int32), logits[:3].float().view(torch.int32))
    assert float(scores[3, 1]) == float(logits[3, 1].float() + 2.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_rejected_drafts_leave_no_trace(seed: int) -> None:
    """What is committed is other than what was drafted; then the rules are as those of a request that never drafted."""
    chance = random.Random(seed)
    params, prompt = random_params(chance), random_ids(chance, 1, 4)
    state, output = state_of(params, prompt), []
    for _ in range(5):
        for _ in range(2):  # modules draft under the rules before the target is asked
            drafts = tuple(random_ids(chance, 0, 5))
            rows = RuledRows(state, 0, drafts, len(drafts))
            apply_rules(torch.randn(1, VOCAB_SIZE), [rows], is_draft=True)
            apply_rules(torch.randn(len(drafts) + 1, VOCAB_SIZE), [RuledRows(state, 0, drafts)])
        kept = [*drafts[: chance.randint(0, len(drafts))], chance.randrange(VOCAB_SIZE)]
        state.commit(kept)
        output += kept
        drafts = tuple(random_ids(chance, 0, 5))
        logits = torch.randn(len(drafts) + 1, VOCAB_SIZE)
        ours, _ = apply_rules(logits, [RuledRows(state, 0, drafts)])
        theirs, _ = apply_rules(logits, [RuledRows(state_of(params, prompt, output), 0, drafts)])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft_vocab_size", [1, 5, VOCAB_SIZE - 1])
def test_a_draft_head_with_fewer_tokens(seed: int, draft_vocab_size: int) -> None:
    """Its tokens are ruled as the target's are, and the others are of no account."""
    chance = random.Random(seed)
    states = [state_of(random_params(chance), random_ids(chance, 1, 4), random_ids(chance, 0, 4)) for _ in range(3)]
    drafts = [tuple(random_ids(chance, 0, 4)) for _ in states]
    ruled = [RuledRows(state, row, tokens, len(tokens)) for row, (state, tokens) in enumerate(zip(states, drafts))]
    logits = torch.randn(len(ruled), VOCAB_SIZE)
    whole, _ = apply_rules(logits, ruled)
    part, _ = apply_rules(logits[:, :draft_vocab_size].contiguous(), ruled, is_draft=True)
    assert torch.equal(part, whole[:, :draft_vocab_size])


def test_a_bad_word_that_begins_in_the_prompt() -> None:
    state = state_of(SamplingParams(bad_words=[[4, 5, 6], [5, 8], [9]]), [4, 5])
    scores, _ = apply_rules(torch.zeros(3, VOCAB_SIZE), [RuledRows(state, 0, (1, 5))])
    banned = [[j for j in range(VOCAB_SIZE) if scores[row, j] == -torch.inf] for row in range(3)]
    assert banned == [[6, 8, 9], [9], [8, 9]]


# -- a caller's own processors -----------------------------------------------------------------------------------------

SEQUENCE = [5, 9, 4, 11, 3, 8, 6, 10, 1, 4]
PROMPT = [3, 1]
TABLE = one_after_another(SEQUENCE, 16, start=len(PROMPT), gap=50.0)
"""So far apart that sampling chooses as greedy decoding does."""
NEVER = 15
"""A token that TABLE never chooses."""

Result = Callable[[Tensor], Any]


class Own:
    """Does `change` to the logits where `when` is true of the history."""

    is_stateful = False

    def __init__(self, change: Result, when: Callable[[TokenHistory], bool] = lambda history: True) -> None:
        self.change = change
        self.when = when

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        return self.change(logits) if self.when(history) else logits


class Remembering:
    """Bans the tokens that it was told of; fails if those are not the output."""

    is_stateful = True

    def __init__(self, token_ids: Sequence[int] = (), made: list[Remembering] | None = None) -> None:
        self.token_ids = list(token_ids)
        self.made = made if made is not None else []

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        assert tuple(self.token_ids) == history.output_token_ids, "told of other tokens"
        logits[self.token_ids] = -torch.inf
        return logits

    def advance(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def clone(self) -> Remembering:
        self.made.append(Remembering(self.token_ids, self.made))
        return self.made[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fake") / "model"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> FakeModel:
    return FakeModel(checkpoint, TABLE)


SCRIPTS = {"right": right(TABLE), "two": right(TABLE, 2), "never": at_positions({}, NEVER), "zero": at_positions({}, 0)}


def outputs(model: FakeModel, params: Sequence[SamplingParams], script: str = "right") -> list[RequestOutput]:
    """Each of the requests in one batch; nothing stays behind."""
    model.drafter.script = SCRIPTS[script]
    found = model.llm.generate([PROMPT] * len(params), list(params))
    assert not model.engine.has_unfinished
    model.engine.cache.check_integrity()
    return found


def options(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=len(SEQUENCE), ignore_eos=True, **settings)


CASES = [(0, "right"), (1, "right"), (3, "two"), (4, "right"), (4, "never"), (8, "zero")]
"""Numbers of drafts, and which they are."""


@pytest.mark.parametrize(("depth", "script"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stateless_processor_sees_the_drafts_before_its_row(
    model: FakeModel, depth: int, script: str, temperature: float
) -> None:
    seen: list[tuple[int, ...]] = []

    def note(history: TokenHistory) -> bool:
        assert history.prompt_token_ids == tuple(PROMPT)
        seen.append(history.output_token_ids)
        return len(history.output_token_ids) % 3 == 2

    own = Own(lambda logits: logits.roll(1), note)
    params = options(logits_processors=[own], temperature=temperature, num_speculative_tokens=depth, seed=1)
    (found,) = outputs(model, [params], script)
    expected = [(token + 1) % 16 if index % 3 == 2 else token for index, token in enumerate(SEQUENCE)]
    assert found.token_ids == tuple(expected)
    assert {found.token_ids[:end] for end in range(len(SEQUENCE))} <= set(seen)


@pytest.mark.parametrize(("depth", "script"), CASES)
def test_a_stateful_processor_is_told_of_all_tokens_in_order(model: FakeModel, depth: int, script: str) -> None:
    """Also where one object is given to two requests, beside others: each has clones of its own."""
    own = Remembering()
    ruled = options(logits_processors=[own], num_speculative_tokens=depth)
    other = options(logits_processors=[own], logit_bias={7: 100.0}, num_speculative_tokens=depth)
    first, second, plain = outputs(model, [ruled, other, options(num_speculative_tokens=depth)], script)
    assert (first.error, second.error, own.token_ids) == (None, None, [])
    assert first.token_ids[:9] == tuple(SEQUENCE[:9])  # the last one comes for the second time
    assert first.token_ids[9] not in SEQUENCE
    assert second.token_ids[:3] == (7, 9, 4)
    assert len(set(second.token_ids)) == len(second.token_ids)
    assert plain.token_ids == tuple(SEQUENCE)


def test_clones_of_rejected_drafts_are_dropped() -> None:
    own = Remembering()
    state = state_of(options(logits_processors=[own]), PROMPT)
    apply_rules(torch.zeros(4, VOCAB_SIZE), [RuledRows(state, 0, (1, 2, 3))])
    assert [clone.token_ids for clone in own.made] == [[], [1], [1, 2], [1, 2, 3]]
    state.commit([1, 2, 5])
    assert own.made[-1].token_ids == [1, 2, 5]
    own.made.clear()
    scores, errors = apply_rules(torch.zeros(2, VOCAB_SIZE), [RuledRows(state, 0, (6,))])
    assert errors == {}
    assert [clone.token_ids for clone in own.made] == [[1, 2, 5, 6]]
    assert (scores == -torch.inf).nonzero().tolist() == [[0, 1], [0, 2], [0, 5], [1, 1], [1, 2], [1, 5], [1, 6]]


@pytest.mark.parametrize(("depth", "script"), CASES)
@pytest.mark.parametrize("change", [torch.zeros_like, lambda logits: logits.fill_(9.0), torch.Tensor.double])
def test_a_banned_token_stays_banned(model: FakeModel, depth: int, script: str, change: Result) -> None:
    params = options(
        logits_processors=[Own(change)],
        allowed_token_ids=[6, 4, 7, 2],
        bad_words=[[4], [6, 6]],
        logit_bias={6: 100.0},
        num_speculative_tokens=depth,
    )
    (found,) = outputs(model, [params], script)
    assert found.error is None
    assert set(found.token_ids) <= {6, 7, 2}
    assert (6, 6) not in zip(found.token_ids, found.token_ids[1:])


def fail(logits: Tensor) -> Tensor:
    raise KeyError("x" * 10_000)


def with_value(value: float, token_ids: Sequence[int] = tuple(range(16))) -> Result:
    return lambda logits: logits.index_fill(0, torch.tensor(token_ids), value)


WRONG: dict[str, Result] = {
    "shape": lambda logits: logits[:-1],
    "rows": lambda logits: logits[None],
    "integers": torch.Tensor.int,
    "list": torch.Tensor.tolist,
    "none": lambda logits: None,
    "raises": fail,
    "nan": with_value(torch.nan),
    "one nan": with_value(torch.nan, [7]),
    "nan at 0": with_value(torch.nan, [0]),
    "infinite": with_value(torch.inf, [7]),
    "all infinite": with_value(torch.inf),
    "nothing": with_value(-torch.inf),
}


@pytest.mark.parametrize(("depth", "script"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_result_ends_its_request_alone(
    model: FakeModel, kind: str, temperature: float, depth: int, script: str
) -> None:
    """After the same tokens at any depth, whatever was drafted."""
    own = Own(WRONG[kind], lambda history: len(history.output_token_ids) == 3)
    settings: dict[str, Any] = {"temperature": temperature, "num_speculative_tokens": depth, "seed": 3}
    broken, whole = options(logits_processors=[own], **settings), options(**settings)
    before, found, after = outputs(model, [whole, broken, whole], script)
    assert before.token_ids == after.token_ids == tuple(SEQUENCE)
    assert before.error is after.error is None
    assert found.finish_reason is FinishReason.ERROR
    assert found.error
    assert len(found.error) < 700
    assert found.token_ids == tuple(SEQUENCE[:3])
    assert len(found.token_depths) == 3


@pytest.mark.parametrize(("depth", "script"), CASES)
def test_an_error_after_a_rejected_draft_does_not_count(model: FakeModel, depth: int, script: str) -> None:
    own = Own(
        fail,
        lambda history: history.output_token_ids[: len(SEQUENCE)] != tuple(SEQUENCE[: len(history.output_token_ids)]),
    )
    (found,) = outputs(model, [options(logits_processors=[own], num_speculative_tokens=depth)], script)
    assert (found.error, found.token_ids) == (None, tuple(SEQUENCE))


@pytest.mark.parametrize(("depth", "script"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token(model: FakeModel, depth: int, script: str, temperature: float) -> None:
    settings: dict[str, Any] = {"temperature": temperature, "num_speculative_tokens": depth, "seed": 3}
    allowed = [5, 9, 4]
    words = [[4, token_id] for token_id in allowed]
    broken = options(allowed_token_ids=allowed, bad_words=words, **settings)
    plain, found = outputs(model, [options(**settings), broken], script)
    assert plain.token_ids == tuple(SEQUENCE)
    assert found.token_ids == (5, 9, 4)
    assert found.finish_reason is FinishReason.ERROR
    assert found.error == "the request's options leave no token at position 5"
