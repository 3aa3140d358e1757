"""Reading prompts with the built-in tokenizer and with one of bytes."""

from __future__ import annotations

from typing import Any

import pytest
from byte_models import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft.errors import RequestError
from foredraft.models.builtin import builtin_checkpoint
from foredraft.server.prompts import PromptReader

USER = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}{{ who }}>{% endif %}"
)


@pytest.fixture(scope="module")
def builtin() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin_checkpoint())
    return tokenizer


@pytest.fixture(scope="module")
def reader(builtin: PreTrainedTokenizerBase) -> PromptReader:
    return PromptReader(builtin, 2048)


def byte_reader(template: Any = TOOLS_TEMPLATE, max_model_len: int = 1024) -> PromptReader:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return PromptReader(tokenizer, max_model_len)


def written(reader: PromptReader, messages: list[dict[str, Any]], **options: Any) -> str:
    return bytes(reader.chat(messages, **options)).decode()


def test_prompts_are_those_of_the_tokenizer(reader: PromptReader, builtin: PreTrainedTokenizerBase) -> None:
    assert reader.encode("Hello, world") == builtin("Hello, world")["input_ids"]
    messages = [{"role": "system", "content": "Be kind."}, USER]
    wanted: Any = builtin.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert reader.chat(messages) == wanted
    assert reader.decode(wanted).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_it_has_a_tokenizer_of_its_own() -> None:
    tokenizer = byte_tokenizer()
    reader = PromptReader(tokenizer, 64)
    tokenizer.add_tokens(["Hello"])
    assert tokenizer("Hello")["input_ids"] == [256]
    assert reader.encode("Hello") == list(b"Hello")


def test_a_text_comes_back(reader: PromptReader) -> None:
    text = "Příliš žluťoučký kůň 漢字 👩‍👩‍👧 end"
    assert reader.decode(reader.encode(text)) == text
    assert reader.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"
    assert reader.decode([1, 2], skip_special_tokens=True) == ""
    assert reader.encode("") == []


@pytest.mark.parametrize("text", ["Hello world\n", "漢字 👩‍👩‍👧", "Příliš  žluťoučký", "<|im_end|>x"])
def test_the_bytes_of_tokens_make_up_the_text(reader: PromptReader, text: str) -> None:
    for one in (reader, byte_reader()):
        assert b"".join(map(one.token_bytes, one.encode(text))) == text.encode()


def test_bytes_that_are_no_character(reader: PromptReader) -> None:
    one = byte_reader()
    assert [one.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert one.token_text(0xF0) == "\N{REPLACEMENT CHARACTER}"
    assert one.token_text(ord("a")) == "a"
    assert one.token_bytes(10**9) == b""
    assert reader.token_text(2) == "<|im_end|>"


def test_bytes_of_a_tokenizer_with_byte_fallback() -> None:
    vocab = {"<unk>": 0, "<0xF0>": 1, "▁a": 2, "é": 3, "▁▁": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    reader = PromptReader(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 64)  # type: ignore[no-untyped-call]
    assert [reader.token_bytes(index) for index in range(1, 5)] == [b"\xf0", b" a", "é".encode(), b"  "]


def test_messages_become_what_templates_expect() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "assistant", "content": "x", "tool_calls": None},
    ]
    found = written(byte_reader(), messages, template_kwargs={"who": "me"})
    assert found == 'system:a\nb;assistant:f{"a": [1]};tool:t;assistant:x;me>'
    assert messages[1]["tool_calls"] == [CALL]
    assert CALL["function"] == {"name": "f", "arguments": '{"a": [1]}'}


def test_a_template_that_knows_developers_sees_them() -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}D{% else %}?{% endif %}{% endfor %}"
    assert written(byte_reader(template), [{"role": "developer", "content": "x"}]) == "D"


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ("{", '"{"'), ("[1]", '"[1]"'), ("3", '"3"')])
def test_arguments_that_are_no_object_stay_text(arguments: str, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert written(byte_reader(), messages, add_generation_prompt=False) == f"assistant:f{shown};"


def test_a_final_message_is_continued(reader: PromptReader) -> None:
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    found = reader.decode(reader.chat(messages, add_generation_prompt=False, continue_final_message=True))
    assert found.endswith("<|im_start|>assistant\nWell, ")
    with pytest.raises(RequestError, match=r"^messages must end with one that has content"):
        reader.chat([USER, {"role": "assistant", "content": ""}], continue_final_message=True)


def test_tools_are_shown_or_refused(reader: PromptReader) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert byte_reader().supports_tools
    assert '"name": "f"' in written(byte_reader(), [USER], tools=[tool])
    assert not reader.supports_tools
    assert not byte_reader("tools {# tools #}{{ 'tools' }}").supports_tools
    assert not byte_reader("{% broken").supports_tools
    with pytest.raises(RequestError, match=r"^tools cannot be shown"):
        reader.chat([USER], [tool])


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_reserved_variables_are_refused(reader: PromptReader, name: str) -> None:
    with pytest.raises(RequestError, match=f"^chat_template_kwargs must not hold {name}"):
        reader.chat([USER], template_kwargs={name: "x"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{% broken",
        "{{ messages[5].content.x }}",
        "{{ nothing() }}",
        "{{ messages[0]['content'] + 3 }}",
        {"other": "x"},
    ],
)
def test_a_template_that_fails(template: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages ") as caught:
        byte_reader(template).chat([USER])
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "messages",
    [[], [{}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [3]}]],
)
def test_bad_messages(reader: PromptReader, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match=r"^messages "):
        reader.chat(messages)


def test_texts_that_are_refused(reader: PromptReader) -> None:
    with pytest.raises(RequestError, match=r"^prompt must be valid Unicode"):
        reader.encode("\ud800")
    with pytest.raises(RequestError, match=r"^messages must be valid Unicode"):
        reader.chat([{"role": "user", "content": "\ud800"}])
    with pytest.raises(RequestError, match=r"^prompt has 1000000 characters; max_model_len=2048 leaves room"):
        reader.encode("x" * 1_000_000)
    with pytest.raises(RequestError, match=r"^messages has"):
        reader.chat([{"role": "user", "content": "x" * 1_000_000}])
    with pytest.raises(RequestError, match=r"^tokens cannot be decoded"):
        reader.decode([2**70])


def test_a_text_that_fits_is_never_refused() -> None:
    longest = byte_reader(max_model_len=8)
    assert len(longest.encode("x" * 8)) == 8
    assert len(longest.encode("x" * 512)) == 512  # the engine says how many tokens there are
    with pytest.raises(RequestError, match="512 at most"):
        longest.encode("x" * 513)


def test_without_a_tokenizer_or_a_template() -> None:
    none = PromptReader(None, 64)
    assert not none.supports_tools
    assert not none.has_chat_template
    with pytest.raises(RequestError, match=r"^prompt cannot be read.*no tokenizer"):
        none.encode("x")
    with pytest.raises(RequestError, match=r"^messages cannot be read.*no tokenizer"):
        none.chat([USER])
    with pytest.raises(RequestError, match=r"^tokens cannot be read"):
        none.decode([1])
    with pytest.raises(RequestError, match=r"^messages need a chat template"):
        byte_reader(None).chat([USER])
