"""Wrong input names its field, harms nobody, and the next request is served."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foredraft import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from foredraft.engine.detokenizer import Detokenizer

TWO = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True), num_blocks=32)


@pytest.mark.parametrize("prompts", [None, 5, 5.0, {"a": 1}, {1}, b"abc", np.array([1, 2]), torch.tensor([1, 2])])
def test_prompts_of_a_wrong_kind(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be text"):
        llm.generate(prompts, TWO)
    with pytest.raises(RequestError, match="a prompt must be text"):
        llm.stream(prompts, TWO)
    assert llm.generate([1, 2], TWO)[0].error is None


@pytest.mark.parametrize("bad", [None, 5.0, [1.0], [None], [np.int64(1)], [True], [], [64], [-1], ["w1"]])
def test_one_bad_prompt_among_good_ones(llm: LLM, bad: Any) -> None:
    good, failed, also_good = llm.generate(["w1 w2", bad, [3]], TWO)
    assert failed.error is not None
    assert failed.finish_reason == "error"
    assert len(good.token_ids) == len(also_good.token_ids) == 2


@pytest.mark.parametrize("params", [{"max_tokens": 2}, "x", 5, [], [TWO, TWO]])
def test_params_of_a_wrong_kind(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params"):
        llm.generate([[1]], params)
    assert llm.generate([1, 2], TWO)[0].error is None


@pytest.mark.parametrize("params", [None, {"max_tokens": 2}])
def test_params_of_a_wrong_kind_in_a_list(llm: LLM, params: Any) -> None:
    failed, good = llm.generate([[1], [2]], [params, TWO])
    assert failed.error == f"params must be SamplingParams, not {type(params).__name__}"
    assert len(good.token_ids) == 2


@pytest.mark.parametrize("messages", [5, {"role": "user", "content": "w1"}, [5], [], [{"role": "user"}]])
def test_messages_of_a_wrong_kind(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages, TWO)


@pytest.mark.parametrize("value", [2**63, 2**31, -1, 1.0, True])
def test_top_k_out_of_range(value: Any) -> None:
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=value)


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), "1", True, None])
def test_temperature_out_of_range(value: Any) -> None:
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(("name", "value"), [("stop", np.array([1])), ("n", True), ("n", 0), ("min_p", "0")])
def test_options_of_a_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("settings", [{"model": 5}, {"mtp": 5}, {"device": None}])
def test_settings_of_a_wrong_kind(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_a_cache_beyond_all_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no memory for a cache of 1000000000000 blocks"):
        LLM(tiny_llama(tmp_path / "model"), num_blocks=10**12)


def test_a_failure_in_the_model_ends_all_that_share_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream may go on with a token missing."""
    streams = [llm.stream([first], SamplingParams(max_tokens=8, ignore_eos=True)) for first in (1, 2, 3)]
    with monkeypatch.context() as patched:

        def fail(*args: Any) -> None:
            raise RuntimeError("no forward")

        patched.setattr(llm.engine.runner.target, "forward", fail)
        with pytest.raises(RuntimeError, match="no forward"):
            list(streams[0])
    for stream in streams[1:]:
        output = list(stream)[-1].output
        assert output is not None
        assert output.error == "RuntimeError: no forward"
    assert not llm.engine.has_unfinished
    assert llm.generate([1, 2], TWO)[0].error is None


def test_a_tokenizer_that_fails_ends_its_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    alone = llm.generate([[1], [3]], params)
    add, calls = Detokenizer.add, iter(range(100))

    def fail_once(self: Detokenizer, *tokens: Any) -> Any:
        if next(calls) == 1:  # of the second request
            raise RuntimeError("no text")
        return add(self, *tokens)

    monkeypatch.setattr(Detokenizer, "add", fail_once)
    first, second, third = llm.generate([[1], [2], [3]], params)
    assert second.finish_reason == "error"
    assert second.error == "the tokenizer failed: RuntimeError: no text"
    assert [first.token_ids, third.token_ids] == [output.token_ids for output in alone]
    llm.engine.cache.check_integrity()


def test_statistics_start_over(llm: LLM) -> None:
    llm.engine.stats.num_preemptions = 3
    llm.reset_stats()
    llm.generate([1, 2], TWO)
    assert llm.stats.num_preemptions == 0


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "a", "\u2581b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("make", [byte_fallback_tokenizer])
def test_any_bytes_make_text(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """Malformed bytes too; whole characters come out right."""
    tokenizer = make()
    chance = random.Random(0)
    for _ in range(300):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        token_ids = [chance.randrange(len(tokenizer)) for _ in range(12)]
        pieces = [piece for token in token_ids for piece in detokenizer.add([token], [0])] + detokenizer.flush()
        assert "".join(piece.text for piece in pieces) == detokenizer.text
    for text in ("\u65d7\u00e9a b", "a\U0001f600b"):
        token_ids = [3 + byte for byte in text.encode()]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        pieces = detokenizer.add(token_ids, [0] * len(token_ids))
        assert "".join(piece.text for piece in pieces) == text


ENDLESS = 10**5000


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": ENDLESS},
        {"stop_token_ids": [ENDLESS]},
        {"allowed_token_ids": [ENDLESS]},
        {"logit_bias": {ENDLESS: 1.0}},
        {"bad_words": [[ENDLESS]]},
        {"logprobs": ENDLESS},
    ],
)
def test_a_number_with_too_many_digits_to_print(llm: LLM, options: dict[str, Any]) -> None:
    (output,) = llm.generate([1, 2], SamplingParams(**options))
    assert output.error is not None
    assert output.error.startswith(next(iter(options)))
    assert llm.generate([1, 2], TWO)[0].error is None


def test_min_tokens_that_have_no_room(llm: LLM) -> None:
    limit = llm.engine.limits.max_model_len
    (output,) = llm.generate([1, 2], SamplingParams(min_tokens=limit))
    assert output.error is not None
    assert output.error.startswith(f"min_tokens={limit} do not fit: ")


def test_a_prompt_that_fills_the_context_can_be_scored(llm: LLM) -> None:
    limit = llm.engine.limits.max_model_len
    whole, too_long = llm.generate([[1] * limit, [1] * (limit + 1)], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert whole.error is None
    assert whole.stats.num_cycles == 0
    assert len(whole.prompt_logprobs or ()) == limit
    assert too_long.error is not None
