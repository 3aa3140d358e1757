"""Tokens make the text that they make all at once, whole characters at a time, and at a cost that does not grow."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from foredraft.engine.detokenizer import Detokenizer
from foredraft.models.builtin import builtin_checkpoint

BROKEN = "\ufffd"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three people in one picture, by joiners
FLAGS = "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5"
MARKS = "e\u0301o\u0308\u0323"
TEXTS = ["plain", "h\u00e9llo", "\u65e5\u672c\u8a9e", FAMILY, FLAGS, MARKS, " a  b\n\n", f"x {FAMILY}{MARKS} y"]

WORDS = ["<unk>", "<s>", "a", "\u2581", "\u2581\u2581", "\u2581b", "c", "\u2581d\u2581", ".", "\u65e5", "\u2581\u00e9"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def byte_level(*chunks: bytes) -> PreTrainedTokenizerFast:
    """Tokens 0 to 255 are single bytes, those after them are chunks."""
    alphabet = bytes_to_unicode()  # type: ignore[no-untyped-call]
    words = ["".join(alphabet[byte] for byte in chunk) for chunk in [*(bytes([i]) for i in range(256)), *chunks]]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer, additional_special_tokens=["<|a|>", "<|b|>"])


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _fast(tokenizer, unk_token="<unk>", bos_token="<s>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS + BYTES)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(tokenizer, unk_token="<unk>", bos_token="<s>")


@functools.cache
def word_piece() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[SEP]", "a", "##b", "c", ".", "##\u65e5", "n't"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _fast(tokenizer, unk_token="[UNK]", sep_token="[SEP]")


@functools.cache
def word_ends() -> PreTrainedTokenizerFast:
    words = ["a", "b</w>", "c", ".</w>", "</w>", "<unk>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return _fast(tokenizer, unk_token="<unk>")


def _fast(tokenizer: Tokenizer, **special: Any) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.add_special_tokens(special)
    fast.add_tokens(["<added>"])
    return fast


@functools.cache
def builtin() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin_checkpoint())
    return tokenizer


CHUNKS = byte_level(b" \xe6", b"\x97\xa5", b"\xa5a", b"\xf0\x9f", b"\x98\x80 b", b"ab", b"\xc3\xa9", b"\xbf\xbd")
CONSISTENT: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte level": lambda: CHUNKS,
    "metaspace": metaspace,
    "word pieces": word_piece,
    "word ends": word_ends,
    "built in": builtin,
}


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip: bool = True) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def stream(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], context: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """The text that each token completes, and that of the flush."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, context=context)
    pieces = [detokenizer.add([token_id], [0]) for token_id in token_ids] + [detokenizer.flush()]
    texts = ["".join(piece.text for piece in some) for some in pieces]
    assert "".join(texts) == detokenizer.text
    assert detokenizer.flush() == []
    return texts


@pytest.mark.parametrize("kind", CONSISTENT)
@given(data=st.data())
def test_any_tokens_make_the_text_that_they_make_at_once(kind: str, data: st.DataObject) -> None:
    """Ids that the tokenizer does not know too: a model may have more of them."""
    tokenizer = CONSISTENT[kind]()
    some = st.integers(0, len(tokenizer) + 2)
    few = st.sampled_from(data.draw(st.lists(some, min_size=1, max_size=4)))
    token_ids = data.draw(st.lists(some, max_size=60) | st.lists(few, max_size=150))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, token_ids, skip=skip)) == decode(tokenizer, token_ids, skip)


@pytest.mark.parametrize("kind", CONSISTENT)
@given(data=st.data())
def test_text_goes_on_after_a_prompt(kind: str, data: st.DataObject) -> None:
    """Wherever the prompt ends with a whole character."""
    tokenizer = CONSISTENT[kind]()
    some = st.lists(st.integers(0, len(tokenizer) - 1), max_size=20)
    prompt, token_ids, skip = data.draw(some), data.draw(some), data.draw(st.booleans())
    before = decode(tokenizer, prompt, skip)
    recent = decode(tokenizer, prompt[-8:], skip)
    if BROKEN not in before[-1:] and (recent.strip() or recent == before):
        assert before + "".join(stream(tokenizer, token_ids, prompt, skip)) == decode(
            tokenizer, prompt + token_ids, skip
        )


@given(st.lists(st.sampled_from([*WORDS[2:], "\u00e9", "\u672c", "\U0001f600"]), max_size=40), st.integers(0, 40))
def test_text_with_byte_fallback(words: list[str], cut: int) -> None:
    """Whole characters in bytes, in the prompt or not."""
    tokenizer = byte_fallback()
    numbers = [
        [WORDS.index(word)] if word in WORDS else [len(WORDS) + byte for byte in word.encode()] for word in words
    ]
    prompt, token_ids = list(chain(*numbers[:cut])), list(chain(*numbers[cut:]))
    before, text = decode(tokenizer, prompt), "".join(stream(tokenizer, token_ids, prompt))
    assert before + text == decode(tokenizer, prompt + token_ids)


@given(st.lists(st.integers(2, len(WORDS) + 255), max_size=100))
def test_wrong_bytes_with_byte_fallback_break_no_text_around_them(token_ids: list[int]) -> None:
    tokenizer = byte_fallback()
    text = "".join(stream(tokenizer, token_ids))
    words = [WORDS[token_id].replace("\u2581", " ") for token_id in token_ids if token_id < len(WORDS)]
    rest = text
    for word in words:
        assert word.strip() in rest
        rest = rest[rest.index(word.strip()) + len(word.strip()) :]
    assert len(text) <= sum(map(len, words)) + len(token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_each_character_comes_with_the_token_that_completes_it(text: str) -> None:
    assert stream(CHUNKS, list(text.encode()))[:-1] == [
        text[len(text.encode()[:end].decode(errors="ignore")) :][:1] if _is_last_byte(text, end) else ""
        for end in range(len(text.encode()))
    ]
    token_ids = builtin()(text)["input_ids"]
    assert not any(BROKEN in piece for piece in stream(builtin(), token_ids))


def _is_last_byte(text: str, position: int) -> bool:
    data = text.encode()
    return position + 1 == len(data) or data[position + 1] & 0xC0 != 0x80


def test_the_whole_part_of_a_token_does_not_wait_for_the_rest() -> None:
    tokenizer = byte_level(b"x \xe6", b"\x97\xa5y")
    assert stream(tokenizer, [256, 257]) == ["x ", "\u65e5y", ""]


def test_pieces_carry_the_depth_of_their_token() -> None:
    detokenizer = Detokenizer(CHUNKS, skip_special_tokens=True)
    pieces = detokenizer.add([*"a\u00e9b\u65e5".encode()[:5]], [1, 2, 3, 4, 5]) + detokenizer.flush()
    assert [(piece.text, piece.depth) for piece in pieces] == [("a", 1), ("\u00e9", 3), ("b", 4), (BROKEN, 5)]


@pytest.mark.parametrize("make", [metaspace, byte_fallback])
def test_the_space_of_the_first_token_stays_after_a_prompt(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    b = WORDS.index("\u2581b")
    assert "".join(stream(make(), [b, b])) == "b b"
    assert "".join(stream(make(), [b, b], context=[WORDS.index("c")])) == " b b"
    assert "".join(stream(make(), [b, b], context=[1])) == "b b"  # <s> is no text
    assert "".join(stream(make(), [b, b], context=[2, 1, 1])) == " b b"


@pytest.mark.parametrize("base", [0, len(WORDS)])
@pytest.mark.parametrize("before", ["", "a", "\u65e5" * 5, "\U0001f600\u00e9" * 4])
@pytest.mark.parametrize("character", ["\u00e9", "\u65e5", "\U0001f600"])
def test_a_character_that_the_prompt_began(base: int, before: str, character: str) -> None:
    tokenizer = byte_fallback() if base else CHUNKS
    a = WORDS.index("a") if base else ord("a")
    start = [base + byte for byte in before.encode()]
    whole = [base + byte for byte in character.encode()]
    for cut in range(1, len(whole)):
        prompt = start + whole[:cut]
        assert "".join(stream(tokenizer, [*whole[cut:], a, *whole], prompt)) == f"{character}a{character}"
        assert "".join(stream(tokenizer, [a, *whole], prompt)) == f"a{character}"
        assert "".join(stream(tokenizer, [], prompt)) == ""


@pytest.mark.parametrize("prompt", [[0xFF] * 20, [0x97] * 20, [0xFF, 0xE6] * 10, [10**6] * 20])
def test_any_prompt_will_do(prompt: list[int]) -> None:
    assert "".join(stream(CHUNKS, list(b"abc"), prompt)) == "abc"


def test_a_replacement_character_in_the_text_does_not_hold_it_back() -> None:
    texts = stream(CHUNKS, [*BROKEN.encode(), *b"ab"])
    assert texts == ["", "", "", f"{BROKEN}a", "b", ""]
    assert "".join(stream(CHUNKS, list(BROKEN.encode()) * 9)[:-1]) == BROKEN * 6


class Counting:
    """A tokenizer that notes how many tokens each call gets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.sizes.append(len(token_ids))
        return str(self._tokenizer.decode(token_ids, **options))


SEP = int(CHUNKS.convert_tokens_to_ids("<|a|>"))  # type: ignore[arg-type]
STREAMS: dict[str, list[int]] = {
    "words": [ord("a"), ord(" ")],
    "characters": list("\u65e5\u672c".encode()),
    "never a character": [0xFF],
    "lead bytes": [0xE6],
    "continuation bytes": [0x97],
    "all but whole": [0xF0, 0x9F, 0x98],
    "replacement characters": list(BROKEN.encode()),
    "nothing shown": [SEP],
    "unknown ids": [10**6],
    "bytes and nothing": [0xE6, SEP, SEP, 0xFF, SEP],
    "all begin before a character ends": [256, 256, 257],
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("tokenizer", [CHUNKS, byte_level(b"x\xe6", b"\x97\xa5 \xe6"), byte_fallback()])
def test_no_call_of_the_tokenizer_gets_many_tokens(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    length = 5000
    token_ids = (STREAMS[name] * length)[:length]
    if tokenizer is byte_fallback():
        token_ids = [len(WORDS) + token_id if token_id < 256 else 1 for token_id in token_ids]
    counting: Any = Counting(tokenizer)
    detokenizer = Detokenizer(counting, skip_special_tokens=True, context=token_ids)
    detokenizer.add(token_ids, [0] * length)
    assert max(counting.sizes) <= 100
    assert len(counting.sizes) <= 4 * length
    held = "".join(piece.text for piece in detokenizer.flush())
    assert len(held) <= 3
    counting.sizes.clear()


def test_usual_text_costs_little() -> None:
    token_ids = builtin()("It was the best of times, it was the worst of times. " * 40)["input_ids"]
    counting: Any = Counting(builtin())
    Detokenizer(counting, skip_special_tokens=True).add(token_ids, [0] * len(token_ids))
    assert sum(counting.sizes) <= 8 * len(token_ids)


def test_long_streams_of_any_bytes() -> None:
    chance = random.Random(0)
    for high in (0x80, 0xC0, 0x100):
        token_ids = [chance.randrange(0x80 if high > 0x80 else 0, high) for _ in range(3000)]
        assert "".join(stream(CHUNKS, token_ids)) == decode(CHUNKS, token_ids)


def test_no_token_ends_with_a_whole_character() -> None:
    tokenizer = byte_level(b"x\xe6", b"\x97\xa5 \xe6")
    texts = stream(tokenizer, [256, *[257] * 500])
    assert texts == ["x", *["\u65e5 "] * 500, BROKEN]


@pytest.mark.parametrize("count", [1, 30, 1000])
def test_text_goes_on_after_many_tokens_that_show_nothing(count: int) -> None:
    c, b = WORDS.index("c"), WORDS.index("\u2581b")
    assert "".join(stream(metaspace(), [c, *[1] * count, b])) == "c b"
    first, second, third = ([byte, *[SEP] * count] for byte in "\u65e5".encode())
    assert "".join(stream(CHUNKS, [*first, *second, *third])) == "\u65e5"
