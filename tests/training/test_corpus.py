"""Rows of text: conversations with their frame, user turns from files, shards on disk, and the order of rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import write_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.errors import ConfigError
from foredraft.training.chat_frame import ChatFrame, chat_frame
from foredraft.training.conversation import Conversation
from foredraft.training.corpus import Corpus, CorpusDirectory
from foredraft.training.recipe import Recipe
from foredraft.training.row_order import RowOrder, seed_of
from foredraft.training.user_turns import read_user_turns

FRAME = ChatFrame((1, 2), (9, 3), (9, 4))
RECIPE = Recipe(row_length=20, depths=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 64)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return loaded


def test_a_conversation_takes_turns_until_the_row_is_full() -> None:
    talk = Conversation(0, RECIPE, FRAME, FRAME.opening, ())
    assert talk.params().stop_token_ids == (9,)
    assert talk.params().temperature == pytest.approx(0.9, abs=0.1)
    talk.add_turn([20, 21, 9], is_stopped=True)
    talk.add_turn([30, 31, 32, 7], is_stopped=True)  # ended by another token than the template's
    talk.add_turn([22, 9], is_stopped=True)
    assert talk.params().max_tokens == 6
    talk.add_turn([33, 34, 35, 36, 37, 38], is_stopped=False)
    assert talk.is_full
    assert talk.token_ids == [1, 2, 20, 21, 9, 3, 30, 31, 32, 9, 4, 22, 9, 3, 33, 34, 35, 36, 37, 38]
    spoken = [token for token, flag in zip(talk.token_ids, talk.is_spoken) if flag]
    assert spoken == [30, 31, 32, 9, 33, 34, 35, 36, 37, 38]


def test_temperatures_are_mixed_and_follow_from_the_number() -> None:
    talks = [Conversation(number, RECIPE, FRAME, FRAME.opening, (5, 6)) for number in range(400)]
    temperatures = [talk.params().temperature for talk in talks]
    greedy = sum(temperature == 0 for temperature in temperatures)
    assert 160 < greedy < 240
    assert all(temperature == 0 or 0.4 <= temperature <= 1.0 for temperature in temperatures)
    again = [Conversation(number, RECIPE, FRAME, FRAME.opening, (5, 6)).params() for number in range(5)]
    assert again == [Conversation(number, RECIPE, FRAME, FRAME.opening, (5, 6)).params() for number in range(5)]
    assert talks[0].token_ids == [1, 2, 5, 6, 9, 3]


def test_without_a_frame_the_target_goes_on_with_a_text() -> None:
    talk = Conversation(0, RECIPE, None, (1,), (5, 6))
    assert talk.params().ignore_eos
    talk.add_turn(list(range(17)), is_stopped=False)
    assert talk.is_full
    assert talk.is_spoken == [False] * 3 + [True] * 17


def test_the_frame_is_what_the_template_puts_around_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "w1 {% for m in messages %}{% if m['role'] == 'user' %}w2 {% else %}w3 {% endif %}"
        "{{ m['content'] }} w9 {% endfor %}"
        "{% if add_generation_prompt %}w3 {% endif %}"
    )
    assert chat_frame(tokenizer) == ChatFrame((1, 2), (9, 3), (9, 2))
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert chat_frame(tokenizer) is None
    tokenizer.chat_template = None
    assert chat_frame(tokenizer) is None


def test_user_turns_are_read_from_text_and_from_json(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    text, objects = tmp_path / "turns.txt", tmp_path / "turns.jsonl"
    text.write_text("w3 w4\n\nw5 w6 w7 w8\n")
    objects.write_text('{"prompt": "w3"}\n{"token_ids": [7, 8]}\n')
    assert read_user_turns(text, tokenizer, 64, 3) == [(3, 4)]
    assert read_user_turns(objects, tokenizer, 64, 3) == [(3,), (7, 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 3}', "line 1 must be an object with prompt"),
        ("[", "line 1 is not JSON"),
        ('{"token_ids": [64]}', "token_ids must be integers from 0 to 63"),
        ('{"prompt": "w1"}', "the target has no tokenizer"),
        ('{"token_ids": []}', "has no turn of at most 3 tokens"),
    ],
)
def test_bad_user_turns_are_refused(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_user_turns(file, None, 64, 3)


def rows(count: int, first: int = 0) -> Corpus:
    token_ids = torch.arange(first, first + count)[:, None].expand(-1, 4).int()
    return Corpus(token_ids, token_ids % 2 == 0)


def test_shards_are_read_in_order_whoever_wrote_them_when(tmp_path: Path) -> None:
    directory = CorpusDirectory(tmp_path)
    directory.open({"row_length": 4})
    for shard in (2, 0, 1):
        directory.write(shard, rows(3, 3 * shard))
    assert directory.has(1)
    assert not directory.has(3)
    corpus = directory.read()
    assert corpus.token_ids[:, 0].tolist() == list(range(9))
    assert torch.equal(corpus.is_spoken, corpus.token_ids % 2 == 0)
    assert len(directory.read(limit=4)) == 4
    trained, heldout = corpus.split(2, 0.5)
    assert (trained.token_ids[:, 0].tolist(), heldout.token_ids[:, 0].tolist()) == ([0, 1, 2], [7, 8])
    with pytest.raises(ConfigError, match="none are left"):
        corpus.split(9, 1.0)


def test_what_is_damaged_or_of_another_recipe_is_refused(tmp_path: Path) -> None:
    directory = CorpusDirectory(tmp_path)
    with pytest.raises(ConfigError, match="run the stage synthesise first"):
        directory.read()
    directory.open({"row_length": 4, "num_rows": 3})
    directory.open({"row_length": 4, "num_rows": 9}, except_for=("num_rows",))
    with pytest.raises(ConfigError, match="row_length was 4 and is 5"):
        directory.open({"row_length": 5})
    directory.write(0, rows(3))
    (file,) = tmp_path.glob("rows-*")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match="is damaged"):
        directory.read()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_tokens_are_ranked_by_how_often_they_stand_in_it() -> None:
    corpus = Corpus(torch.tensor([[5, 2, 2], [7, 5, 2]]), torch.ones(2, 3, dtype=torch.bool))
    assert corpus.token_ranking() == [2, 5, 7]


def test_every_row_comes_once_in_a_pass_and_processes_share_a_step() -> None:
    order = RowOrder(10, 4, seed=3)
    seen = torch.cat([order.rows(step) for step in range(5)]).tolist()
    assert Counter(seen) == dict.fromkeys(range(10), 2)
    assert seen[:10] != seen[10:]
    again = RowOrder(10, 4, seed=3)
    for step in (4, 0, 2):  # a function of the step, whatever came before
        whole = order.rows(step).tolist()
        assert whole == again.rows(step).tolist()
        assert [*again.rows(step, 0, 2).tolist(), *again.rows(step, 1, 2).tolist()] == whole[::2] + whole[1::2]
    assert seed_of(1, "draws", 2) != seed_of(1, "draws", 3)
