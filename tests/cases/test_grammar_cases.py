"""Grammars at drafted positions: what is not allowed is rejected in its place, and rejected drafts leave no trace.

Every byte is a token. Drafts are scripted, so they may break a grammar, whatever the engine itself would propose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_models import byte_tokenizer
from cases.fake_replay import PROMPT, START, assert_drained, seen, served, served_alike
from fake_model import FakeModel, Script, Table, at_positions, right
from torch import Tensor

from foredraft import SamplingParams
from foredraft.errors import RequestError
from foredraft.structured_output import StructuredOutput

EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["poet", "engineer", "both"]},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2},
    },
    "required": ["kind", "scores"],
    "additionalProperties": False,
}
PERSON["properties"]["scores"]["maxItems"] = 2  # type: ignore[index]
ADA = '{"kind":"both","scores":[1,9]}'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytes")


def writes(text: str, *, bad: str = "", bad_from: int = 0, start: int = START) -> Table:
    """The target likes `text`, byte by byte, and EOS after it; from output token `bad_from` on it prefers `bad`."""
    token_ids = [*text.encode(), EOS]

    def table(token_id: int, position: int) -> Tensor:
        index = max(position + 1 - start, 0)
        logits = -5.0 - torch.arange(256, dtype=torch.float32) / 256
        logits[token_ids[min(index, len(token_ids) - 1)]] = 0.0
        if bad and index >= bad_from:
            logits[ord(bad)] = 2.0
        return logits

    return table


def writing(path: Path, table: Table, script: Script | None, **settings: Any) -> FakeModel:
    settings = {"vocab_size": 256, "eos_token_ids": [EOS], "tokenizer": byte_tokenizer(), **settings}
    return FakeModel(path, table, script, **settings)


def drafts_of(text: str, start: int = START) -> Script:
    """The bytes of `text` by position, EOS after them."""
    token_ids = text.encode()
    return lambda request_id, position, depth, previous: (*token_ids[position - start :][:1], EOS)[0]


def by_chance(seed: int, text: str, share: float) -> Script:
    """A share of the drafts is that of `text`; the others are any bytes, EOS among them, or those of JSON."""

    likely = drafts_of(text)

    def script(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        rng = random.Random(f"{seed} {position} {depth} {previous}")
        if rng.random() < share:
            return likely(request_id, position, depth, previous)
        others: list[int] = [rng.randrange(256), EOS, *b'{}[]",: 19abe']
        return rng.choice(others)

    return script


# -- the marker after which a grammar begins --------------------------------------------------------------------------


@pytest.mark.parametrize("num_thoughts", range(9))
def test_a_grammar_begins_right_behind_its_marker(path: Path, num_thoughts: int) -> None:
    """vllm-project/vllm#44297, vllm-project/vllm#44006, vllm-project/vllm#36138, vllm-project/vllm#43338: the marker
    falls anywhere in a draft window, whole or in parts, and what the target would say next is not allowed."""
    thoughts = "<//t><<t>"[:num_thoughts] + "</t>"
    table = writes(thoughts + ADA, bad="x", bad_from=len(thoughts))
    after: str | Sequence[int] = "</t>" if num_thoughts % 2 else [*b"</t>"]
    spec = StructuredOutput(json_schema=PERSON, after=after, whitespace=False)
    expected = thoughts + ADA
    for script in (right(table), right(table, 2), drafts_of(thoughts + "xx" + ADA), drafts_of(expected)):
        output = served_alike(writing(path, table, script), PROMPT, structured_output=spec, max_tokens=60)
        assert (output.text, output.finish_reason) == (expected, "stop")
        assert output.token_ids == (*expected.encode(), EOS)


@pytest.mark.parametrize(("first", "depth"), [(4, 3), (3, 3), (2, 3), (1, 3), (2, 1), (6, 8)])
def test_a_marker_of_three_tokens_may_fall_into_two_steps(path: Path, first: int, depth: int) -> None:
    """vllm-project/vllm#43338 again: with all drafts right, blocks end behind tokens 1, K+2, 2K+3, ..."""
    thoughts = "-" * first + "<t>"
    table = writes(thoughts + "7", bad="-", bad_from=len(thoughts))
    spec = StructuredOutput(regex="[0-9]", after="<t>")
    fake = writing(path, table, drafts_of(thoughts + "7"))
    output = served_alike(fake, PROMPT, (0, depth), structured_output=spec, max_tokens=20)
    assert output.text == thoughts + "7"
    own = [index for index, at in enumerate(output.token_depths) if at == 0]  # the last token of every step
    in_first_step = sum(index <= next(last for last in own if last >= first) for index in range(first, first + 3))
    assert in_first_step == {(4, 3): 1, (3, 3): 2, (2, 3): 3, (1, 3): 3, (2, 1): 1, (6, 8): 3}[first, depth]


# -- drafts against the grammar ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (StructuredOutput(json_schema=PERSON, whitespace=False), ADA),
        (StructuredOutput(json_object=True), '{"a": [1.5, null], "b": {"é": true}}'),
        (StructuredOutput(regex=r"(\p{L}+ )+[€😀]{2}[0-9a-f]{8}"), "zwölf Boxkämpfer €😀0123abcd"),
        (
            StructuredOutput(grammar='start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"'),
            "1+(22+3)+(4+(5+66))+7+(8)",
        ),
        (StructuredOutput(choice=["yes indeed, of course", "yes", "no"]), "yes indeed, of course"),
    ],
)
def test_rejected_drafts_leave_no_trace_in_a_grammar(
    path: Path, spec: StructuredOutput, text: str, share: float
) -> None:
    """vllm-project/vllm#46272: 0 to K drafts that are right, allowed, or not allowed, over a text of some 30 tokens."""
    for seed in range(3):
        fake = writing(path, writes(text), by_chance(seed, text, share))
        output = served_alike(fake, PROMPT, structured_output=spec, max_tokens=80, logprobs=1)
        assert (output.text, output.finish_reason) == (text, "stop")


@pytest.mark.parametrize("drafts", ["ab      ", "ab\0\0\0\0", "ab\0abab", "abababab", "  ab"])
@pytest.mark.parametrize("bad", [" ", "a", "b"])
def test_behind_the_end_of_a_grammar_nothing_follows_but_eos(path: Path, drafts: str, bad: str) -> None:
    """vllm-project/vllm#52767, vllm-project/vllm#55313: the grammar is complete at row 1, the drafts go on, and alone
    the target would never end."""
    fake = writing(path, writes("ab" + bad * 30, bad=bad, bad_from=2), drafts_of(drafts))
    for spec in (StructuredOutput(regex="ab"), StructuredOutput(choice=["ab", "b"])):
        output = served_alike(fake, PROMPT, (0, 1, 2, 3, 4, 8), structured_output=spec, max_tokens=30)
        assert (output.token_ids, output.finish_reason) == ((*b"ab", EOS), "stop")


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_json_is_complete_though_the_target_likes_whitespace(path: Path, depth: int) -> None:
    """vllm-project/vllm#52767 again: whitespace within JSON is bounded, and none follows it."""
    fake = writing(path, writes(ADA, bad=" "), drafts_of(" " * 100))
    spec = StructuredOutput(json_schema=PERSON)
    output = served(fake, PROMPT, structured_output=spec, max_tokens=200, num_speculative_tokens=depth)
    assert output.finish_reason == "stop"
    assert output.text == output.text.strip()
    assert set(json.loads(output.text)) == {"kind", "scores"}


@pytest.mark.parametrize("depth", [0, 1, 4, 8])
@pytest.mark.parametrize("drafter", ["n-gram", "chance", "own"])
def test_near_equal_prompts_under_one_grammar_in_a_batch(path: Path, depth: int, drafter: str) -> None:
    """vllm-project/vllm#52620: six requests, an enum and a list of fixed length, a target that knows no JSON."""

    def table(token_id: int, position: int) -> Tensor:
        generator = torch.Generator().manual_seed(256 * position + token_id)
        return 3 * torch.randn(256, generator=generator)

    follows = dict(zip(ADA.encode(), ADA.encode()[1:]))
    scripts: dict[str, Script | None] = {
        "n-gram": lambda request_id, position, place, previous: follows.get(previous, 34),
        "chance": by_chance(1, ADA, 0.3),
        "own": None,
    }
    fake = writing(path, table, scripts[drafter], draft_sampling="greedy")
    prompts = [[*b"Who was Ada? ", 65 + index] for index in range(6)]
    params = [
        SamplingParams(
            structured_output=StructuredOutput(json_schema=PERSON, whitespace=index % 2 == 0),
            temperature=float(index % 3),
            seed=index,
            max_tokens=150,
            num_speculative_tokens=depth,
        )
        for index in range(6)
    ]
    outputs = fake.llm.generate([*prompts], params)
    for output, prompt, one in zip(outputs, prompts, params):
        assert output.finish_reason == "stop"
        body = json.loads(output.text)
        assert body["kind"] in ("poet", "engineer", "both")
        assert len(body["scores"]) == 2
        plain = SamplingParams(**{**vars(one), "num_speculative_tokens": 0})
        assert seen(fake.llm.generate([prompt], plain)[0]) == seen(output)
    assert_drained(fake)


# -- grammars beside other rules --------------------------------------------------------------------------------------


def test_a_grammar_that_leaves_only_the_end_may_end_before_min_tokens(path: Path) -> None:
    for drafts in ("ab", "abab", "xx", "ab\0\0"):
        fake = writing(path, writes("ab"), drafts_of(drafts))
        output = served_alike(
            fake, PROMPT, structured_output=StructuredOutput(regex="ab"), min_tokens=10, max_tokens=20
        )
        assert (output.token_ids, output.finish_reason) == ((*b"ab", EOS), "stop")
        longer = StructuredOutput(regex="ab*")  # may go on, and so it has to
        output = served_alike(fake, PROMPT, structured_output=longer, min_tokens=6, max_tokens=20)
        assert (output.token_ids, output.finish_reason) == ((*b"abbbbb", EOS), "stop")


def test_rules_that_leave_no_token_end_their_request_only(path: Path) -> None:
    """The tokens before it stay, the same at any depth."""
    for drafts in ("abcd", "abc", "xxxx", "abcc"):
        fake = writing(path, writes("abcd"), drafts_of(drafts))
        spec = StructuredOutput(regex="abcd")
        options: dict[str, Any] = {"structured_output": spec, "bad_words": [[99, 100]], "max_tokens": 20}
        output = served_alike(fake, PROMPT, **options)
        assert (output.text, output.finish_reason) == ("abc", "error")
        params = [SamplingParams(**options), SamplingParams(structured_output=spec, max_tokens=20)]
        failed, good = fake.llm.generate([PROMPT, PROMPT], params)
        assert seen(failed) == seen(output)
        assert (good.text, good.finish_reason) == ("abcd", "stop")
        assert_drained(fake)


@pytest.mark.parametrize("draft", [None, 0, 98, 255])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
def test_where_rules_leave_no_token_no_draft_is_accepted(
    path: Path, draft: int | None, temperature: float, mode: str
) -> None:
    """Not even the one that would be chosen among tokens that are all banned."""
    script = None if draft is None else at_positions({}, draft)
    fake = writing(path, writes("abababab"), script, draft_sampling=mode)
    output = served_alike(
        fake,
        PROMPT,
        temperature=temperature,
        seed=1,
        allowed_token_ids=[97, 98],
        bad_words=[[97, 97], [97, 98], [98, 97], [98, 98]],
        max_tokens=8,
    )
    assert (output.text, output.finish_reason) == ("a", "error")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": ["object"]}, "json_schema"),
        ({"json_schema": "no JSON"}, "json_schema"),
        ({"json_schema": {"type": "no type"}}, "json_schema"),
        ({"json_schema": {"type": 7}}, "json_schema"),
        ({"json_schema": {"type": "integer", "minimum": "three"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/$defs/nowhere"}}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"grammar": "start: nowhere"}, "grammar"),
        ({"choice": "yes"}, "choice"),
        ({"regex": "a", "after": [256]}, "after"),
        ({"regex": "a", "json_object": True}, "regex and|json_object and"),
    ],
)
def test_a_wrong_shape_is_refused_by_name_and_harms_nobody(path: Path, settings: dict[str, Any], name: str) -> None:
    """vllm-project/vllm#35438: what can be seen at once is refused at once, the rest when the request comes."""
    fake = writing(path, writes(ADA), drafts_of(ADA))
    good = SamplingParams(structured_output=StructuredOutput(json_schema=PERSON, whitespace=False), max_tokens=60)
    try:
        bad = SamplingParams(structured_output=StructuredOutput(**settings))
    except RequestError as error:
        message = str(error)
    else:
        failed, beside = fake.llm.generate([PROMPT, PROMPT], [bad, good])
        assert (beside.text, beside.finish_reason) == (ADA, "stop")
        assert failed.finish_reason == "error"
        message = failed.error or ""
    assert message.startswith("structured_output")
    assert any(part in message for part in name.split("|"))
    assert fake.llm.generate([PROMPT], good)[0].text == ADA
    assert_drained(fake)


def test_a_grammar_goes_with_no_option_that_hides_its_end() -> None:
    with pytest.raises(RequestError, match="ignore_eos must be false"):
        SamplingParams(structured_output=StructuredOutput(regex="a"), ignore_eos=True)
