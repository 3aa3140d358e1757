"""Cycles are told from an output's depths, and a smaller depth is foretold from a greater one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fake_model import FakeModel, one_after_another
from tiny_models import tiny_llama

from foredraft import SamplingParams
from foredraft.bench.acceptance import START, CycleCounts, forecast, forecast_table, foretell
from foredraft.cli.app import main


def counts_of(depth: int, *cycles: tuple[int, int]) -> CycleCounts:
    counts = CycleCounts(depth)
    for previous, accepted in cycles:
        counts.observe(previous, accepted)
    return counts


def test_cycles_follow_from_the_depths_of_tokens() -> None:
    counts = CycleCounts(3)
    counts.observe_output((0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0), 100)
    assert counts.counts == counts_of(3, (START, 2), (2, 0), (0, 3), (3, 1)).counts
    assert counts.traces == [[2, 0, 3, 1]]
    assert counts.num_left_out == 0


def test_a_cycle_that_the_end_cuts_is_left_out() -> None:
    counts = CycleCounts(3)
    counts.observe_output((0, 1, 2, 0, 1), 100)
    assert counts.counts == {(START, 2): 1}
    assert counts.num_left_out == 1


def test_cycles_with_fewer_drafts_at_the_limit_are_left_out() -> None:
    counts = CycleCounts(3)
    counts.observe_output((0, 0, 1, 0, 0, 0, 0), 7)  # begin at 1 (3 drafts), 2 (3), 4 (2), 5 (1) and 6 (none)
    assert counts.counts == {(START, 0): 1, (0, 1): 1}
    assert counts.num_left_out == 2


def test_rates_are_by_what_the_cycle_before_accepted() -> None:
    counts = counts_of(2, (START, 1), (1, 2), (2, 2), (2, 0), (0, 1))
    assert counts.previous == [START, 0, 1, 2]
    assert counts.rates(2) == [0.5, 0.5]
    assert counts.rates() == [0.8, 0.4]
    assert counts.restart_mix() == {START: 0.2, 0: 0.2, 1: 0.2, 2: 0.4}
    assert counts.mean_length == pytest.approx(2.2)
    assert counts.table().row_count == 5
    record = counts.to_dict()
    assert [row["previous_accepted"] for row in record["after"]] == ["start", "0", "1", "2"]


@pytest.mark.parametrize("depth", [1, 3])
def test_every_drafted_cycle_of_an_engine_is_counted_or_left_out(tmp_path: Path, depth: int) -> None:
    table = one_after_another([3, 1, 4, 1, 5, 9, 2, 6], 16)
    wrong_at = {5, 9, 10, 17}

    def script(request_id: str, position: int, index: int, previous: int) -> int:
        likeliest = int(table(previous, position - 1).argmax())
        return (likeliest + 1) % 16 if position in wrong_at else likeliest

    fake = FakeModel(tmp_path, table, script, num_speculative_tokens=depth)
    for max_tokens in range(2, 24):
        output = fake.llm.generate([[3]], SamplingParams(max_tokens=max_tokens))[0]
        counts = CycleCounts(depth)
        counts.observe_output(output.token_depths, max_tokens)
        assert counts.num_cycles + counts.num_left_out == output.stats.num_drafts


def chain(right: list[int], depth: int, length: int) -> CycleCounts:
    """The cycles over a text in which right[p] drafts from position p are right, however many are made."""
    depths, position = [0], 1
    while len(depths) < length:
        accepted = min(right[position], depth)
        depths += [*range(1, accepted + 1), 0]
        position += accepted + 1
    counts = CycleCounts(depth)
    counts.observe_output(depths[:length], 2 * length)
    return counts


def test_easy_and_hard_text_are_foretold_where_the_same_starts_mislead() -> None:
    # Text in stretches: easy tokens that any draft gets right, hard ones that none does. Deep cycles skip the former.
    draw, length = random.Random(3), 24_000
    is_right = [draw.random() < (0.97 if position // 40 % 2 else 0.4) for position in range(length + 20)]
    right = [0] * (length + 20)
    for position in reversed(range(length + 19)):
        right[position] = 1 + right[position + 1] if is_right[position] else 0
    source = chain(right, 8, length)
    for depth in (1, 2, 4):
        measured = chain(right, depth, length)
        one = forecast(source, depth, measured)
        assert measured.first_rate - one.same_starts.first_rate > 0.03
        assert abs(one.foretold.first_rate - measured.first_rate) < 0.01
        assert abs(one.foretold.mean_length - measured.mean_length) < 0.02
        errors = one.to_dict()["foretold"]
        assert errors["first_rate_error"] == one.foretold.first_rate - measured.first_rate
        assert one.foretold.restart_mix()[0] == pytest.approx(measured.restart_mix()[0], abs=0.02)


def test_the_depth_itself_is_replayed_as_it_was() -> None:
    source = CycleCounts(3)
    source.observe_output((0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 0, 0, 0, 0), 100)
    replayed = foretell(source, 3)
    assert replayed.counts == {(START, 2): 10, (2, 0): 10, (0, 3): 10, (3, 3): 10, (3, 1): 10, (1, 0): 10}


def test_independent_drafts_have_the_same_rates_at_any_depth() -> None:
    draw = random.Random(4)
    source, previous, trace = CycleCounts(6), START, list[int]()
    for _ in range(30_000):
        accepted = 0
        while accepted < 6 and draw.random() < 0.7:
            accepted += 1
        source.observe(previous, accepted)
        previous = accepted
        trace.append(accepted)
    source.traces.append(trace)
    one = forecast(source, 2, None)
    assert one.same_starts.first_rate == pytest.approx(0.7, abs=0.01)
    assert one.foretold.first_rate == pytest.approx(0.7, abs=0.01)
    assert "measured" not in one.to_dict()
    assert forecast_table([one]).row_count == 2


def test_the_command_measures_and_foretells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama(tmp_path / "model", num_modules=3)
    output = tmp_path / "acceptance.json"
    options = ["--model", str(path), "--random-tokens", "5", "--num-prompts", "3", "--max-tokens", "40"]
    options += ["--num-blocks", "64", "--device", "cpu", "--depths", "3,1", "--output", str(output)]
    options += ["--synthetic-acceptance", "0.8,0.6"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "acceptance", *options])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NOT the model's own output: acceptance by chance: synthetic 0.8,0.6")
    assert "K = 3, by what the cycle before accepted:" in printed
    record = json.loads(output.read_text())
    assert record["settings"]["random_tokens"] == 5
    assert record["settings"]["marks"] == ["acceptance by chance: synthetic 0.8,0.6"]
    assert [one["depth"] for one in record["depths"]] == [1, 3]
    for one in record["depths"]:
        assert one["num_cycles"] + one["num_left_out"] == one["speculation"]["num_drafts"]
    (one,) = record["forecasts"]
    assert (one["depth"], one["source_depth"]) == (1, 3)
    assert one["measured"]["first_rate"] == record["depths"][0]["rates"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "0,2"], "--depths must be numbers from 1 on"),
        (["--depths", "2", "-k", "1"], "--depths has 2, but num_speculative_tokens=1"),
    ],
)
def test_the_command_refuses_wrong_depths(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "acceptance", "--model", "nowhere", "--random-tokens", "5", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
