"""What an engine does with texts in a request's options, and with the tokens that it generates."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from foredraft.engine.output_text import OutputText
from foredraft.errors import RequestError
from foredraft.plan import RequestTerms
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class TextTools:
    """The checkpoint's tokenizer, and the grammars that are made for it. Without one there is no text."""

    tokenizer: PreTrainedTokenizerBase | None = None
    compiler: GrammarCompiler | None = None

    def output_text(self, terms: RequestTerms) -> OutputText:
        """Where the text of a new request grows. Raises RequestError if its options need a tokenizer."""
        params = terms.params
        if params.stop and self.tokenizer is None:
            raise RequestError("stop is text, but the checkpoint has no tokenizer: give stop_token_ids")
        return OutputText(
            self.tokenizer,
            prompt_token_ids=terms.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences that must not appear: a text is banned at the beginning of a text and after a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if isinstance(word, str):
                bare = word.removeprefix(" ")
                is_word = bool(bare) and not bare[0].isspace()
                forms = (word, f" {bare}") if is_word else (word,)
                words |= dict.fromkeys(filter(None, map(self._encode, forms)))
            else:
                words[tuple(word)] = None
        return tuple(words)

    def _encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise RequestError("bad_words holds texts, but the checkpoint has no tokenizer: give lists of token ids")
        return tuple(int(token_id) for token_id in self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def check_grammar(self, params: SamplingParams) -> None:
        """Raise RequestError if a grammar is asked for that cannot be followed."""
        if params.structured_output is None:
            return
        if self.compiler is None:
            raise RequestError("structured_output needs a tokenizer, and the checkpoint has none")
        self.compiler.check(params.structured_output)


NO_TEXTS = TextTools()
