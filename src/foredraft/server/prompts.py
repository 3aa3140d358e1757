"""From texts and conversations to token ids, and from tokens to their texts and bytes."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

from foredraft.engine.media_reader import MediaReader
from foredraft.errors import RequestError, described

MIN_LONGEST_TOKEN = 64
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""How tokenizers of the SentencePiece kind write a space."""


class PromptReader:
    """Reads prompts with a tokenizer of its own, a copy: the engine's is in use in another thread.

    Not thread-safe: one thread at a time may call it. Every failure of the tokenizer or of the chat template is a
    RequestError that begins with the field's name (prompt, messages, tools, tokens).

    A text is refused unread if it has more characters than max_model_len tokens of the longest text in the vocabulary
    (of at least 64 characters) could have. media: reads what is shown, for a model that does not take text only.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int, media: MediaReader | None = None
    ) -> None:
        self.media = media
        self._tokenizer = copy.deepcopy(tokenizer)
        self._bytes: dict[int, bytes] = {}
        if self._tokenizer is None:
            return
        vocabulary = self._tokenizer.get_vocab()
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * max(MIN_LONGEST_TOKEN, max(map(len, vocabulary), default=0))
        self._added = {int(token_id): token.content for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        self._tokens = {token_id: token for token, token_id in vocabulary.items()}
        self._byte_of = _byte_letters() if "ByteLevel" in _decoders(self._tokenizer) else None

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be read."""
        return self._tokenizer is not None and bool(self._tokenizer.chat_template)

    @cached_property
    def chat_template(self) -> str | None:
        """The template for conversations that have tools, if there is one."""
        return self._template([{}]) if self.has_chat_template else None

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        if self._tokenizer is None:
            return {}
        known = self._tokenizer.added_tokens_decoder.items()
        return {token.content: int(token_id) for token_id, token in known if token.special}

    @cached_property
    def supports_tools(self) -> bool:
        """Whether the chat template writes tools."""
        if not self.has_chat_template:
            return False
        try:
            parts = list(Environment().lex(self._template([{}])))
        except (RequestError, TemplateError):
            return False
        return any(kind == "name" and value == "tools" for _, kind, value in parts)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Raises RequestError."""
        return self._encode("prompt", text, add_special_tokens=add_special_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, as the chat template writes it. Raises RequestError.

        Messages are as in OpenAI's API, and what they show as `take_media` leaves it. Parts of a content stay where a
        model takes images or sound; else they become one text, with line breaks between them. No content becomes an
        empty text; the arguments of tool calls become objects where they are the text of one; `developer` becomes
        `system` where the template does not know it.
        """
        tokenizer = self._require("messages")
        if not tokenizer.chat_template:
            raise RequestError("messages need a chat template, and the tokenizer has none: use a prompt")
        if tools and not self.supports_tools:
            raise RequestError("tools cannot be shown to the model: its chat template has no place for them")
        variables = dict(template_kwargs or {})
        reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
        if wrong := sorted(reserved & set(variables)):
            raise RequestError(f"chat_template_kwargs must not hold {wrong[0]}")
        if not messages:
            raise RequestError("messages must hold at least one message")
        plain_tools: Any = [dict(tool) for tool in tools] if tools else None
        template = self._template(plain_tools)
        options = {"knows_developer": "developer" in template, "keeps_parts": self.media is not None}
        conversation = [_message(message, **options) for message in messages]
        if continue_final_message and not conversation[-1]["content"]:
            raise RequestError("messages must end with one that has content, if it is to be continued")
        try:
            text: Any = tokenizer.apply_chat_template(
                conversation,
                plain_tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template can raise anything: it is a program
            raise RequestError(f"messages do not fit the chat template: {described(error)}") from error
        return self._encode("messages", str(text), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens; ids that the tokenizer does not know have none. Raises RequestError."""
        tokenizer = self._require("tokens")
        try:
            return str(
                tokenizer.decode(
                    list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
            )
        except Exception as error:  # any tokenizer's own; too large an id, for one
            raise RequestError(f"tokens cannot be decoded: {described(error)}") from error

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; bytes that are no whole character are replacement characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, whole characters or not; none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        tokenizer = self._require("tokens")
        if (added := self._added.get(token_id)) is not None:
            return added.encode("utf-8", "replace")
        token = self._tokens.get(token_id)
        if token is None:
            return b""
        if self._byte_of is not None:
            letters = [self._byte_of.get(letter) for letter in token]
            return b"".join(
                letter.encode("utf-8", "replace") if byte is None else bytes([byte])
                for byte, letter in zip(letters, token)
            )
        if found := BYTE_TOKEN.fullmatch(token):
            return bytes([int(found.group(1), 16)])
        if WORD_START in token:
            return token.replace(WORD_START, " ").encode("utf-8", "replace")
        return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False)).encode("utf-8", "replace")

    def _template(self, tools: Any) -> str:
        tokenizer = self._require("messages")
        try:
            return str(tokenizer.get_chat_template(tools=tools))
        except ValueError as error:  # several templates, and none is the default
            raise RequestError(f"messages need a chat template: {described(error)}") from error

    def _encode(self, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self._require(field)
        if len(text) > self._max_characters:
            room = f"max_model_len={self._max_model_len} leaves room for {self._max_characters} at most"
            raise RequestError(f"{field} has {len(text)} characters; {room}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = f"{error.reason} at character {error.start}"
            raise RequestError(f"{field} must be valid Unicode text: {place}") from None
        try:
            encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return [int(token_id) for token_id in encoded["input_ids"]]
        except Exception as error:  # any tokenizer's own
            raise RequestError(f"{field} cannot be tokenized: {described(error)}") from error

    def _require(self, field: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            advice = "give token ids" if field == "prompt" else "use a prompt of token ids"
            raise RequestError(f"{field} cannot be read, because the checkpoint has no tokenizer: {advice}")
        return self._tokenizer


def _message(message: Mapping[str, Any], *, knows_developer: bool, keeps_parts: bool) -> dict[str, Any]:
    """As chat templates expect it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError('messages must be a list of {"role": ..., "content": ...}')
    plain = dict(message)
    if plain["role"] == "developer" and not knows_developer:
        plain["role"] = "system"
    if not keeps_parts or not isinstance(plain.get("content"), list):
        plain["content"] = _content(plain.get("content"))
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    raise RequestError("messages must have text as their content, or a list of parts that have text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """With its arguments as an object. Text that is none stays as it is: the model may have written it."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "function": function}


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in the vocabularies of byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _decoders(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The kinds of steps in which a fast tokenizer turns tokens into text."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {step["type"] for step in [state, *state.get("decoders", ())]}
