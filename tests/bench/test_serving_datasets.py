"""What a benchmark asks for: datasets, bodies, and warm-ups that leave nothing in the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.bench.serving.datasets import Dataset, WorkItem, warm_up_items
from foredraft.bench.serving.request_body import RequestOptions
from foredraft.errors import ConfigError


def write_lines(path: Path, *lines: object) -> Path:
    file = path / "work.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"})
    data = Dataset("prompts", num_prompts=2, prompts=file, max_tokens=9)
    assert data.items() == [WorkItem("one", 9), WorkItem("two", 9)]
    assert data.settings() == {
        "dataset": "prompts",
        "num_prompts": 2,
        "seed": 0,
        "max_tokens": 9,
        "prompts": "work.jsonl",
    }


def test_jsonl_has_texts_ids_messages_and_lengths(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hello"}
    file = write_lines(
        tmp_path,
        {"prompt": "one", "output_tokens": 3},
        "",
        {"prompt": [4, 5]},
        {"messages": [message]},
        {"prompt": "z"},
    )
    assert Dataset("jsonl", num_prompts=3, prompts=file).items() == [
        WorkItem("one", 3),
        WorkItem((4, 5), 128),
        WorkItem("", 128, (message,)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ([1], 'not a JSON object with the key "prompt" or'),
        ({"prompt": "x", "messages": []}, 'not a JSON object with the key "prompt" or'),
        ({"prompt": ""}, "prompt must be text or a list of token ids, not ''"),
        ({"prompt": [1, True]}, "prompt must be text or a list of token ids"),
        ({"prompt": []}, "prompt must be text or a list of token ids"),
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": ["x"]}, "messages must be a list of objects"),
        ({"prompt": "x", "output_tokens": 0}, "output_tokens must be an integer from 1"),
        ({"prompt": "x", "output_tokens": 1.5}, "output_tokens must be an integer from 1"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: object, message: str) -> None:
    file = write_lines(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError, match=r"work\.jsonl, line 2: ") as error:
        Dataset("jsonl", num_prompts=2, prompts=file).items()
    assert message in str(error.value)


def test_too_few_lines_or_no_file_is_an_error(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"prompt": "one"})
    with pytest.raises(ConfigError, match=r"2 prompts asked for, but .* has 1"):
        Dataset("jsonl", num_prompts=2, prompts=file).items()
    with pytest.raises(ConfigError, match="cannot be read"):
        Dataset("jsonl", num_prompts=2, prompts=tmp_path / "none").items()


def test_random_lengths_keep_to_their_range_and_their_seed() -> None:
    data = Dataset("random", num_prompts=200, seed=3, input_len=10, output_len=20, range_ratio=0.5, vocab_size=50)
    items = data.items()
    lengths = {len(item.prompt) for item in items}
    assert lengths == set(range(5, 16))
    assert {item.max_tokens for item in items} == set(range(10, 31))
    ids = {token_id for item in items for token_id in item.prompt}
    assert ids == set(range(50))
    assert items == data.items()
    assert items != Dataset("random", num_prompts=200, seed=4, input_len=10, output_len=20, range_ratio=0.5).items()


def test_without_a_range_all_lengths_are_equal_and_the_models_vocabulary_counts() -> None:
    items = Dataset("random", num_prompts=50, input_len=40, output_len=1).items(vocab_size=3)
    assert {(len(item.prompt), item.max_tokens) for item in items} == {(40, 1)}
    assert {token_id for item in items for token_id in item.prompt} == {0, 1, 2}


def test_prefixes_are_shared_in_turn_and_nothing_else_is() -> None:
    items = Dataset("shared-prefix", num_prompts=7, prefix_len=30, num_prefixes=3, suffix_len=20, output_len=5).items()
    assert {(len(item.prompt), item.max_tokens) for item in items} == {(50, 5)}
    beginnings = [item.prompt[:30] for item in items]
    assert len(set(beginnings)) == 3
    assert beginnings[:3] * 2 == beginnings[:6]
    assert len({item.prompt[30:] for item in items}) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sharegpt"}, "dataset must be one of prompts, random, jsonl, shared-prefix, not 'sharegpt'"),
        ({"kind": "prompts", "input_len": 3}, "input_len has no effect with dataset=prompts: it belongs to random"),
        ({"kind": "random", "max_tokens": 3}, "max_tokens has no effect with dataset=random"),
        ({"kind": "random", "prompts": Path("x")}, "prompts has no effect with dataset=random"),
        ({"kind": "random", "input_len": 0}, "input_len must be an integer from 1"),
        ({"kind": "random", "range_ratio": 1.0}, "range_ratio must be from 0 to less than 1"),
        ({"kind": "random", "range_ratio": float("nan")}, "range_ratio must be from 0 to less than 1"),
        ({"kind": "jsonl"}, "dataset=jsonl needs a file"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_settings_that_are_wrong_or_of_no_use_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Dataset(**settings)
    assert message in str(error.value)


def test_a_warm_up_begins_differently() -> None:
    message = {"role": "user", "content": "hello"}
    items = [WorkItem("text", 4), WorkItem((1, 2, 3), 5), WorkItem("", 6, (message, message))]
    assert warm_up_items(items, 4) == [
        WorkItem("Warm-up 0. text", 4),
        WorkItem((3, 2, 1), 5),
        WorkItem("", 6, ({"role": "user", "content": "Warm-up 2. hello"}, message)),
        WorkItem("Warm-up 3. text", 4),
    ]
    assert warm_up_items(items, 0) == []


def test_a_body_has_what_was_asked_for_and_nothing_else() -> None:
    plain = RequestOptions().body(WorkItem((1, 2), 7), 3, "m")
    assert plain == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    options = RequestOptions("chat", 0.5, 10, True, 4, {"top_p": 0.9, "temperature": 0.7})
    body = options.body(WorkItem("hello", 7), 3, "m")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 7,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 13,
        "ignore_eos": True,
        "num_speculative_tokens": 4,
        "top_p": 0.9,
    }
    assert options.body(WorkItem("", 7, ({"role": "system"},)), 0, "m")["messages"] == [{"role": "system"}]


def test_what_an_endpoint_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt 1 has messages: they need endpoint=chat"):
        RequestOptions("completions").check([WorkItem("x", 1), WorkItem("", 1, ({},))])
    with pytest.raises(ConfigError, match="prompt 0 is made of token ids: they need endpoint=completions"):
        RequestOptions("chat").check([WorkItem((1,), 1)])
    with pytest.raises(ConfigError, match="extra_body must leave n, stream to the benchmark"):
        RequestOptions(extra_body={"stream": False, "n": 2, "top_k": 3})
    with pytest.raises(ConfigError, match="endpoint must be one of completions, chat"):
        RequestOptions("embeddings")  # type: ignore[arg-type]
