"""The benchmark of grammar libraries: its samples, what it times, and which libraries it finds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest
from byte_models import EOS_ID, byte_tokenizer
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from foredraft.bench import grammar
from foredraft.bench.grammar import NUM_DRAFTS, SAMPLES, Library, Sample, load_libraries, measure_grammar


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples_fit_their_grammars(sample: Sample) -> None:
    if sample.schema is not None:
        Draft202012Validator(json.loads(sample.schema)).validate(json.loads(sample.text))
    else:
        assert sample.regex is not None
        assert re.fullmatch(sample.regex, sample.text)


def test_llguidance_follows_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    libraries = load_libraries(byte_tokenizer(), 256, [EOS_ID])
    assert [library.name.split()[0] for library in libraries] == ["llguidance"]
    (library,) = measure_grammar(libraries, byte_tokenizer(), range(2)).libraries
    lengths = [len(sample.text.encode()) for sample in SAMPLES]
    assert library.num_refused == 0
    assert len(library.mask_seconds) == len(library.consume_seconds) == 2 * sum(lengths)
    assert len(library.block_seconds) == 2 * sum(length // NUM_DRAFTS for length in lengths)
    assert len(library.compile_seconds) == 2 * len(SAMPLES)
    assert min(library.mask_seconds + library.block_seconds + library.compile_seconds) > 0


@dataclass
class FakeFollower:
    """Allows everything but one token, and writes down what it is asked."""

    refused: int
    calls: list[str] = field(default_factory=list)

    def fill_mask(self) -> None:
        self.calls.append("mask")

    def consume(self, token_id: int) -> bool:
        self.calls.append("token")
        return token_id != self.refused

    def rollback(self, num_tokens: int) -> None:
        self.calls.append(f"back {num_tokens}")


def test_rows_are_followed_and_then_blocks_of_drafts() -> None:
    followers: list[FakeFollower] = []

    def compile_sample(sample: Sample) -> FakeFollower:
        followers.append(FakeFollower(ord("2")))
        return followers[-1]

    result = measure_grammar([Library("fake", compile_sample)], byte_tokenizer(), range(1))
    text = SAMPLES[-1].text
    rows, blocks = followers[-2:]
    assert rows.calls == ["mask", "token"] * len(text)
    block = ["mask", "token"] * NUM_DRAFTS + ["mask", f"back {NUM_DRAFTS}"] + ["token"] * NUM_DRAFTS
    assert blocks.calls == ["mask", *block * (len(text) // NUM_DRAFTS)]
    assert result.libraries[0].num_refused == sum(sample.text.count("2") for sample in SAMPLES)


def test_figures_are_in_microseconds() -> None:
    library = grammar.LibraryResult("fake", [1e-3] * 2, [1e-6, 3e-6, 2e-6], [4e-6] * 2, [5e-6] * 2)
    library.mask_seconds += [2e-6] * 97
    record = library.to_dict()
    assert record["compile_us"] == pytest.approx({"median": 1000, "percentile_99": 1000})
    assert record["mask_us"]["median"] == pytest.approx(2)
    assert 2 < record["mask_us"]["percentile_99"] <= 3
    assert record["num_masks"] == 100
    (row,) = grammar.GrammarResult((library,), ("one",)).table().columns[2].cells
    assert row == "2 / 2"
