"""Which tokens a grammar allows, along drafts that may all be rejected.

A grammar is compiled once by GrammarCompiler; GrammarState follows the tokens of one request through it. The library
underneath is llguidance: it parses bytes, so a mask is right for every way in which a text falls into tokens.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.errors import RequestError
from foredraft.sampling.grammar_chains import check_gbnf, check_lark, check_schema
from foredraft.structured_output import StructuredOutput

MAX_COMPILED = 64  # grammars kept for further requests
MAX_COMPILED_CHARACTERS = 4_000_000  # of all of them; the newest stays
MAX_MESSAGE = 300  # characters of what the library says about a grammar

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_LIMITS = LLParserLimits(verbose_errors=False)  # verbose ones hold the whole grammar


# Between the parts of JSON: bounded, or a model that likes whitespace would never come to an end.
_WHITESPACE = r"\x20|\n\x20{0,32}"


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer, each once, and starts requests on them.

    vocab_size: how many logits the model has; it may be more or less than the tokenizer has tokens.
    eos_token_ids: any of them ends an output, and is allowed where the grammar may end; never within.
    The tokenizer is read at first use (some tenths of a second). Any thread may call `check`, so that a grammar is
    compiled before the one that runs the model needs it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._hf_tokenizer = tokenizer
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of what is compiled

    def check(self, spec: StructuredOutput) -> None:
        """Raise RequestError, naming the field, if `spec` cannot be followed with this tokenizer."""
        self._matcher(spec)
        if isinstance(spec.after, tuple) and not all(0 <= token_id < self.vocab_size for token_id in spec.after):
            raise RequestError(f"structured_output.after must be tokens of the model, below {self.vocab_size}")

    def start(self, spec: StructuredOutput) -> GrammarState:
        """The grammar at the beginning of an output, which is free up to the end of the marker if there is one.

        Raises RequestError as `check` does.
        """
        return GrammarState(self, self._matcher(spec).deep_copy(), _marker(spec, self.bytes_of))

    def bytes_of(self, token_id: int) -> bytes:
        """What a token writes; a special token its name."""
        tokenizer = self._require_tokenizer()
        if token_id in tokenizer.added_tokens_decoder:
            return str(tokenizer.added_tokens_decoder[token_id].content).encode()
        return self._tokenizer.decode_bytes([token_id]) if 0 <= token_id < self._num_tokens else b""

    def allowed(
        self, matcher: LLMatcher, field: str = "structured_output"
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which tokens other than EOS may follow: [vocab_size]. RequestError, with the field, if there must be one."""
        bits = np.zeros((self._num_tokens + 31) // 32, np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        # After an error it allows its end-of-sequence token, as if all were well.
        _raise_error(matcher, field)
        unpacked = np.unpackbits(bits.view(np.uint8), count=self.vocab_size, bitorder="little")
        allowed = unpacked.view(np.bool_)
        allowed[self.eos_ids] = False
        if not allowed.any() and not matcher.is_accepting():
            raise RequestError(f"{field} cannot be followed: no token of the model goes on")
        return allowed

    @cached_property
    def eos_only(self) -> Tensor:
        """The mask after the end, [vocab_size]."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[torch.from_numpy(self.eos_ids)] = True
        return mask

    @cached_property
    def eos_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Those that the model has, for indexing."""
        return np.array(sorted(token_id for token_id in self.eos_token_ids if token_id < self.vocab_size), np.int64)

    @cached_property
    def _num_tokens(self) -> int:
        """Token ids that the library knows."""
        return max(self.vocab_size, len(self._require_tokenizer()))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = self._require_tokenizer()
        known_eos = [int(token_id) for token_id in self.eos_ids if token_id < len(tokenizer)]
        if not known_eos:
            raise RequestError("structured_output needs an EOS token, and the checkpoint names none")
        try:
            return from_tokenizer(tokenizer, n_vocab=self._num_tokens, eos_token=known_eos)  # type: ignore[arg-type]
        except Exception as error:
            kind = type(tokenizer).__name__
            raise RequestError(f"structured_output cannot use this tokenizer, a {kind}: {_short(error)}") from error

    def _require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._hf_tokenizer is None:
            raise RequestError("structured_output needs a tokenizer, and the checkpoint has none")
        return self._hf_tokenizer

    def _matcher(self, spec: StructuredOutput) -> LLMatcher:
        """A matcher that has consumed nothing, shared: copy it."""
        grammar = _library_grammar(spec)
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        field = f"structured_output.{spec.kind}"
        _raise_error(matcher, field)
        allowed = self.allowed(matcher, field)  # some of what cannot be followed shows here only
        _try_rollback(matcher.deep_copy(), int(allowed.argmax()), field)
        with self._lock:
            self._compiled[grammar] = matcher
            surplus = sum(map(len, self._compiled)) - MAX_COMPILED_CHARACTERS
            while len(self._compiled) > 1 and (len(self._compiled) > MAX_COMPILED or surplus > 0):
                surplus -= len(self._compiled.popitem(last=False)[0])
        return matcher


class _Phase(Enum):
    FREE = auto()  # the marker is not complete
    INSIDE = auto()
    ENDED = auto()  # nothing may follow but EOS
    LOST = auto()  # after a token that the grammar does not allow


@dataclass
class _Place:
    """Where a path of tokens has led to."""

    token_id: int  # the path's last token
    phase: _Phase
    num_matched: int = 0  # how much of the marker the path ends with
    num_consumed: int = 0  # tokens that the matcher has consumed in all
    mask: Tensor | None = None  # once computed
    forced: int | None = None  # the only token that the mask allows


class GrammarState:
    """The grammar of one request: its committed tokens, and a path of drafts after them.

    A call with other drafts goes back to where they part, so rejected drafts leave no trace, and a mask that was made
    while drafting is there when the same drafts are verified. Masks are shared between calls: do not change them.
    """

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher, marker: _Marker | None) -> None:
        self.num_masks = 0
        self.seconds = 0.0  # for masks, and for following tokens
        self._compiler = compiler
        self._matcher = matcher
        self._marker = marker
        # The first is where the committed tokens end, the others follow the drafts.
        self._path = [_Place(-1, _Phase.FREE if marker else _Phase.INSIDE)]
        self._num_consumed = 0  # by the matcher, which may stand anywhere on the path

    @property
    def is_complete(self) -> bool:
        """Nothing but EOS may follow the committed tokens, or EOS is the last of them."""
        return self._path[0].phase is _Phase.ENDED

    def mask_after(self, draft_ids: Sequence[int]) -> Tensor | None:
        """The tokens allowed after the committed ones and these drafts: bool, [vocab_size], on the CPU.

        None: any. That is so before the marker is complete, and after a draft that the grammar does not allow, which
        is certain to be rejected. After the grammar's end only the EOS ids are allowed.

        Raises RequestError if the grammar cannot be followed further: it is too complex for the library's limits, no
        token of the model can go on, or a token was committed that it does not allow.
        """
        return self._masked_place(draft_ids).mask

    def forced_after(self, draft_ids: Sequence[int]) -> int | None:
        """The next token after these drafts if there is only one; None otherwise. Raises what `mask_after` raises."""
        return self._masked_place(draft_ids).forced

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens are now part of the output, whether they were drafted or not. Those after its end are ignored.

        A token that the grammar does not allow, or cannot follow, is reported by the next mask.
        """
        started = time.perf_counter()
        place = self._find(token_ids)
        if place.phase is _Phase.INSIDE:
            self._stand_at(place)
        self._path = [place]
        self.seconds += time.perf_counter() - started

    def _masked_place(self, draft_ids: Sequence[int]) -> _Place:
        """Where the drafts lead, with its mask."""
        started = time.perf_counter()
        place = self._find(draft_ids)
        _raise_error(self._matcher, "structured_output")
        if self._path[0].phase is _Phase.LOST:
            raise RequestError("the output holds a token that structured_output does not allow")
        if place.phase is _Phase.INSIDE and place.mask is None:
            self._compute_mask(place)
        if place.phase is _Phase.ENDED:
            place.mask, eos_ids = self._compiler.eos_only, self._compiler.eos_ids
            place.forced = int(eos_ids[0]) if len(eos_ids) == 1 else None
        self.seconds += time.perf_counter() - started
        return place

    def _compute_mask(self, place: _Place) -> None:
        self._stand_at(place)
        allowed, may_end = self._compiler.allowed(self._matcher), self._matcher.is_accepting()
        self.num_masks += 1
        if may_end:
            allowed[self._compiler.eos_ids] = True
        num_allowed = np.count_nonzero(allowed)
        if may_end and num_allowed == len(self._compiler.eos_ids):
            place.phase = _Phase.ENDED
        elif num_allowed == 1:
            place.forced = int(allowed.argmax())
        place.mask = torch.from_numpy(allowed)

    def _find(self, token_ids: Sequence[int]) -> _Place:
        """The place after these tokens. The path is kept if it begins with them; else it is theirs from now on."""
        num_common = 0
        for place, token_id in zip(self._path[1:], token_ids):
            if place.token_id != token_id:
                break
            num_common += 1
        if num_common < len(token_ids):
            if self._num_consumed > self._path[num_common].num_consumed:
                self._stand_at(self._path[num_common])
            del self._path[num_common + 1 :]
            for token_id in token_ids[num_common:]:
                self._path.append(self._next_place(self._path[-1], token_id))
        return self._path[len(token_ids)]

    def _stand_at(self, place: _Place) -> None:
        """Bring the matcher to a place of the path."""
        if surplus := self._num_consumed - place.num_consumed:
            if surplus > 0:
                self._matcher.rollback(surplus)
            else:
                ahead = range(self._num_consumed + 1, place.num_consumed + 1)
                inside = [p for p in self._path if p.phase is _Phase.INSIDE and p.num_consumed in ahead]
                self._matcher.consume_tokens([p.token_id for p in inside])
            self._num_consumed = place.num_consumed

    def _next_place(self, place: _Place, token_id: int) -> _Place:
        """One token further."""
        following = _Place(token_id, place.phase, place.num_matched, place.num_consumed)
        if place.phase is _Phase.FREE:
            assert self._marker is not None
            following.num_matched = self._marker.after(place.num_matched, token_id)
            if following.num_matched == self._marker.length:
                following.phase = _Phase.INSIDE
        elif place.phase is _Phase.INSIDE:
            self._stand_at(place)
            if token_id in self._compiler.eos_token_ids:
                following.phase = _Phase.ENDED if self._matcher.is_accepting() else _Phase.LOST
            elif self._consume(token_id):
                following.num_consumed = self._num_consumed = place.num_consumed + 1
                following.phase = _Phase.ENDED if self._matcher.is_stopped() else _Phase.INSIDE
            else:
                following.phase = _Phase.LOST
        return following

    def _consume(self, token_id: int) -> bool:
        """Whether the matcher could; an id that it does not know would be an error that it never leaves."""
        is_known = 0 <= token_id < self._compiler.vocab_size
        return is_known and self._matcher.try_consume_tokens([token_id]) == 1 and not self._matcher.is_error()


class _Marker:
    """What a grammar waits for: a text, whatever tokens it comes in, or certain tokens (Knuth, Morris and Pratt)."""

    def __init__(self, symbols: Sequence[int], symbols_of: Callable[[int], Sequence[int]]) -> None:
        self.length = len(symbols)
        self._symbols = symbols
        self._symbols_of = symbols_of
        self._fallbacks = [0] * (self.length + 1)  # for n matched: how many still are if the next one is another
        num_matched = 0
        for index in range(1, self.length):
            num_matched = self._extended(num_matched, symbols[index])
            self._fallbacks[index + 1] = num_matched

    def after(self, num_matched: int, token_id: int) -> int:
        """How much is matched one token further; once it is all, the rest of the token is of no account."""
        for symbol in self._symbols_of(token_id):
            num_matched = self._extended(num_matched, symbol)
            if num_matched == self.length:
                break
        return num_matched

    def _extended(self, num_matched: int, symbol: int) -> int:
        while num_matched and self._symbols[num_matched] != symbol:
            num_matched = self._fallbacks[num_matched]
        return num_matched + (self._symbols[num_matched] == symbol)


def _marker(spec: StructuredOutput, bytes_of: Callable[[int], bytes]) -> _Marker | None:
    if spec.after is None:
        return None
    if isinstance(spec.after, str):
        return _Marker(spec.after.encode(), bytes_of)
    return _Marker(spec.after, lambda token_id: (token_id,))


def _try_rollback(matcher: LLMatcher, token_id: int, field: str) -> None:
    """Some attributes of Lark rules keep the library from going back, which drafts need."""
    if matcher.try_consume_tokens([token_id]) == 1:
        matcher.rollback(1)
        _raise_error(matcher, field)


def _library_grammar(spec: StructuredOutput) -> str:
    """The specification in the library's own terms."""
    if spec.kind in ("json_schema", "json_object"):
        overrides = {"whitespace_pattern": _WHITESPACE} if spec.whitespace else {"whitespace_flexible": False}
        schema_text = "{}" if spec.schema_text.strip() == "true" else spec.schema_text
        check_schema(schema_text, f"structured_output.{spec.kind}")
        try:
            return LLMatcher.grammar_from_json_schema(schema_text, overrides=overrides)  # type: ignore[arg-type]
        except ValueError as error:
            raise RequestError(f"structured_output.{spec.kind} cannot be followed: {_short(error)}") from None
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, dict.fromkeys(spec.choice))))
    return LLMatcher.grammar_from_lark(_lark(spec.grammar or ""))


def _literal(text: str) -> str:
    """A regular expression for just this text."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _lark(grammar: str) -> str:
    """The grammar in Lark's syntax, if it is not in it already, and not too deep for the library."""
    field = "structured_output.grammar"
    if _GBNF_RULE.search(grammar):
        try:
            grammar = _GBNF_ESCAPE.sub(_plain_escape, grammar)
            check_gbnf(grammar, field)
            grammar = gbnf_to_lark(grammar)
        except RecursionError:
            raise RequestError(f"{field} is nested too deeply") from None
        except RequestError:
            raise
        except Exception as error:  # the converter raises bare exceptions as well
            raise RequestError(f"{field} is not valid GBNF: {_short(error)}") from None
    check_lark(grammar, field)
    return grammar


def _plain_escape(escape: re.Match[str]) -> str:
    """The converter breaks escapes with four or eight digits: put the character, or a short escape, in their place."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code).encode().decode()  # refuses surrogates


def _raise_error(matcher: LLMatcher, field: str) -> None:
    if matcher.is_error():
        error = matcher.get_error()
        reason = "no text fits it" if error.startswith("NoExtension") else _short(error)
        raise RequestError(f"{field} cannot be followed: {reason}")


def _short(error: object) -> str:
    """On one line, and not too long."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."
