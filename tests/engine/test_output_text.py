"""The text of a request is the same however its characters are grouped into tokens, and ends at a stop string."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from foredraft.engine.output_text import OutputText
from foredraft.models.builtin import builtin_checkpoint

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three people in one picture, by joiners
ALPHABET = ["a", "b", " ", "\n", "\u00e9", "e\u0301", "\u65e5", "\U0001f1e9", FAMILY, "\u200d"]
FEW = ["a", "b"]


def byte_level(words: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """Each word is a token, and `<|sep|>` a special one with the last id."""
    alphabet = bytes_to_unicode()  # type: ignore[no-untyped-call]
    tokens = ["".join(alphabet[byte] for byte in word) for word in words]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.add_special_tokens({"additional_special_tokens": ["<|sep|>"]})
    return fast


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    words = ["a", "b", "\u2581a", "\u2581b", "\u2581", "ab", "\u2581a\u2581", "\u65e5"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


@functools.cache
def builtin() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin_checkpoint())
    return tokenizer


def output_text(
    tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = (), prompt: Sequence[int] = (), **options: Any
) -> OutputText:
    options = {"skip_special_tokens": True, **options}
    return OutputText(tokenizer, prompt_token_ids=prompt, stop=tuple(stop), **options)


def of_words(*words: str | bytes, stop: Sequence[str], **options: Any) -> tuple[OutputText, int | None]:
    """The text of tokens that are these words, all in one block."""
    each = [word.encode() if isinstance(word, str) else word for word in words]
    vocabulary = sorted(set(each))
    text = output_text(byte_level(vocabulary), stop, **options)
    return text, text.add([vocabulary.index(word) for word in each], [0] * len(each))


def expected(texts: Sequence[str], stop: Sequence[str], include: bool, min_tokens: int) -> tuple[str, int | None]:
    """What comes out if token k makes texts[k]: read one character after the other, and look at all of the text."""
    text = ""
    for num_tokens, characters in enumerate(texts, 1):
        for character in characters:
            text += character
            complete = [len(string) for string in stop if text.endswith(string)]
            if complete and num_tokens > min_tokens:
                return (text if include else text[: -max(complete)]), num_tokens
    return text, None


def held_tail(text: str, stop: Sequence[str]) -> str:
    tails = (text[start:] for start in range(len(text)))
    return next((tail for tail in tails if any(s.startswith(tail) and s != tail for s in stop)), "")


def check_against_expected(
    data: st.DataObject, tokenizer: PreTrainedTokenizerBase, token_ids: list[int], texts: list[str], stop: list[str]
) -> None:
    """Stream the tokens in blocks, and compare all that comes out, and when."""
    include, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 4) | st.just(0))
    end, count = expected(texts, stop, include, min_tokens)
    text = output_text(tokenizer, stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    shown, depths, num_tokens, stays = "", list[int](), 0, None
    while num_tokens < len(token_ids) and stays is None:
        block = slice(num_tokens, num_tokens + data.draw(st.integers(1, 5)))
        stays = text.add(token_ids[block], range(len(token_ids))[block])
        pieces = text.take_pieces()
        shown += "".join(piece.text for piece in pieces)
        depths += [piece.depth for piece in pieces for _ in piece.text]
        assert end.startswith(shown)
        assert text.text == shown
        if stays is None:
            num_tokens += len(token_ids[block])
            so_far = "".join(texts[:num_tokens])
            assert shown == so_far.removesuffix(held_tail(so_far, stop))
    assert (None if stays is None else num_tokens + stays) == count
    text.flush()
    pieces = text.take_pieces()
    shown += "".join(piece.text for piece in pieces)
    depths += [piece.depth for piece in pieces for _ in piece.text]
    assert text.text == shown
    assert shown == end
    assert depths == [index for index, some in enumerate(texts) for _ in some][: len(end)]


def strings(alphabet: Sequence[str], least: int, most: int) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(alphabet), min_size=least, max_size=most).map("".join)


def stop_strings(alphabet: Sequence[str], text: str) -> st.SearchStrategy[list[str]]:
    """Of the text, and others."""
    places = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6))
    parts = places.map(lambda place: text[place[0] : sum(place)]).filter(bool)
    return st.lists((parts if text else st.nothing()) | strings(alphabet, 1, 4), max_size=4)


@given(st.data())
def test_any_bytes_in_a_token(data: st.DataObject) -> None:
    alphabet = data.draw(st.sampled_from([ALPHABET, FEW]))
    whole = data.draw(strings(alphabet, 0, 14))
    stop = data.draw(stop_strings(alphabet, whole))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(whole.encode()), 2) - 1))))
    words = [whole.encode()[start:end] for start, end in zip([0, *cuts], [*cuts, None])]
    vocabulary = sorted({word for word in words if word})
    token_ids = [vocabulary.index(word) for word in words if word]
    decoder = codecs.getincrementaldecoder("utf-8")()
    texts = [decoder.decode(vocabulary[token_id]) for token_id in token_ids]
    check_against_expected(data, byte_level(vocabulary), token_ids, texts, stop)


@given(st.data())
def test_tokens_that_begin_with_a_space(data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 7), max_size=20))
    wholes = [str(metaspace().decode(token_ids[:end])) for end in range(len(token_ids) + 1)]
    texts = [after[len(before) :] for before, after in pairwise(wholes)]
    stop = data.draw(stop_strings(["a", "b", " "], wholes[-1]))
    check_against_expected(data, metaspace(), token_ids, texts, stop)


@given(st.data())
def test_tokens_of_the_builtin_model(data: st.DataObject) -> None:
    whole = data.draw(strings(["The ", "end", ".", "\n\n", " user", "caf\u00e9", FAMILY, "\u65e5\u672c", "  "], 0, 10))
    stop = data.draw(stop_strings(["end", ".", "\n", " us"], whole))
    token_ids: list[int] = builtin()(whole)["input_ids"]
    decoder = codecs.getincrementaldecoder("utf-8")()
    alphabet = bytes_to_unicode()  # type: ignore[no-untyped-call]
    back = {character: byte for byte, character in alphabet.items()}
    tokens = [builtin().convert_ids_to_tokens(token_id) for token_id in token_ids]
    texts = [decoder.decode(bytes(back[character] for character in token)) for token in tokens]
    check_against_expected(data, builtin(), token_ids, texts, stop)


# -- stop strings ------------------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens() -> None:
    for words in (["ka", "ta", " r", "i"], ["k", "ata ", "rix"], ["kata ri", "no"], ["kat", "a", " ", "r", "i", "z"]):
        text, count = of_words(*words, stop=["ta ri"])
        assert (text.text, count) == ("ka", next(n for n in range(5) if "ri" in "".join(words[: n + 1])) + 1)


def test_the_first_half_came_with_an_earlier_block() -> None:
    vocabulary = [b"ka", b"ta", b" r", b"i"]
    for cut in range(1, 4):
        text = output_text(byte_level(vocabulary), ["ta ri"])
        assert text.add(range(cut), [1] * cut) is None
        assert "".join(piece.text for piece in text.take_pieces()) == "ka"
        assert text.add(range(cut, 4), [2] * (4 - cut)) == 4 - cut
        assert text.take_pieces() == ()
        assert text.text == "ka"


@pytest.mark.parametrize("position", range(8))
def test_a_stop_at_each_position_of_a_block(position: int) -> None:
    words = list("abcdefgh")
    text, count = of_words(*words, stop=[words[position]])
    assert (text.text, count) == ("abcdefgh"[:position], position + 1)
    text, count = of_words(*words, stop=[words[position]], include_stop_str_in_output=True)
    assert (text.text, count) == ("abcdefgh"[: position + 1], position + 1)


def test_what_its_token_brings_after_the_stop_string_is_dropped() -> None:
    text, count = of_words("one", " END two", " three", stop=["END"])
    assert (text.text, count) == ("one ", 2)
    text, count = of_words("one", " END two", " three", stop=["END"], include_stop_str_in_output=True)
    assert (text.text, count) == ("one END", 2)


@pytest.mark.parametrize(
    ("stop", "rest"),
    [
        (["cd", "bcd", "d"], "a"),  # complete at once: the longest
        (["bcde", "c"], "ab"),  # the one that is complete first, though the other begins before it
        (["abcdef", "de"], "abc"),
        (["abc", "abcd"], ""),
        (["x", "bx", "abcx"], None),
    ],
)
def test_of_several_stop_strings_the_first_to_be_complete(stop: list[str], rest: str | None) -> None:
    for words in (["abcdef"], list("abcdef"), ["abc", "def"]):
        text, count = of_words(*words, stop=stop)
        assert (text.text if count else None) == rest


def test_a_beginning_that_does_not_go_on() -> None:
    text, count = of_words("\n", "a", "\n", stop=["\n\n"])
    assert (text.text, count) == ("\na", None)
    text.flush()
    assert text.text == "\na\n"
    assert of_words("a", "\n", "\n", "b", stop=["\n\n"])[1] == 3
    text, count = of_words(*"aabaabaaac", stop=["aabaaac"])
    assert (text.text, count) == ("aab", 10)


def test_held_back_text_keeps_its_depths() -> None:
    text = output_text(byte_level([b"xa", b"b", b"c"]), ["abcd", "cc"])
    shown = []
    for token_id, depth in [(0, 1), (1, 2), (2, 3), (1, 4)]:
        text.add([token_id], [depth])
        shown.append([(piece.text, piece.depth) for piece in text.take_pieces()])
    assert shown == [[("x", 1)], [], [], [("a", 1), ("b", 2), ("c", 3), ("b", 4)]]


def test_the_first_tokens_do_not_stop() -> None:
    for min_tokens, count, rest in [(0, 2, "a"), (1, 2, "a"), (2, 4, "aba"), (3, 4, "aba"), (4, None, "abab")]:
        text, stays = of_words(*"abab", stop=["b"], min_tokens=min_tokens)
        text.flush()
        assert (text.text, stays) == (rest, count)
    # Begun by one of them, complete after them; and one that overlaps an ignored one.
    assert of_words(*"abc", stop=["abc"], min_tokens=2)[1] == 3
    text, stays = of_words(*"xaaa", stop=["aa"], min_tokens=3)
    assert (text.text, stays) == ("xa", 4)


def test_the_prompt_is_not_searched() -> None:
    tokenizer = byte_level([b"a", b"b"])
    text = output_text(tokenizer, ["ab"], prompt=[0, 1, 0])
    assert text.add([1, 0, 1], [0] * 3) == 3
    assert text.text == "b"


def test_the_text_goes_on_after_the_prompt() -> None:
    """With the space that its first token begins with, and that can belong to a stop string."""
    for prompt, rest in (([], "b"), ([0], " b")):
        text = output_text(metaspace(), prompt=prompt)
        text.add([3], [0])
        assert text.text == rest
        assert output_text(metaspace(), [" b"], prompt=prompt).add([3], [0]) == (1 if prompt else None)


def test_a_stop_string_of_characters_in_several_tokens() -> None:
    sun = "\u65e5".encode()
    for include, rest in ((False, "a"), (True, "a\u65e5")):
        text, count = of_words(
            "a", *(bytes([b]) for b in sun), "b", stop=["\u65e5"], include_stop_str_in_output=include
        )
        assert (text.text, count) == (rest, 4)
    text, count = of_words("a", FAMILY, stop=["\u200d"])
    assert (text.text, count) == ("a\U0001f468", 2)
    text, count = of_words(b"a\xe6", b"\x97\xa5", stop=["a"])
    assert (text.text, count) == ("", 1)  # the token that brings the character, though it also begins another


def test_stop_strings_are_looked_for_in_the_text_as_it_is_shown() -> None:
    tokenizer = byte_level([b"a", b"b"])
    for skip, stop, rest, count in ((True, "ab", "", 3), (False, "ab", "a<|sep|>b", None), (False, "<|sep|>", "a", 2)):
        text = output_text(tokenizer, [stop], skip_special_tokens=skip)
        assert text.add([0, 2, 1], [0] * 3) == count
        text.flush()
        assert text.text == rest


def test_after_the_end_nothing_is_taken() -> None:
    text, count = of_words("a", "b", b"\xe6", stop=["b"])
    text.flush()
    assert text.add([0, 1], [0, 0]) == 0
    text.flush()
    assert (text.text, count, [piece.text for piece in text.take_pieces()]) == ("a", 2, ["a"])


def test_an_unfinished_character_at_the_end() -> None:
    text, count = of_words("ab", b"\xe6", stop=["abc"])
    assert (text.text, count) == ("", None)
    text.flush()
    assert text.text == "ab\ufffd"


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = output_text(None, prompt=[1, 2])
    assert text.add([1, 2], [0, 0]) is None
    text.flush()
    assert (text.text, text.take_pieces()) == ("", ())


def test_what_is_kept_does_not_grow() -> None:
    """Thousands of tokens that nearly complete a stop string."""
    tokenizer = byte_level([b"a", b"b"])
    text = output_text(tokenizer, ["a" * 50 + "b", "ba" * 30 + "c"], min_tokens=5000)
    for index in range(5000):
        assert text.add([index % 51 == 50], [0]) is None
        assert sum(len(piece.text) for piece in text._held) <= 60
        text.take_pieces()
    text.flush()
    assert text.text == (("a" * 50 + "b") * 100)[:5000]
