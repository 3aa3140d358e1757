"""The comparison: turns in rotation, a closed loop, and figures against the first variant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.bench import plots
from foredraft.bench.compare import (
    Cell,
    CompareResult,
    CompareVariant,
    Turn,
    check_concurrencies,
    measure_compare,
)
from foredraft.bench.offline import run_closed_loop
from foredraft.cli.app import main
from foredraft.errors import ConfigError, ForedraftError, RequestError
from foredraft.statistics import SpeculationStats

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11]]
PARAMS = SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3, tokenizer=True)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, num_blocks=64, dtype="float32", device="cpu")


def variants_of(llm: LLM) -> list[CompareVariant]:
    return [CompareVariant(f"K={depth}", llm, depth) for depth in (0, 2, 3)]


def drafts(*accepted: int) -> SpeculationStats:
    stats = SpeculationStats()
    for number in accepted:
        stats.observe(2, number)
    return stats


def test_figures_are_medians_and_compared_at_the_same_concurrency() -> None:
    slow, fast = Turn(10.0, 0.5, 0.1), Turn(30.0, 0.1, None)
    cells = (
        Cell("K=0", 1, [slow, fast, slow], num_equal=5, num_compared=5),
        Cell("K=2", 1, [fast, fast, slow], drafts(1, 2), num_equal=4, num_compared=5),
        Cell("K=0", 8, [Turn(60.0, 0.1, 0.2)]),
        Cell("K=2", 8, [Turn(45.0, 0.1, 0.2)], drafts(0)),
    )
    result = CompareResult(cells, ("random weights",))
    assert [result.ratio(cell) for cell in cells] == [1, 3, 1, 0.75]
    assert [cell.mean_acceptance_length for cell in cells] == [None, 2.5, None, 1.0]
    assert cells[0].seconds_per_token == 0.1
    assert cells[1].first_token_seconds == 0.1
    assert result.speculation_of("K=2").num_drafts == 3
    assert result.equality == "All outputs identical: NO, 9 of 10"
    rows = [list(column.cells) for column in result.table().columns]
    assert rows[4] == ["", "+200 %", "", "-25 %"]
    assert rows[8] == ["5 of 5", "4 of 5", "", ""]
    record = result.to_dict()
    assert record["marks"] == ["random weights"]
    assert record["cells"][1]["rounds"][2] == {
        "tokens_per_second": 10.0,
        "first_token_seconds": 0.5,
        "seconds_per_token": 0.1,
    }


def test_variants_take_turns_and_never_find_each_others_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[str | None, int | None, int | None]] = []
    engine, add = llm.engine, llm.engine.add_request

    def watched(request_id: str, prompt: Any, params: SamplingParams, **others: Any) -> Any:
        if params.cache_salt != "warm-up":
            added.append((params.cache_salt, params.num_speculative_tokens, params.seed))
        return add(request_id, prompt, params, **others)

    monkeypatch.setattr(engine, "add_request", watched)
    result = measure_compare(variants_of(llm), PROMPTS, PARAMS, [1, 4], range(2))
    turns = list(dict.fromkeys((salt, depth) for salt, depth, _ in added))
    assert [depth for _, depth in turns] == [0, 2, 3, 0, 2, 3, 2, 3, 0, 2, 3, 0]
    assert len({salt for salt, _ in turns}) == len(turns) == 12
    assert [seed for _, _, seed in added] == [3, 4, 5, 6, 7] * 12
    assert result.equality == "All outputs identical: yes, 60 of 60"
    assert [(cell.name, cell.concurrency) for cell in result.cells] == [
        (f"K={depth}", concurrency) for concurrency in (1, 4) for depth in (0, 2, 3)
    ]
    for cell in result.cells:
        assert len(cell.turns) == 2
        assert cell.tokens_per_second > 0
        assert (cell.mean_acceptance_length is None) == (cell.name == "K=0")


def test_as_many_requests_run_as_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step = llm.engine, llm.engine.step
    running: list[int] = []

    def watched() -> Any:
        running.append(len(engine.scheduler.unfinished_ids))
        return step()

    monkeypatch.setattr(engine, "step", watched)
    turn = Turn.of(run_closed_loop(llm, PROMPTS, [SamplingParams(max_tokens=n) for n in (2, 5, 9, 3, 1)], 3))
    assert running == [3, 3, 3, 3, 3, 2, 1, 1, 1]
    assert turn.tokens_per_second > 0
    assert turn.seconds_per_token is not None


def test_outputs_by_chance_are_not_compared(path: Path) -> None:
    llm = LLM(path, num_blocks=64, dtype="float32", device="cpu", synthetic_acceptance=[0.9])
    result = measure_compare(variants_of(llm), PROMPTS, PARAMS, [2], range(1))
    assert result.marks == ("acceptance by chance: synthetic 0.9",)
    assert result.equality.startswith("Outputs were not compared")


def test_a_request_that_fails_is_an_error_and_leaves_none_running(llm: LLM) -> None:
    with pytest.raises((ForedraftError, RequestError), match="the prompt has 300 tokens"):
        measure_compare(variants_of(llm), [[1], [1] * 300], PARAMS, [1], range(1))
    assert not llm.engine.has_unfinished


def test_concurrencies_that_cannot_be_reached_are_refused() -> None:
    check_concurrencies([1, 8], 8, 8)
    with pytest.raises(ConfigError, match="concurrency 9 needs as many prompts, not 8"):
        check_concurrencies([9], 8, 64)
    with pytest.raises(ConfigError, match="concurrency 8 is more than max_num_seqs=4"):
        check_concurrencies([8], 8, 4)


def compare(path: Path, *options: str, code: int = 0) -> None:
    common = ["--model", str(path), "--num-prompts", "3", "--max-tokens", "6", "--concurrency", "1,3"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "compare", *common, "--num-blocks", "64", "--device", "cpu", *options])
    assert ended.value.code == code


def test_the_command_compares_depths_and_draws(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = tmp_path / "words.jsonl", tmp_path / "compare.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w1 w2", "w3", "w5 w6 w7")))
    options = ["--prompts", str(prompts), "--rounds", "1", "--output", str(output)]
    compare(path, *options, "--plot", str(tmp_path / "plots"))
    printed = capsys.readouterr().out
    assert "All outputs identical: yes, 18 of 18" in printed
    assert (tmp_path / "plots" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plots" / "compare.svg").read_text()
    record = json.loads(output.read_text())
    assert [(cell["variant"], cell["concurrency"]) for cell in record["cells"]] == [
        (f"K={depth}", concurrency) for concurrency in (1, 3) for depth in (0, 1, 2)
    ]
    assert record["settings"]["verification"] == "rejection"
    assert record["settings"]["prompts"] == "words.jsonl"
    assert record["marks"] == []


def test_the_command_compares_methods(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "compare.json"
    options = ["--random-tokens", "4", "--methods", "rejection,block", "--temperature", "1", "--rounds", "1"]
    compare(path, *options, "--output", str(output))
    assert "Outputs were not compared" in capsys.readouterr().out
    record = json.loads(output.read_text())
    assert {cell["variant"] for cell in record["cells"]} == {"rejection", "block"}
    assert all(cell["mean_acceptance_length"] >= 1 for cell in record["cells"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "1", "--methods", "block"], "--depths and --methods cannot be compared in one run"),
        (["--methods", "block"], "--methods need a --temperature above 0"),
        (["--methods", "magic", "--temperature", "1"], "verification must be one of rejection, block"),
        (["--concurrency", "4"], "concurrency 4 needs as many prompts, not 3"),
        (["--depths", "3", "-k", "2"], "--depths has 3, but num_speculative_tokens=2"),
        (["--plot", "figure.pdf"], "a file that ends in .svg or .png, not figure.pdf"),
    ],
)
def test_the_command_refuses_wrong_settings(
    path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    compare(path, "--random-tokens", "4", *options, code=2)
    assert message in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.plot_files(Path("a.png")) == [Path("a.png")]
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'foredraft\[plots\]'"):
        plots.plot_files(Path("a.png"))


def test_a_variant_stands_in_one_column_only(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(path, "--depths", "0,2,0", code=2)
    assert "--depths must name each variant once" in capsys.readouterr().err
