"""Heads for drafts: fewer tokens, fewer bits, and the files that rank tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from byte_models import byte_llama
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.errors import ConfigError
from foredraft.models.draft_head import DraftHead
from foredraft.models.draft_vocab import (
    builtin_ranking,
    count_tokens,
    frequent_tokens,
    ranked,
    read_ranking,
    read_texts,
)

NUM_TOKENS, SIZE = 50, 24
CHOSEN = torch.tensor([41, 3, 17, 4, 49, 0])
BITS = pytest.mark.parametrize("bits", [16, 8])


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(NUM_TOKENS, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(7, SIZE, generator=torch.Generator().manual_seed(1))


@BITS
@pytest.mark.parametrize("has_bias", [False, True])
def test_columns_are_the_tokens_in_order(weight: Tensor, hidden: Tensor, bits: int, has_bias: bool) -> None:
    bias = torch.linspace(-1, 1, NUM_TOKENS) if has_bias else None
    head = DraftHead.build(weight, bias, CHOSEN, bits)
    assert head.token_ids is not None
    assert head.token_ids.tolist() == sorted(CHOSEN.tolist())
    assert (head.num_tokens, head.vocab_size) == (6, NUM_TOKENS)
    expected = torch.nn.functional.linear(hidden, weight, bias)[:, head.token_ids]
    logits = head.logits(hidden)
    torch.testing.assert_close(logits, expected, atol=1e-5 if bits == 16 else 0.2, rtol=0.0)
    assert torch.equal(head.argmax(hidden), head.token_ids[logits.argmax(dim=-1)])
    assert torch.equal(head.full_ids(torch.tensor([[5, 0]])), torch.tensor([[49, 0]]))


def test_all_tokens_are_a_view(weight: Tensor, hidden: Tensor) -> None:
    head = DraftHead.build(weight[:20])
    assert head.weight.data_ptr() == weight.data_ptr()
    assert head.token_ids is None
    assert torch.equal(head.logits(hidden), hidden @ weight[:20].T)
    assert head.widen(hidden, 0.0) is hidden
    assert head.narrow(hidden) is hidden


def test_int8_rows_stay_int8(weight: Tensor, hidden: Tensor) -> None:
    head = DraftHead.build(weight, bits=8)
    assert (head.weight.dtype, head.scales is not None) == (torch.int8, True)
    again = DraftHead.build(head.weight, token_ids=CHOSEN, scales=head.scales)
    torch.testing.assert_close(again.logits(hidden), head.logits(hidden)[:, sorted(CHOSEN.tolist())])


@BITS
def test_the_lowest_token_on_a_tie(weight: Tensor, bits: int) -> None:
    weight[[41, 17, 49]] = 5.0
    head = DraftHead.build(weight, None, CHOSEN, bits)
    assert head.argmax(torch.ones(2, SIZE)).tolist() == [17, 17]


def test_rows_by_token_and_by_column(weight: Tensor) -> None:
    head = DraftHead.build(weight, None, CHOSEN)
    rows = torch.rand(2, 6)
    wide = head.widen(rows, -1.0)
    assert wide.shape == (2, NUM_TOKENS)
    assert torch.equal(head.narrow(wide), rows)
    assert int((wide == -1.0).sum()) == 2 * (NUM_TOKENS - 6)
    assert torch.equal(torch.zeros(NUM_TOKENS)[head.known], torch.zeros(6))


# -- rankings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path = byte_llama(tmp_path_factory.mktemp("ranking") / "model")
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return loaded


@pytest.mark.parametrize(
    ("name", "contents"),
    [("a.txt", "aaabbc"), ("b.jsonl", '{"text": "aab", "more": ["c", {"deep": "ba"}]}\n\n{"number": 3}\n')],
)
def test_a_text_is_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, contents: str) -> None:
    (tmp_path / name).write_text(contents)
    assert tokenizer.convert_ids_to_tokens(read_ranking(tmp_path / name, tokenizer)) == ["a", "b", "c"]


def test_a_list_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[5, 2, 9]")
    assert read_ranking(tmp_path / "a.json", None) == [5, 2, 9]


def test_the_order_of_tokens() -> None:
    assert frequent_tokens([5, 2, 9], 7, 50, always=[8, 2]).tolist() == [2, 8, 5, 9, 0, 1, 3]
    assert frequent_tokens([5, 2, 9], 1, 50, always=[]).tolist() == [5]
    assert frequent_tokens([5, 2, 9], 2, 50, always=[50, 3]).tolist() == [3, 5], "an end beyond the head is none"
    with pytest.raises(ConfigError, match="draft_vocab has token id 50, but the model has 50 token ids"):
        frequent_tokens([5, 50], 1, 50, always=[])


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.json", "[1, true]", "is not a list of token ids"),
        ("a.json", "[1, -1]", "is not a list of token ids"),
        ("a.json", "{}", "is not a list of token ids"),
        ("a.json", "[", "is not JSON"),
        ("a.txt", "text", "is a text, but the model has no tokenizer"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, contents: str | None, message: str) -> None:
    if contents is not None:
        (tmp_path / name).write_text(contents)
    with pytest.raises(ConfigError, match=f"draft_vocab=.*{message}"):
        read_ranking(tmp_path / name, None)


def test_texts_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 is not JSON"):
        list(read_texts(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match=r"must end in \.json"):
        list(read_texts(tmp_path / "a.pdf"))


def test_equal_counts_are_in_the_order_of_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    counts = count_tokens(["cab", "c"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ranked(counts)) == ["c", "a", "b"]


def test_the_builtin_ranking() -> None:
    ranking = json.loads(builtin_ranking().read_text())
    assert len(set(ranking)) == len(ranking) == 5717
    assert max(ranking) < 49152
