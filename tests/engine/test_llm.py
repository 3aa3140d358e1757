"""The offline API: order and errors of `generate`, chat, streams, text from tokens, settings and options."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_models import byte_tokenizer
from reference import Reference
from scripted import scripted_engine
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.open_requests import OpenRequests
from foredraft.errors import ConfigError, RequestError
from foredraft.models.loader import load_checkpoint
from foredraft.models.target import TargetModel
from foredraft.outputs import RequestOutput, StreamChunk
from foredraft.stopping import FinishReason

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9]]
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 80}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 tokens, each one byte of text."""
    path = tiny_llama(tmp_path_factory.mktemp("bytes"), vocab_size=256)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def shared_llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, **SETTINGS)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Every test leaves it empty."""
    shared_llm.reset_stats()
    yield shared_llm
    assert_empty(shared_llm)


@pytest.fixture
def words(tmp_path: Path) -> LLM:
    """64 tokens, each a word; there is a chat template."""
    return LLM(tiny_llama(tmp_path, tokenizer=True), **SETTINGS)


def scripted_llm(checkpoint: Path, prompts: Sequence[Sequence[int]], num_right: int) -> LLM:
    """An LLM that drafts the first `num_right` tokens right for its first requests, one a prompt."""
    llm = LLM(checkpoint, **SETTINGS)
    loaded = load_checkpoint(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    engine, drafter = scripted_engine(loaded, llm.config)
    llm.requests = OpenRequests(engine)
    reference = Reference(checkpoint)
    for index, prompt in enumerate(prompts):
        drafter.num_right[f"request-{index}"] = num_right
        drafter.continuations[f"request-{index}"] = reference.sequence(prompt, 27)
    return llm


def assert_empty(llm: LLM) -> None:
    """The engine holds nothing any more."""
    assert not llm.engine.has_unfinished
    llm.engine.cache.check_integrity()
    for pool in llm.engine.cache.pools:
        assert pool.num_free_blocks == pool.num_usable_blocks


def same(first: RequestOutput, second: RequestOutput) -> bool:
    """Equal in all that a caller sees but the id and the statistics."""
    fields = ("prompt_token_ids", "token_ids", "token_depths", "text", "finish_reason", "error")
    return all(getattr(first, name) == getattr(second, name) for name in fields)


def whole(chunks: Sequence[StreamChunk]) -> RequestOutput:
    """The output that a stream ended with, having checked that its chunks add up to it."""
    output = chunks[-1].output
    assert output is not None
    assert [chunk.output for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(chunk.token_ids for chunk in chunks)
    assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text
    return output


# -- generate ----------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, reference: Reference) -> None:
    params = [SamplingParams(max_tokens=n) for n in (9, 2, 13, 5)]
    outputs = llm.generate(PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, outputs):
        assert one.max_tokens is not None
        assert output.prompt_token_ids == tuple(prompt)
        assert list(output.token_ids) == reference.sequence(prompt, 20)[len(prompt) :][: one.max_tokens]
        assert output.finish_reason == "length"
        assert output.error is None
        assert len(output.token_depths) == len(output.token_ids)
    assert_empty(llm)


def test_one_prompt_or_several_text_or_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    (from_text,) = llm.generate("héllo", params)
    (from_ids,) = llm.generate(list("héllo".encode()), params)
    prompts: list[str | list[int]] = ["héllo", list("héllo".encode())]
    both = llm.generate(prompts, params)
    assert all(same(from_text, other) for other in [from_ids, *both])
    assert llm.generate([]) == []
    (to_the_end,) = llm.generate([PROMPTS[0]])
    assert len(to_the_end.prompt_token_ids) + len(to_the_end.token_ids) == SETTINGS["max_model_len"]


def test_a_prompt_that_cannot_be_served_fails_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    good = llm.generate(PROMPTS[:2], params)
    outputs = llm.generate([PROMPTS[0], [1] * 80, [], [256], PROMPTS[1], [1]], params)
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "error", "length", "length"]
    assert same(outputs[0], good[0])
    assert same(outputs[4], good[1])
    for output, message in zip(outputs[1:4], ["80 tokens; max_model_len=80", "at least one token", "not 256"]):
        assert output.error is not None
        assert message in output.error
        assert output.token_ids == ()
    assert_empty(llm)


def test_params_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params has 1 entries for 4 prompts"):
        llm.generate(PROMPTS, [SamplingParams()])
    assert_empty(llm)


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=5)
    expected = llm.generate(PROMPTS, params)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(TargetModel, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
    assert_empty(llm)
    assert all(same(a, b) for a, b in zip(llm.generate(PROMPTS, params), expected))


def test_statistics_add_up_and_can_be_reset(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=9))
    stats = llm.stats
    assert stats.num_requests == 4
    assert stats.num_prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert stats.num_generated_tokens == 36
    assert stats.speculation.num_drafted_tokens == sum(output.stats.num_drafted_tokens for output in outputs) > 0
    llm.reset_stats()
    assert llm.stats.num_requests == llm.stats.speculation.num_cycles == 0


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_stop_token_is_returned_but_not_shown(llm: LLM, reference: Reference) -> None:
    continuation = reference.sequence(PROMPTS[0], 12)[3:15]
    index = next(i for i in range(4, 12) if continuation[i] not in continuation[:i])
    params = SamplingParams(max_tokens=12, stop_token_ids=[continuation[index]])
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.finish_reason == "stop"
    assert list(output.token_ids) == continuation[: index + 1]
    assert output.text == bytes(continuation[:index]).decode(errors="replace")
    assert same(whole(list(llm.stream(PROMPTS[0], params))), output)


def test_end_of_sequence_token(tmp_path: Path, checkpoint: Path, reference: Reference) -> None:
    continuation = reference.sequence(PROMPTS[0], 12)[3:15]
    index = next(i for i in range(2, 12) if continuation[i] not in continuation[:i])
    llm = LLM(tiny_llama(tmp_path, vocab_size=256, eos_token_id=[255, continuation[index]]), **SETTINGS)
    (stopped,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12))
    assert (stopped.finish_reason, list(stopped.token_ids)) == ("stop", continuation[: index + 1])
    (ignored,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert (ignored.finish_reason, list(ignored.token_ids)) == ("length", continuation)


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 24])
def test_streamed_equals_not_streamed(checkpoint: Path, num_right: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    llm = scripted_llm(checkpoint, [*PROMPTS, *PROMPTS], num_right)
    outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs):
        chunks = list(llm.stream(prompt, params))
        assert same(whole(chunks), output)
        assert max(len(chunk.token_ids) for chunk in chunks) == min(num_right + 1, max(1, max_tokens - 1))
    assert_empty(llm)


def test_pieces_carry_the_depth_of_their_token(tmp_path: Path) -> None:
    words = scripted_llm(tiny_llama(tmp_path, tokenizer=True), [PROMPTS[0]], num_right=2)
    chunks = list(words.stream(PROMPTS[0], SamplingParams(max_tokens=10)))
    assert [piece.depth for chunk in chunks for piece in chunk.pieces] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert [len(chunk.pieces) for chunk in chunks] == [1, 3, 3, 3]
    assert whole(chunks).text == "".join(f" w{token_id}" for token_id in whole(chunks).token_ids)


def test_streams_can_be_read_in_turn(llm: LLM, checkpoint: Path) -> None:
    params = [SamplingParams(max_tokens=n) for n in (7, 15, 1, 11)]
    expected = llm.generate(PROMPTS, params)
    llm = scripted_llm(checkpoint, PROMPTS, num_right=2)
    streams = [llm.stream(prompt, one) for prompt, one in zip(PROMPTS, params)]
    collected: list[list[StreamChunk]] = [[] for _ in streams]
    order = itertools.cycle([0, 1, 1, 2, 3, 0, 3])
    while any(not chunks or chunks[-1].output is None for chunks in collected):
        index = next(order)
        collected[index] += itertools.islice(streams[index], 1)
    for chunks, output in zip(collected, expected):
        assert whole(chunks).token_ids == output.token_ids
        assert whole(chunks).text == output.text
    assert [next(stream, None) for stream in streams] == [None] * 4
    assert_empty(llm)


def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    expected = llm.generate(PROMPTS, params)
    stream = llm.stream(PROMPTS[0], params)
    chunks = [next(stream)]
    outputs = llm.generate(PROMPTS[1:], params)
    chunks += stream
    assert all(same(a, b) for a, b in zip([whole(chunks), *outputs], expected))
    assert_empty(llm)


@pytest.mark.parametrize("num_read", [0, 1, 3])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stream_that_is_left_aborts_its_request(llm: LLM, num_read: int, is_closed: bool) -> None:
    stream: Iterator[StreamChunk] = llm.stream(PROMPTS[0], SamplingParams(max_tokens=30))
    for _ in range(num_read):
        next(stream)
    assert llm.engine.has_unfinished
    if is_closed:
        stream.close()  # type: ignore[attr-defined]
        assert next(stream, None) is None
    del stream
    gc.collect()
    assert_empty(llm)
    (output,) = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=4))
    assert output.finish_reason == "length"


def test_a_stream_refuses_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="at least one token"):
        llm.stream([])
    assert_empty(llm)


def test_a_failed_step_ends_all_streams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (llm.stream(prompt, SamplingParams(max_tokens=9)) for prompt in PROMPTS[:2])
    next(second)

    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(TargetModel, "forward", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            list(first)
    *_, last = list(second)
    assert last.output is not None
    assert last.output.finish_reason is FinishReason.ERROR
    assert last.output.error is not None
    assert "the device is gone" in last.output.error
    assert_empty(llm)


# -- text --------------------------------------------------------------------------------------------------------------


TEXTS = ["plain", "héllo", "日本語", "👍🏽 ok", "a\n\n b\t", "é", "…"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_of_several_tokens_come_out_whole(text: str, size: int) -> None:
    token_ids = list(text.encode())
    detokenizer = Detokenizer(byte_tokenizer(), skip_special_tokens=True)
    pieces = []
    for start in range(0, len(token_ids), size):
        part = token_ids[start : start + size]
        pieces += detokenizer.add(part, range(start, start + len(part)))
    assert "".join(piece.text for piece in pieces) == text == detokenizer.text
    assert not any("\ufffd" in piece.text for piece in pieces)
    # A piece belongs to the token that completes it.
    assert [piece.depth for piece in pieces] == [len(text[: i + 1].encode()) - 1 for i in range(len(text))]
    assert detokenizer.flush() == []


@pytest.mark.parametrize("text", TEXTS)
def test_an_unfinished_character_is_held_back_and_flushed(text: str) -> None:
    for cut in range(1, len(text.encode())):
        token_ids = list(text.encode())[:cut]
        detokenizer = Detokenizer(byte_tokenizer(), skip_special_tokens=True)
        shown = "".join(piece.text for piece in detokenizer.add(token_ids, [0] * cut))
        assert text.startswith(shown)
        rest = "".join(piece.text for piece in detokenizer.flush())
        assert shown + rest == detokenizer.text == bytes(token_ids).decode(errors="replace")


def test_any_bytes_come_out_as_decoded_in_one_go() -> None:
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        token_ids = torch.randint(256, (12,), generator=generator).tolist()
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        pieces = [*detokenizer.add(token_ids, [0] * 12), *detokenizer.flush()]
        assert "".join(piece.text for piece in pieces) == detokenizer.text == tokenizer.decode(token_ids)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|sep|>"]})
    token_ids = [*b"a", tokenizer.convert_tokens_to_ids("<|sep|>"), *b"b"]
    for skip, text in ((True, "ab"), (False, "a<|sep|>b")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        detokenizer.add(token_ids, [0] * 3)
        assert detokenizer.flush() == []
        assert detokenizer.text == text


def test_without_a_tokenizer_there_are_ids_but_no_text(tmp_path: Path) -> None:
    llm = LLM(tiny_llama(tmp_path), **SETTINGS)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    assert (len(output.token_ids), output.text) == (4, "")
    assert same(whole(list(llm.stream(PROMPTS[0], SamplingParams(max_tokens=4)))), output)
    (refused,) = llm.generate("text")
    assert refused.error is not None
    assert "no tokenizer" in refused.error
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "w1"}])


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_runs_the_template(words: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    first = [{"role": "user", "content": "w7 w8"}]
    second = [*first, {"role": "assistant", "content": "w9"}, {"role": "user", "content": "w3"}]
    assert words.chat_prompt(second) == [1, 7, 8, 1, 9, 1, 3, 2]
    (alone,) = words.chat(first, params)
    together = words.chat([first, second], params)
    assert same(alone, together[0])
    assert together[1].prompt_token_ids == (1, 7, 8, 1, 9, 1, 3, 2)
    assert same(together[1], words.generate([[1, 7, 8, 1, 9, 1, 3, 2]], params)[0])


def test_chat_without_a_template_or_with_bad_messages_is_refused(llm: LLM, words: LLM) -> None:
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])
    for messages in ([], [{"role": "user"}], ["hello"]):
        with pytest.raises(RequestError, match="messages must be"):
            words.chat(messages)  # type: ignore[arg-type]


# -- options and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", -1, "at least 0"),
        ("max_tokens", 2.0, "an integer"),
        ("max_tokens", True, "an integer"),
        ("temperature", -0.1, "0, or between 1e-06 and 1000000.0"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", float("inf"), "a finite number"),
        ("temperature", "1", "a finite number"),
        ("top_k", -1, "between 0 and"),
        ("top_k", 1.5, "an integer"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.01, "between 0.0 and 1.0"),
        ("top_p", None, "a finite number"),
        ("seed", -1, "between 0 and"),
        ("seed", 2**63, "between 0 and"),
        ("seed", "0", "an integer"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", [1.0], "an integer"),
        ("ignore_eos", 1, "true or false"),
        ("skip_special_tokens", None, "true or false"),
        ("num_speculative_tokens", -1, "at least 0"),
    ],
)
def test_bad_options_name_the_field_and_the_rule(name: str, value: object, rule: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be.*{rule}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seqs": 3}, "unknown setting max_seqs; known are .*max_num_seqs"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4, but the checkpoint has 3 MTP modules"),
        ({"max_num_batched_tokens": 15}, r"max_num_batched_tokens=15 .*max_num_seqs=4.* = 4, which is 16"),
        ({"max_model_len": 257}, "max_model_len=257 is more than the 256 positions"),
        ({"max_model_len": 253, "num_blocks": 64}, "max_model_len=253 does not fit the cache: 64 blocks of 4"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 1000}, "the cache is too small"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be an integer"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"draft_sampling": "random"}, "draft_sampling must be one of probabilistic, greedy"),
        ({"device": "tpu9"}, "device='tpu9' cannot be used"),
    ],
)
def test_bad_settings_name_the_field_and_the_rule(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, **(SETTINGS | settings))


def test_drafts_need_modules(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, num_modules=0)
    with pytest.raises(ConfigError, match="no MTP modules"):
        LLM(path, num_speculative_tokens=1, **SETTINGS)
    llm = LLM(path, **SETTINGS)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    assert len(output.token_ids) == 4
    assert llm.stats.speculation.num_drafts == 0
