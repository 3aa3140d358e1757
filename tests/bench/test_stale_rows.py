"""Rows that are left as they were: other drafts, the same tokens."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from families.checkpoints_inkling import tiny_inkling

from foredraft import SamplingParams
from foredraft.bench.stale_rows import NUM_NAMES, NUM_SYMBOLS, VOCAB_SIZE, StaleDrafter, ToyLanguage, load_trained
from foredraft.cli.app import main
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine


def test_a_name_brings_its_phrase_again() -> None:
    language = ToyLanguage()
    for text in language.texts(8, 200, seed=3):
        assert len(text) == 200
        places = [place for place, token_id in enumerate(text[:-10]) if token_id >= NUM_SYMBOLS]
        assert [right - left for left, right in itertools.pairwise(places)] == [10] * (len(places) - 1)
        phrases = {text[place]: text[place + 1 : place + 10] for place in places}
        assert len(phrases) <= 5
        assert all(text[place + 1 : place + 10] == phrases[text[place]] for place in places)
        assert all(token_id < NUM_SYMBOLS for phrase in phrases.values() for token_id in phrase)


def test_texts_are_the_same_again_and_of_the_vocabulary() -> None:
    texts = ToyLanguage().texts(4, 50, seed=1)
    assert texts == ToyLanguage().texts(4, 50, seed=1)
    assert texts != ToyLanguage().texts(4, 50, seed=2)
    assert max(max(text) for text in ToyLanguage().prompts(40)) < VOCAB_SIZE == NUM_SYMBOLS + NUM_NAMES


def run(engine: Engine) -> tuple[list[list[int]], list[tuple[str, int, tuple[int, ...]]]]:
    """The tokens of a few requests, and the drafts of every step."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [engine.add_request(f"{n}", [(5 * n + i) % 60 for i in range(n)], params) for n in (1, 9, 30)]
    drafts = []
    while engine.has_unfinished:
        for update in engine.step():
            request = update.request
            drafts.append((request.request_id, request.num_tokens, request.draft_token_ids))
    return [request.token_ids for request in requests], drafts


def test_stale_rows_change_drafts_and_no_token(tmp_path: Path) -> None:
    llm = load_trained(tiny_inkling(tmp_path / "model"))
    (tokens, drafts), (stale_tokens, stale_drafts) = (
        run(engine) for engine in (llm.engine, build_engine(llm.loaded, llm.config, StaleDrafter))
    )
    assert tokens == stale_tokens

    def first_drafts(drafts: list[tuple[str, int, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
        made: dict[str, tuple[int, ...]] = {}
        for name, _, token_ids in drafts:
            if token_ids:
                made.setdefault(name, token_ids)
        return made

    assert first_drafts(drafts) == first_drafts(stale_drafts), "nothing is stale before the first rejection"
    assert drafts != stale_drafts


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "stale-rows.json"
    options = ["--num-prompts", "3", "--max-tokens", "12", "--output", str(output)]
    options += ["--target-steps", "2", "--module-steps", "2", "--chain-steps", "2"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "stale-rows", *options])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "left as they were" in printed
    assert "All outputs identical: yes" in printed
    record = json.loads(output.read_text())
    assert record["is_identical"]
    assert record["settings"]["training"]["chain_steps"] == 2
    assert len(record["trained"]["module_losses"]) == 8
    for kind in ("rebuilt", "stale"):
        assert len(record[kind]["accepted_rates"]) == 8
