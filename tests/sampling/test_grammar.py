"""Masks along drafts: the same as those of a fresh grammar, whatever was drafted and rejected before."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from byte_models import byte_tokenizer
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.errors import RequestError
from foredraft.models.builtin import builtin_checkpoint
from foredraft.sampling.grammar import MAX_COMPILED, GrammarCompiler, GrammarState
from foredraft.structured_output import StructuredOutput

VOCAB_SIZE = 49152
EOS_IDS = frozenset({0, 2})  # <|endoftext|> and <|im_end|>

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["poet", "engineer", "both"]},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "kind", "scores", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "alive": {"type": "boolean"}},
            "required": ["zip", "alive"],
            "additionalProperties": False,
        }
    },
}
PERSON["properties"]["scores"]["maxItems"] = 3
ADA = {"name": "Ada", "kind": "both", "scores": [1, 20, 99], "home": {"zip": "01234", "alive": False}}
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]+/'
SUM_GBNF = 'root ::= term ("+" term)* # a sum\nterm ::= [0-9]+ | "(" root ")"\n'

LEGAL = [
    (StructuredOutput(json_schema=PERSON), json.dumps(ADA)),
    (StructuredOutput(json_schema=PERSON, whitespace=False), json.dumps(ADA, separators=(",", ":"))),
    (
        StructuredOutput(json_object=True),
        json.dumps({"é": ["日本", {"a": [1.5e-3, None]}], "text": "a \\ \n b"}, ensure_ascii=False),
    ),
    (
        StructuredOutput(regex=r"(\p{L}+ )+[€😀]{2}[0-9a-f]{8}-[0-9a-f]{8}"),
        "zwölf große Boxkämpfer jagen €😀0123abcd-4567cdef",
    ),
    (StructuredOutput(grammar=SUM), "1+(22+3)+(4+(5+66))+7+(8+9)+10+(11+12)"),
    (StructuredOutput(grammar=SUM_GBNF), "1+(22+3)+(4+(5+66))+7+(8+9)+10+(11+12)"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builtin_checkpoint())


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, EOS_IDS)


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerBase:
    return byte_tokenizer()


class Letters:
    """The grammar of one request, whose tokens are bytes; written and read as text, with `$` for EOS."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: StructuredOutput) -> None:
        compiler = GrammarCompiler(tokenizer, 256, frozenset({0}))
        self.state = compiler.start(spec)

    def after(self, drafts: str = "") -> str | None:
        mask = self.state.mask_after(self.ids(drafts))
        return None if mask is None else "".join(map(chr, ids(mask))).replace("\0", "$")

    def commit(self, text: str) -> None:
        self.state.commit(self.ids(text))

    @staticmethod
    def ids(text: str) -> list[int]:
        return list(text.replace("$", "\0").encode())


def ids(mask: Tensor | None) -> list[int]:
    assert mask is not None
    return [int(token_id) for token_id in mask.nonzero()[:, 0]]


def any_of(rng: random.Random, mask: Tensor | None) -> int:
    assert mask is not None
    allowed = mask.nonzero()[:, 0]
    return int(allowed[rng.randrange(len(allowed))])


def fresh_mask(compiler: GrammarCompiler, spec: StructuredOutput, token_ids: Sequence[int]) -> Tensor | None:
    state = compiler.start(spec)
    state.commit(token_ids)
    return state.mask_after(())


def drafts_near(rng: random.Random, state: GrammarState, right: Sequence[int]) -> list[int]:
    """0 to 8 drafts: the right ones so far, then some that the grammar allows, then any."""
    drafts = list(right[: rng.randint(0, 8)])
    while len(drafts) < 8 and rng.random() < 0.7:
        mask = state.mask_after(drafts)
        drafts.append(rng.randrange(VOCAB_SIZE) if mask is None or rng.random() < 0.2 else any_of(rng, mask))
    return drafts


@pytest.mark.parametrize(("spec", "text"), LEGAL)
def test_rejected_drafts_leave_no_trace(
    tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler, spec: StructuredOutput, text: str
) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) >= 30
    state, rng = compiler.start(spec), random.Random(0)
    for num_tokens, token_id in enumerate(token_ids):
        for _ in range(2):
            drafts = drafts_near(rng, state, token_ids[num_tokens:])
            state.mask_after(drafts)
            part = drafts[: rng.randint(0, len(drafts))]
            mask = state.mask_after(part)
            if mask is not None:
                assert torch.equal(mask, fresh_mask(compiler, spec, [*token_ids[:num_tokens], *part]))  # type: ignore[arg-type]
        expected = fresh_mask(compiler, spec, token_ids[:num_tokens])
        assert expected is not None
        assert expected[token_id]
        assert torch.equal(state.mask_after(()), expected)  # type: ignore[arg-type]
        assert not state.is_complete
        state.commit([token_id])
    assert ids(state.mask_after(())) == sorted(EOS_IDS) or spec.kind in ("regex", "grammar")
    state.commit([2])
    assert state.is_complete


@pytest.mark.parametrize(("spec", "text"), LEGAL)
def test_masks_are_the_library_s_own(
    tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler, spec: StructuredOutput, text: str
) -> None:
    wrapped = from_tokenizer(tokenizer, n_vocab=VOCAB_SIZE, eos_token=sorted(EOS_IDS))  # type: ignore[arg-type]
    if spec.kind in ("json_schema", "json_object"):
        bounded = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
        overrides = bounded if spec.whitespace else {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(spec.schema_text, overrides=overrides)  # type: ignore[arg-type]
    elif spec.regex is not None:
        grammar = LLMatcher.grammar_from_regex(spec.regex)
    else:
        grammar = LLMatcher.grammar_from_lark(SUM)
    matcher, state = LLMatcher(wrapped, grammar), compiler.start(spec)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        mask = state.mask_after(())
        assert mask is not None
        assert mask.dtype == torch.bool
        assert mask.shape == (VOCAB_SIZE,)
        biases = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        assert torch.equal(mask, biases[:VOCAB_SIZE] > 0)
        assert matcher.consume_token(token_id)
        state.commit([token_id])


def test_each_mask_is_made_once(tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    token_ids = tokenizer.encode(json.dumps(ADA), add_special_tokens=False)
    state = compiler.start(StructuredOutput(json_schema=PERSON))
    for _ in range(2):  # while drafting, and for verification
        for num_drafts in range(6):
            state.mask_after(token_ids[:num_drafts])
    assert state.num_masks == 6
    state.commit([*token_ids[:5]])  # all drafts: the last mask is that of the next step
    state.mask_after(())
    assert state.num_masks == 6
    state.mask_after(token_ids[5:8])
    state.mask_after(token_ids[5:7])  # one that was passed over, before and after
    state.mask_after(token_ids[5:9])
    assert state.num_masks == 9
    state.commit([*token_ids[5:6]])
    state.mask_after(token_ids[6:8])
    assert state.num_masks == 10
    assert state.seconds > 0


def test_forced_tokens(letters: PreTrainedTokenizerBase) -> None:
    state = Letters(letters, StructuredOutput(regex="ab(c|d)")).state
    assert [state.forced_after(list(drafts)) for drafts in (b"", b"a", b"ab", b"abc", b"x")] == [97, 98, None, 0, None]


class TestEnd:
    def test_drafts_that_go_on_after_the_end(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(regex="ab"))
        assert [grammar.after("abab"[:n]) for n in range(5)] == ["a", "b", "$", "$", "$"]
        grammar.commit("ab")
        assert grammar.state.is_complete
        assert grammar.after() == "$"
        grammar.commit("zz$")
        assert grammar.after() == "$"
        assert grammar.state.is_complete

    def test_eos_where_the_grammar_may_end(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(regex="ab*"))
        assert [grammar.after(drafts) for drafts in ("", "a", "a$", "a$b", "ab")] == ["a", "$b", "$", "$", "$b"]
        assert grammar.after("$") is None  # too early: certain to be rejected
        grammar.commit("a")
        assert not grammar.state.is_complete
        grammar.commit("b$")
        assert grammar.state.is_complete

    def test_nothing_at_all_is_an_output_as_well(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(grammar='start: ""'))
        assert grammar.after() == "$"
        assert grammar.state.is_complete

    @pytest.mark.parametrize("eos_id", sorted(EOS_IDS))
    def test_any_eos_ends_it(self, compiler: GrammarCompiler, eos_id: int) -> None:
        state = compiler.start(StructuredOutput(regex="(ab)*"))
        assert {0, 2} < set(ids(state.mask_after(())))
        state.commit([eos_id])
        assert state.is_complete
        assert ids(state.mask_after(())) == [0, 2]

    def test_an_output_that_breaks_the_rule_is_not_continued(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(regex="ab"))
        grammar.commit("ax")
        assert not grammar.state.is_complete
        with pytest.raises(RequestError, match="holds a token that structured_output does not allow"):
            grammar.after()


class TestMarker:
    @pytest.mark.parametrize("first", [0, 1, 2, 3])
    @pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
    def test_it_may_straddle_steps_and_drafts(
        self, letters: PreTrainedTokenizerBase, first: int, num_drafts: int
    ) -> None:
        grammar = Letters(letters, StructuredOutput(regex="ab", after="xyz"))
        text = "..xyzab"
        grammar.commit(text[: 2 + first])
        rest = text[2 + first :]
        expected = [None] * (3 - first) + ["a", "b", "$"]
        assert [grammar.after(rest[:n]) for n in range(len(rest) + 1)] == expected
        assert grammar.after("...") is None or first == 3
        grammar.commit(rest[:num_drafts])
        assert [grammar.after(rest[num_drafts:][:n]) for n in range(len(rest) - num_drafts + 1)] == expected[
            num_drafts:
        ]

    def test_rejected_drafts_of_the_marker_leave_no_trace(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(regex="ab", after="xyz"))
        assert grammar.after("xyza") == "b"
        grammar.commit("xyx")
        assert grammar.after() is None
        assert grammar.after("yz") == "a"

    @pytest.mark.parametrize("text", ["aab", "aaab", "aabaab", "ababaab", "aaaaab", "abaaabab"])
    def test_markers_that_overlap_themselves(self, letters: PreTrainedTokenizerBase, text: str) -> None:
        for marker in ("aab", "aabaab", "abaab", "abab", "aaab"):
            grammar = Letters(letters, StructuredOutput(regex="z", after=marker))
            for end in range(len(text) + 1):
                expected = "z" if text[:end].endswith(marker) else None
                assert grammar.after(text[:end]) == expected
                if expected:
                    break

    def test_it_may_be_token_ids_and_eos_before_it_is_free(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(regex="ab", after=[120, 121]))
        assert [grammar.after(drafts) for drafts in ("$", "x$", "xy")] == [None, None, "a"]
        assert grammar.state.forced_after([]) is None

    @pytest.mark.parametrize(
        ("written", "after"),
        [
            ("Hence ANSWER:", "ANSWER:"),
            ("ANSWER:", "ANSWER:"),
            ("x</think>", "</think>"),
            ("x.</think>", "</think>"),
            ("so be", "so b"),
            ("so<|im_start|>", "<|im_start|>"),
            ("日本", "本"),
        ],
    )
    def test_a_text_is_found_in_whatever_tokens_it_comes(
        self, tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler, written: str, after: str
    ) -> None:
        """Also where it begins or ends within a token, of which the rest is free."""
        state, begun = compiler.start(StructuredOutput(regex="[0-9]", after=after)), []
        for token_id in tokenizer.encode(written, add_special_tokens=False):
            begun.append(state.mask_after(()) is not None)
            state.commit([token_id])
        assert not any(begun)
        assert tokenizer.decode(ids(state.mask_after(()))) == "0123456789"

    def test_a_token_that_the_model_lacks(self, compiler: GrammarCompiler) -> None:
        with pytest.raises(RequestError, match=r"structured_output.after must be tokens of the model, below 49152"):
            compiler.check(StructuredOutput(regex="a", after=[VOCAB_SIZE]))


class TestVocabulary:
    def test_a_model_with_more_logits_than_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        compiler = GrammarCompiler(tokenizer, 49300, frozenset({2, 49299, 60000}))
        state = compiler.start(StructuredOutput(regex="(?s:.)*"))
        allowed = ids(state.mask_after(()))
        assert [token_id for token_id in allowed if token_id >= VOCAB_SIZE] == [49299]
        assert len(allowed) > 48000
        assert state.mask_after([49200]) is None
        assert state.mask_after([-1]) is None
        assert state.mask_after([10**9]) is None
        assert ids(state.mask_after([49299])) == [2, 49299]
        assert ids(state.mask_after(())) == allowed

    def test_a_model_with_fewer(self, letters: PreTrainedTokenizerBase) -> None:
        compiler = GrammarCompiler(letters, 100, frozenset({0}))
        assert ids(compiler.start(StructuredOutput(regex="[a-z]")).mask_after(())) == [97, 98, 99]
        with pytest.raises(RequestError, match=r"structured_output.regex cannot be followed: no token of the model"):
            compiler.check(StructuredOutput(regex="z"))
        state = compiler.start(StructuredOutput(regex="az"))
        state.commit([97])
        with pytest.raises(RequestError, match="structured_output cannot be followed: no token of the model goes on"):
            state.mask_after(())

    def test_eos_is_no_part_of_a_grammar(self, compiler: GrammarCompiler) -> None:
        state = compiler.start(StructuredOutput(grammar='start: "a" <|im_end|> "b"'))
        state.commit(ids(state.mask_after(())))
        with pytest.raises(RequestError, match="structured_output cannot be followed: no token of the model goes on"):
            state.mask_after(())

    def test_control_tokens_are_no_text(self, tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
        state = compiler.start(StructuredOutput(regex="(?s:.)+"))
        mask = state.mask_after(())
        assert mask is not None
        assert not mask[tokenizer.all_special_ids].any()
        assert not mask[list(tokenizer.added_tokens_decoder)].any()
        assert state.mask_after([1]) is None

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda t: GrammarCompiler(None, 256, frozenset({0})), "needs a tokenizer, and the checkpoint has none"),
            (lambda t: GrammarCompiler(t, 256, frozenset()), "needs an EOS token, and the checkpoint names none"),
            (lambda t: GrammarCompiler(SlowTokenizer(), 256, frozenset({0})), "cannot use this tokenizer, a SlowToken"),
        ],
    )
    def test_tokenizers_that_do_not_do(self, letters: PreTrainedTokenizerBase, make: Any, message: str) -> None:
        with pytest.raises(RequestError, match=f"structured_output {message}"):
            make(letters).check(StructuredOutput(regex="a"))


class SlowTokenizer(PreTrainedTokenizerBase):
    def __init__(self) -> None:
        """It is never used."""

    def __len__(self) -> int:
        return 256


class TestKinds:
    def test_choice(self, letters: PreTrainedTokenizerBase) -> None:
        grammar = Letters(letters, StructuredOutput(choice=["ab", "ab/c\n", "x.*", "ab"]))
        assert [grammar.after(drafts) for drafts in ("", "ab", "x", "x.", "x.*", "ab/c")] == [
            "ax",
            "$/",
            ".",
            "*",
            "$",
            "\n",
        ]

    @pytest.mark.parametrize("text", ['"\\', "\x00\x7f\r\t", "日本 é😀", "[a-z]{2}|^$", "/", "#\u2028"])
    def test_choices_are_literal(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        # A compiler of its own: a model that writes NUL may not have it as EOS.
        compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, frozenset({2}))
        state = compiler.start(StructuredOutput(choice=[text, "other"]))
        state.commit(tokenizer.encode(text, add_special_tokens=False))
        assert state.is_complete

    def test_gbnf_is_told_from_lark(self, letters: PreTrainedTokenizerBase) -> None:
        for grammar in ('start: "a" x?\nx: "::="', 'root ::= "a" x-y?\nx-y ::= "::="'):
            assert Letters(letters, StructuredOutput(grammar=grammar)).after("a") == "$:"

    def test_gbnf_escapes(self, tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
        state = compiler.start(
            StructuredOutput(grammar=r'root ::= "\u00e9\u0041" [\u4e00-\u9fff]+ "\U0001F600\\u00e9\x41"')
        )
        state.commit(tokenizer.encode("éA日本😀\\u00e9A", add_special_tokens=False))
        assert state.is_complete

    def test_keys_come_in_the_order_of_the_schema(self, tokenizer: PreTrainedTokenizerBase) -> None:
        compiler, rng = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS_IDS), random.Random(1)
        for order in (["b", "a", "c"], ["c", "b", "a"]):
            properties = {name: {"type": "null"} for name in order}
            schema = {"type": "object", "properties": properties, "required": order, "additionalProperties": False}
            spec = StructuredOutput(json_schema=schema, whitespace=False)
            assert list(json.loads(random_text(rng, compiler, spec, tokenizer))) == order

    @pytest.mark.parametrize("seed", range(2))
    def test_whatever_is_allowed_is_valid(
        self, tokenizer: PreTrainedTokenizerBase, compiler: GrammarCompiler, seed: int
    ) -> None:
        rng = random.Random(seed)
        value = json.loads(
            random_text(rng, compiler, StructuredOutput(json_schema=PERSON, whitespace=False), tokenizer)
        )
        assert list(value) == ["name", "kind", "scores", "home"]
        assert len(value["name"]) <= 12
        assert value["kind"] in ("poet", "engineer", "both")
        assert len(value["scores"]) == 3
        assert all(0 <= score <= 99 for score in value["scores"])
        assert re.fullmatch("[0-9]{5}", value["home"]["zip"])
        pattern = r"[a-c]{2,5}(é|日本){3}[0-9]?"
        assert re.fullmatch(pattern, random_text(rng, compiler, StructuredOutput(regex=pattern), tokenizer))


def random_text(
    rng: random.Random, compiler: GrammarCompiler, spec: StructuredOutput, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Any token that is allowed, one as likely as another, in blocks of drafts of which the first half is accepted."""
    state, output = compiler.start(spec), list[int]()
    while not state.is_complete:
        drafts: list[int] = []
        for _ in range(6):
            drafts.append(any_of(rng, state.mask_after(drafts)))
        state.commit(drafts[:3])
        output += drafts[:3]
        assert len(output) < 1000
    ends = [output.index(eos_id) for eos_id in EOS_IDS if eos_id in output]
    return tokenizer.decode(output[: min(ends, default=None)])  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": {"not": {}}}, 'json_schema cannot be followed: Unimplemented keys: ["not"]'),
        ({"json_schema": {"type": "strnig"}}, "json_schema cannot be followed: Invalid type: strnig"),
        ({"json_schema": {"$ref": "#/x"}}, "json_schema cannot be followed: Pointer '/x' does not exist"),
        ({"json_schema": {"$ref": "#"}}, "json_schema cannot be followed: no text fits it"),
        ({"json_schema": {"$ref": "http://a.b/c"}}, "json_schema cannot be followed: Resource 'http://a.b/c' is not"),
        ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "minimum (5) is greater than maximum (3)"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "json_schema cannot be followed: recursion limit"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema cannot be followed"),
        ({"json_schema": {"pattern": "(?=a)", "type": "string"}}, "look-around, including look-ahead"),
        ({"regex": "[a"}, "regex cannot be followed: at 1(8): invalid regex"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, "regex cannot be followed: no text fits it"),
        ({"regex": "(" * 7_000 + "a" + ")" * 7_000}, "regex cannot be followed: at 1(8)"),
        ({"grammar": "start: foo"}, 'grammar cannot be followed: at 1(8): unknown name: "foo"'),
        ({"grammar": 'foo: "a"'}, "grammar cannot be followed: no start rule found"),
        ({"grammar": "start: start"}, "grammar cannot be followed: no text fits it"),
        ({"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000}, "grammar cannot be followed"),
        ({"grammar": 'foo ::= "a"'}, "grammar is not valid GBNF: No 'root' rule found"),
        ({"grammar": "root ::= foo"}, "grammar is not valid GBNF: Rule 'foo' not found"),
        ({"grammar": r'root ::= "\ud800"'}, "grammar is not valid GBNF: 'utf-8' codec can't encode"),
        ({"grammar": "root ::= " + "(" * 10_000}, "grammar is nested too deeply"),
    ],
)
def test_what_cannot_be_followed_is_named(compiler: GrammarCompiler, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        compiler.check(StructuredOutput(**settings))
    assert str(caught.value).startswith(f"structured_output.{next(iter(settings))} ")
    assert len(str(caught.value)) < 400


def test_a_grammar_that_becomes_too_complex_fails_its_request_only(compiler: GrammarCompiler) -> None:
    kinds = range(60)
    rules = [f'y{kind}: "a" | "a" x' for kind in kinds]
    ambiguous = StructuredOutput(
        grammar="\n".join(["start: x", f"x: x x | {' | '.join(f'y{k}' for k in kinds)}", *rules])
    )
    state = compiler.start(ambiguous)
    state.commit([81] * 200)  # never raises: the next mask does
    assert not state.is_complete
    with pytest.raises(RequestError, match="structured_output cannot be followed: "):
        state.mask_after(())
    assert compiler.start(ambiguous).mask_after(()) is not None


def test_compiled_grammars_are_shared_and_their_number_is_bounded(letters: PreTrainedTokenizerBase) -> None:
    compiler = GrammarCompiler(letters, 256, frozenset({0}))
    first = compiler.start(StructuredOutput(regex="a"))
    second = compiler.start(StructuredOutput(regex="a", after="x"))
    assert len(compiler._compiled) == 1
    first.commit([97])
    assert first.is_complete
    assert ids(second.mask_after([120])) == [97]
    for number in range(MAX_COMPILED + 5):
        compiler.check(StructuredOutput(regex=f"a{number}"))
    assert len(compiler._compiled) == MAX_COMPILED
