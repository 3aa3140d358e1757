"""Rules that fail, or leave nothing, change neither the distribution nor anybody else's output."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from byte_models import byte_tokenizer
from fake_model import FakeModel, one_after_another, right
from torch import Tensor

from foredraft import RequestError, SamplingParams, StructuredOutput, TokenHistory
from foredraft.config import VerificationMethod

PROMPT = [5, 6]
TEXT = [97, 98, 99] * 10
EOS = 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytes")


def model(path: Path, depth: int, eos_token_ids: tuple[int, ...] = (EOS,), **settings: Any) -> FakeModel:
    table = one_after_another(TEXT, 256, start=len(PROMPT))
    return FakeModel(
        path,
        table,
        right(table),
        vocab_size=256,
        eos_token_ids=eos_token_ids,
        tokenizer=byte_tokenizer(),
        num_speculative_tokens=depth,
        **settings,
    )


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_dead_end_leaves_the_distribution_before_it_alone(tmp_path: Path, verification: VerificationMethod) -> None:
    """After token 1 nothing is left; it is emitted as often as it is without drafts."""
    probs = torch.tensor([0.4, 0.2, 0.4, 1e-9])
    fake = FakeModel(
        tmp_path,
        lambda token_id, position: probs.log(),
        lambda request_id, position, depth, previous: torch.tensor([0.5, 0.5, 0.0, 0.0]),
        vocab_size=4,
        num_modules=2,
        num_speculative_tokens=2,
        max_num_seqs=128,
        num_blocks=512,
        verification=verification,
    )
    words = [[1, token_id] for token_id in range(4)]
    params = [
        SamplingParams(max_tokens=2, temperature=1.0, seed=seed, bad_words=words, num_speculative_tokens=2)
        for seed in range(4000)
    ]
    # The first token comes from the prefill; the second and what is drafted after it from cycles of their own.
    longer = [SamplingParams(**{**vars(one), "max_tokens": 4}) for one in params]
    second = Counter(
        output.token_ids[1] for output in fake.llm.generate([[2]] * len(longer), longer) if len(output.token_ids) > 1
    )
    total = sum(second.values())
    for token_id, share in enumerate((0.4, 0.2, 0.4)):
        assert second[token_id] / total == pytest.approx(share, abs=4 * (0.25 / total) ** 0.5)


class Keeper:
    """A stateful rule that changes nothing; `fails` says where it raises."""

    is_stateful = True

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        return logits

    def advance(self, token_id: int) -> None:
        if self.fails == "advance" and token_id == 99:
            raise ValueError("99")

    def clone(self) -> Self:
        if self.fails == "clone":
            raise ValueError("no clone")
        return self


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize(("fails", "before"), [("clone", ()), ("advance", (97, 98, 99))])
def test_a_stateful_rule_that_cannot_go_on_ends_its_request_only(
    path: Path, depth: int, fails: str, before: tuple[int, ...]
) -> None:
    fake = model(path, depth)
    broken = SamplingParams(max_tokens=6, logits_processors=[Keeper(fails)])
    found, other = fake.llm.generate([PROMPT] * 2, [broken, SamplingParams(max_tokens=6)])
    assert (found.finish_reason, found.token_ids) == ("error", before)
    assert other.token_ids == tuple(TEXT[:6])


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_what_a_rule_would_do_after_the_end_is_of_no_account(path: Path, depth: int) -> None:
    params = SamplingParams(max_tokens=6, stop="b", logits_processors=[Keeper("advance")])
    (output,) = model(path, depth).llm.generate([PROMPT], params)
    assert (output.finish_reason, output.token_ids) == ("stop", (97, 98))


class SilentError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Raises:
    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        raise SilentError


def test_an_error_that_cannot_say_what_it_is(path: Path) -> None:
    (output,) = model(path, 2).llm.generate([PROMPT], SamplingParams(logits_processors=[Raises()]))
    assert output.error == "logits_processors: SilentError: (it has no text)"


class Constant:
    is_stateful = False

    def __init__(self) -> None:
        self.logits = torch.arange(256.0)

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        return self.logits


class LowerTheBest:
    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        logits[int(logits.argmax())] -= 3
        return logits


@pytest.mark.parametrize("depth", [0, 4])
def test_rules_do_not_change_what_others_keep(path: Path, depth: int) -> None:
    params = SamplingParams(max_tokens=6, logits_processors=[Constant(), LowerTheBest()])
    (output,) = model(path, depth).llm.generate([PROMPT], params)
    assert output.token_ids == (254,) * 6


@pytest.mark.parametrize("depth", [0, 4])
def test_a_rule_that_generates_is_refused(path: Path, depth: int) -> None:
    fake = model(path, depth)

    class Generates:
        is_stateful = False

        def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
            fake.llm.generate([[1]], SamplingParams(max_tokens=1))
            return logits

    (stream,) = [fake.llm.stream([7], SamplingParams(max_tokens=1, logits_processors=[Generates()]))]
    outputs = [chunk.output for chunk in stream]
    assert outputs[-1] is not None
    (good,) = fake.llm.generate([PROMPT], SamplingParams(max_tokens=3))
    assert good.token_ids == tuple(TEXT[:3])


@pytest.mark.parametrize("depth", [0, 4])
def test_an_end_token_that_the_model_does_not_have(path: Path, depth: int) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=2, structured_output=StructuredOutput(regex="[abc]{4}"))
    (output,) = model(path, depth, eos_token_ids=(EOS, 300)).llm.generate([PROMPT], params)
    assert (output.finish_reason, output.text) == ("stop", "abca")


@pytest.mark.parametrize("depth", [0, 4])
def test_a_grammar_that_fails_further_on_ends_its_request_only(path: Path, depth: int) -> None:
    dead_end = StructuredOutput(grammar='start: "ab" (x | "c" "d")\nx: "c" /[\\u4e00]/')
    asked = [SamplingParams(max_tokens=8, structured_output=dead_end), SamplingParams(max_tokens=6)]
    found, other = model(path, depth).llm.generate([PROMPT] * 2, asked)
    assert found.token_ids[:3] == (97, 98, 99)
    assert other.token_ids == tuple(TEXT[:6])


@pytest.mark.parametrize("grammar", ["start[max_tokens=3]: /.*/", 'start: a "!"\na[stop="i"]: /.*/'])
def test_a_grammar_that_drafts_cannot_be_taken_back_from_is_refused(path: Path, grammar: str) -> None:
    fake = model(path, 0)
    params = SamplingParams(max_tokens=8, structured_output=StructuredOutput(grammar=grammar))
    with pytest.raises(RequestError, match=r"structured_output.grammar cannot be followed"):
        fake.llm.stream(PROMPT, params)


@pytest.mark.parametrize("value", [1e39, 1e7, 1e-7, 1e-50])
def test_temperatures_that_float32_cannot_tell_from_others(value: float) -> None:
    with pytest.raises(RequestError, match=r"temperature must be .*1000000.0, not"):
        SamplingParams(temperature=value)


def test_integers_serve_as_weights(path: Path) -> None:
    params = SamplingParams(max_tokens=4, presence_penalty=10**20, repetition_penalty=1, temperature=0)
    (output,) = model(path, 2).llm.generate([PROMPT], params)
    assert output.error is None


@pytest.mark.parametrize(("word", "banned"), [("\n", 1), ("  ", 1), ("a", 2), (" a", 1), ("\na", 1)])
def test_a_bad_word_bans_no_more_than_itself_and_itself_after_a_space(path: Path, word: str, banned: int) -> None:
    tools = model(path, 0).engine._text_tools
    assert len(tools.bad_words(SamplingParams(bad_words=[word]))) == banned


def test_a_prompt_alone_runs_no_rules(path: Path) -> None:
    params = SamplingParams(max_tokens=0, logits_processors=[Raises()], prompt_logprobs=0)
    (output,) = model(path, 4).llm.generate([PROMPT], params)
    assert (output.finish_reason, output.error) == ("length", None)
    assert output.prompt_logprobs is not None


@pytest.mark.parametrize("where", ["add", "commit"])
def test_an_interrupt_leaves_nothing_of_a_request(path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = model(path, 2)
    scheduler = fake.engine.scheduler
    original = getattr(scheduler, where)

    def interrupted(*args: Any) -> Any:
        monkeypatch.undo()
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake.llm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert not fake.engine.has_unfinished
    assert not fake.engine._texts
    assert not fake.engine.runner._memories
    assert not fake.llm.requests._open
    (good,) = fake.llm.generate([PROMPT], SamplingParams(max_tokens=3))
    assert good.token_ids == tuple(TEXT[:3])
