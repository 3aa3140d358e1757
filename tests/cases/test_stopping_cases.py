"""Stops and budgets where one step commits several tokens, and what every replay on a fake model is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_models import byte_tokenizer
from cases.fake_replay import DEPTHS, EOS, LETTERS, PROMPT, START, assert_drained, served_alike
from fake_model import FakeModel, Script, at_positions, one_after_another, right, words_tokenizer
from torch import Tensor, tensor

from foredraft import SamplingParams
from foredraft.models.attention import PagedAttention


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sixteen")


def says(path: Path, words: Sequence[str], token_ids: Sequence[int], script: Script | None = None) -> FakeModel:
    """A fake model whose continuation of PROMPT is known; without a script all drafts are right."""
    words = [*words, *(f"<{index}>" for index in range(len(words), 16))]
    table = one_after_another(token_ids, 16, START)
    return FakeModel(path, table, script or right(table), eos_token_ids=[EOS], tokenizer=words_tokenizer(words))


def generated_tokens(fake: FakeModel, **options: Any) -> int:
    """What is counted for one request."""
    fake.llm.reset_stats()
    fake.llm.generate([PROMPT], SamplingParams(**options))
    return fake.llm.stats.num_generated_tokens


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "keeps"), [("STOP", False), ("STOP", True), ("TO", False), ("bST", False)])
def test_nothing_stays_behind_a_stop_string_within_a_block(path: Path, stop: str, keeps: bool) -> None:
    """vllm-project/vllm#47616: text, ids, log-probabilities and usage end with the token that completes the stop."""
    fake = says(path, ["a", "b", "ST", "OP", "c", "d"], [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5])
    options: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": keeps, "max_tokens": 12, "logprobs": 2}
    output = served_alike(fake, PROMPT, **options)
    text = "abSTOPcd"[: "abSTOPcd".index(stop) + (len(stop) if keeps else 0)]
    token_ids = (0, 1, 2) if stop == "bST" else (0, 1, 2, 3)
    assert (output.text, output.token_ids, output.finish_reason) == (text, token_ids, "stop")
    assert output.token_depths == tuple(range(len(token_ids)))  # the second step has committed all but the first
    assert output.logprobs is not None
    assert [logprob.token_id for logprob in output.logprobs] == [*token_ids]
    assert generated_tokens(fake, **options) == len(token_ids)


@pytest.mark.parametrize("num_right", [8, 3, 1])
def test_a_stop_string_early_in_a_long_block_is_found(path: Path, num_right: int) -> None:
    """sgl-project/sglang#23802: one token is the stop string, seven ordinary ones follow it in the same block."""
    fake = says(path, LETTERS, range(1, 15))
    fake.drafter.script = right(one_after_another(range(1, 15), 16, START), num_right)
    output = served_alike(fake, PROMPT, stop="d", max_tokens=14)
    assert (output.text, output.token_ids, output.finish_reason) == ("bc", (1, 2, 3), "stop")
    assert output.stats.num_drafts <= (1 if num_right > 1 else 2)


def test_a_stop_string_is_found_in_what_an_n_gram_drafter_copies(path: Path) -> None:
    """snowflakedb/ArcticInference#161: drafts copied from a repetitive prompt, a stop of several tokens."""
    prompt = [0, 1, 2, 3] * 3
    follows = {0: 1, 1: 2, 2: 3, 3: 0}
    fake = says(path, LETTERS, [])
    fake.target.table = one_after_another([0, 1, 2, 3, 0, 1, 2, 3, 2, 2], 16, len(prompt))
    fake.drafter.script = lambda request_id, position, depth, previous: follows[previous]
    for stop, text in (("cda", "ab"), ("dabc", "abc"), ("dc", "abcdabc"), (["x", "cdc"], "abcdab")):
        output = served_alike(fake, prompt, stop=stop, max_tokens=12)
        assert (output.text, output.finish_reason) == (text, "stop")
        assert max(output.token_depths) >= 2


def test_a_stop_string_does_not_end_the_output_before_min_tokens(path: Path) -> None:
    """vllm-project/vllm#21987: of the line breaks the one that token 24 completes is the first to count."""
    token_ids = [1] * 30
    for index in (1, 18, 19, 23, 26):
        token_ids[index] = 0
    fake = says(path, ["\n", "a"], token_ids)
    for num_right in (8, 2, 0):
        fake.drafter.script = right(one_after_another(token_ids, 16, START), num_right)
        output = served_alike(fake, PROMPT, stop="\n", min_tokens=20, max_tokens=30)
        assert (len(output.token_ids), output.finish_reason) == (24, "stop")
        assert output.text == "a\n" + "a" * 16 + "\n\n" + "aaa"
    assert len(served_alike(fake, PROMPT, stop="\n", max_tokens=30).token_ids) == 2


@pytest.mark.parametrize(("last", "text"), [("i", "ka"), ("o", "kata rooooo")])
def test_the_first_half_of_a_stop_string_is_not_streamed(path: Path, last: str, text: str) -> None:
    """SharpAI/SwiftLM#126: the stop `ta ri` lies in three tokens; where it does not go on, all is shown."""
    for num_right in (8, 1, 0):
        fake = says(path, ["ka", "ta", " r", last], [0, 1, 2, 3])
        fake.drafter.script = right(one_after_another([0, 1, 2, 3], 16, START), num_right)
        output = served_alike(fake, PROMPT, stop="ta ri", max_tokens=8)
        assert output.text == text
        for depth in DEPTHS:
            fake.llm.reset_prefix_cache()
            params = SamplingParams(stop="ta ri", max_tokens=8, num_speculative_tokens=depth)
            sent = ""
            for chunk in fake.llm.stream(PROMPT, params):
                sent += chunk.text
                assert text.startswith(sent)


@pytest.mark.parametrize("end", ["length", "stop"])
def test_held_back_text_is_sent_at_the_end(path: Path, end: str) -> None:
    """ggml-org/llama.cpp#9867: the output ends while its last character may begin a stop string."""
    token_ids = [1, 0, 2, 0, EOS]
    fake = says(path, ["\n", "a", "b"], token_ids)
    for num_right in (8, 1, 0):
        fake.drafter.script = right(one_after_another(token_ids, 16, START), num_right)
        output = served_alike(fake, PROMPT, stop="\n\n", max_tokens=4 if end == "length" else 9)
        assert (output.text, output.finish_reason) == ("a\nb\n", end)


@pytest.mark.parametrize("text", ["a", "é", "日本語", "abcdefghijklmnopqrstuvwx", "zwölf Boxkämpfer! 日本語 😀"])
@pytest.mark.parametrize("ends_with_eos", [True, False])
def test_the_last_characters_are_delivered(tmp_path: Path, text: str, ends_with_eos: bool) -> None:
    """osaurus-ai/vmlx-swift#148: answers of 1, 3 and 24 characters, each byte a token, streamed with drafts."""
    token_ids = [*text.encode(), 0]
    table = one_after_another(token_ids, 256, START)
    fake = FakeModel(tmp_path, table, vocab_size=256, eos_token_ids=[0], tokenizer=byte_tokenizer())
    for num_right in (8, 1, 0):
        fake.drafter.script = right(table, num_right)
        output = served_alike(fake, PROMPT, max_tokens=len(token_ids) - (not ends_with_eos))
        assert (output.text, output.finish_reason) == (text, "stop" if ends_with_eos else "length")


@pytest.mark.parametrize("split", [1, 2])
def test_a_character_that_is_not_whole_is_delivered_at_the_end(tmp_path: Path, split: int) -> None:
    """osaurus-ai/vmlx-swift#148 again: the budget ends within a character of three bytes."""
    table = one_after_another([*"a日".encode()], 256, START)
    fake = FakeModel(tmp_path, table, right(table), vocab_size=256, tokenizer=byte_tokenizer())
    assert served_alike(fake, PROMPT, max_tokens=1 + split).text == "a\ufffd"


def test_the_turn_after_a_stop_within_a_block_equals_a_cold_one(tmp_path: Path) -> None:
    """mlx-node/mlx-node#121: real weights; nothing behind the stop is in the cache that the next turn reads."""
    fake = says(tmp_path, LETTERS, [])
    fake.target.table = None
    plain = SamplingParams(max_tokens=40, ignore_eos=True, num_speculative_tokens=0)
    (whole,) = fake.llm.generate([PROMPT], plain)
    num_hits = 0
    for last in range(4, 30):
        stop = "".join(LETTERS[token_id] for token_id in whole.token_ids[last - 1 : last + 1])
        fake.drafter.script = at_positions({START + i: token_id for i, token_id in enumerate(whole.token_ids)})
        fake.llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop=stop, min_tokens=last)
        (first,) = fake.llm.generate([PROMPT], params)
        assert first.token_ids == whole.token_ids[: last + 1]
        assert first.text == "".join(LETTERS[token_id] for token_id in first.token_ids[:-2])
        turn = [*PROMPT, *(LETTERS.index(letter) for letter in first.text), 3, 1, 4]
        fake.drafter.script = None
        (second,) = fake.llm.generate([turn], SamplingParams(max_tokens=8, ignore_eos=True))
        assert second.num_cached_tokens <= START + len(first.text)
        num_hits += second.num_cached_tokens > 0
        fake.llm.reset_prefix_cache()
        (cold,) = fake.llm.generate([turn], replace(plain, max_tokens=8))
        assert second.token_ids == cold.token_ids
    assert num_hits > 20
    assert_drained(fake)


# -- end tokens and budgets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("is_eos", [True, False])
def test_an_end_token_anywhere_in_a_block_ends_the_output(path: Path, depth: int, is_eos: bool) -> None:
    """huggingface/transformers#47912: EOS at block position 0, 1, K-1 and as the bonus; right drafts go on."""
    for place in sorted({0, 1, depth - 1, depth}):
        token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 12]
        token_ids[1 + place] = EOS if is_eos else 14
        fake = says(path, LETTERS, token_ids)
        options: dict[str, Any] = {} if is_eos else {"stop_token_ids": [14]}
        output = served_alike(fake, PROMPT, (0, depth), max_tokens=14, logprobs=0, **options)
        assert (list(output.token_ids), output.finish_reason) == (token_ids[: place + 2], "stop")
        assert output.text == "".join(LETTERS[token_id] for token_id in token_ids[: place + 1])
        count = generated_tokens(fake, max_tokens=14, num_speculative_tokens=depth, **options)
        assert count == place + 2


@pytest.mark.parametrize("eos_depth", [0, 1, 2])
def test_an_end_token_that_is_only_drafted_ends_nothing(path: Path, eos_depth: int) -> None:
    """openvinotoolkit/openvino.genai#3293: the draft `[x, EOS]`, of which the target takes x and then prefers y."""
    table = one_after_another(range(15), 16, START)
    correct = right(table)

    def script(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        return EOS if depth == eos_depth else correct(request_id, position, depth, previous)

    fake = says(path, LETTERS, range(15), script)
    output = served_alike(fake, PROMPT, max_tokens=15, stop_token_ids=[EOS])
    assert (list(output.token_ids), output.finish_reason) == ([*range(15)], "length")
    assert EOS in [token_id for _, _, token_id in fake.drafter.drafted]


def test_no_more_tokens_than_asked_for(path: Path) -> None:
    """ohdearquant/lattice#245: all drafts are right, and the budget ends within the block."""
    for num_right in (8, 2, 0):
        fake = says(path, LETTERS, range(15))
        fake.drafter.script = right(one_after_another(range(15), 16, START), num_right)
        for max_tokens in (0, 1, 2, 3, 6, 11):
            output = served_alike(fake, PROMPT, (0, 1, 4, 8), max_tokens=max_tokens, logprobs=1)
            assert (list(output.token_ids), output.finish_reason) == ([*range(max_tokens)], "length")


def test_rejected_drafts_cost_nothing_in_the_budget(path: Path) -> None:
    """google-ai-edge/LiteRT-LM#2816: every draft is rejected, and all 16 tokens are delivered."""
    token_ids = [index % 14 for index in range(16)]
    fake = says(path, LETTERS, token_ids)
    fake.drafter.script = right(one_after_another(token_ids, 16, START), 0)
    output = served_alike(fake, PROMPT, (0, 1, 3), max_tokens=16)
    assert (list(output.token_ids), output.finish_reason) == (token_ids, "length")
    assert output.stats.num_drafted_tokens > 30
    assert output.stats.num_accepted_tokens == 0


@pytest.mark.parametrize(
    ("max_tokens", "depth", "num_right", "num_drafts"),
    [
        (1, 0, 8, [0]),
        (1, 3, 8, [0]),
        (4, 0, 8, [0] * 4),
        (4, 3, 8, [0, 2]),
        (4, 3, 0, [0, 2, 1, 0]),
        (4, 1, 8, [0, 1, 0]),
    ],
)
def test_no_forward_and_no_draft_is_for_nothing(
    path: Path, max_tokens: int, depth: int, num_right: int, num_drafts: list[int]
) -> None:
    """vllm-project/vllm#27922: as many forwards as tokens need, and no drafts where one token is left."""
    fake = says(path, LETTERS, range(15))
    fake.drafter.script = right(one_after_another(range(15), 16, START), num_right)
    forward, rows = fake.target.forward, list[int]()

    def watched(token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        rows.append(len(token_ids))
        return forward(token_ids, positions, paged)

    fake.target.forward = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=max_tokens, num_speculative_tokens=depth)
    (output,) = fake.llm.generate([PROMPT], params)
    assert len(output.token_ids) == max_tokens
    assert rows == [START, *(1 + count for count in num_drafts[1:])]
    assert len(fake.drafter.drafted) == sum(num_drafts)


# -- min_tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7])
def test_min_tokens_counts_tokens_before_the_end(path: Path, num_tokens: int) -> None:
    """vllm-project/vllm#46243: the target always prefers EOS, whether EOS is drafted, or what comes instead of it."""
    for script in (at_positions({}, EOS), at_positions({}, 0), at_positions({START + num_tokens: EOS}, 0)):
        fake = says(path, LETTERS, [EOS], script)
        output = served_alike(fake, PROMPT, min_tokens=num_tokens, max_tokens=20, logprobs=1)
        assert output.token_ids == (0,) * num_tokens + (EOS,)
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_the_state_of_rules_advances_with_every_accepted_token(path: Path, accepted: int) -> None:
    """sgl-project/sglang#33643: with a large frequency penalty no token comes again, and EOS comes after the eighth."""
    expected = [*range(8), EOS]
    logits = tensor([-index / 10 for index in range(15)] + [5.0])
    fake = says(path, LETTERS, [])
    fake.target.table = lambda token_id, position: logits

    def script(request_id: str, position: int, depth: int, previous: int) -> int:
        return expected[min(position - START, 8)] if depth < accepted else 14

    fake.drafter.script = script
    output = served_alike(fake, PROMPT, (0, 1, 4), frequency_penalty=10.0, min_tokens=8, max_tokens=20)
    assert (list(output.token_ids), output.finish_reason) == (expected, "stop")
    assert max(output.token_depths) == accepted


def test_min_tokens_do_not_count_the_prompt(path: Path) -> None:
    """NVIDIA/TensorRT-LLM#12358: a prompt of 32 tokens; without EOS the vocabulary's last token is one as others."""
    prompt = [1] * 32
    for drafted in (0, 3, 15):
        fake = says(path, LETTERS, [], at_positions({}, drafted))
        fake.target.table = one_after_another([3], 16, 32)
        output = served_alike(fake, prompt, min_tokens=8, max_tokens=20, stop_token_ids=[3])
        assert output.token_ids == (0,) * 8 + (3,)
        fake.target.table = one_after_another([15], 16, 32)
        for min_tokens in (0, 4):
            output = served_alike(fake, prompt, min_tokens=min_tokens, max_tokens=10, ignore_eos=True)
            assert (output.token_ids, output.finish_reason) == ((15,) * 10, "length")
