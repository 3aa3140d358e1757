"""Peers: turns in rotation, failures that harm nobody else, and transformers itself on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_models import tiny_llama

from foredraft import LLM
from foredraft.bench.peer_engines import OurEngine, TransformersBatching, TransformersGenerate
from foredraft.bench.peers import Job, Peer, PeerResult, PeersResult, measure_peers, mixed_jobs
from foredraft.bench.variants import Generation
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.statistics import SpeculationStats

JOBS = [Job((1, 2), 4), Job((3,), 6)]


class FakePeer:
    """Takes as long as it is told to, and writes down its turns; at the end of the list it fails."""

    def __init__(self, name: str, seconds: list[float], log: list[str], *, token: int = 7) -> None:
        self.name = name
        self._seconds = iter(seconds)
        self._log = log
        self._token = token

    def generate(self, jobs: Sequence[Job]) -> Generation:
        self._log.append(self.name)
        seconds = next(self._seconds, None)
        if seconds is None:
            raise RuntimeError("out of memory")
        stats = SpeculationStats()
        stats.observe(2, 1)
        return Generation([(self._token,) * job.num_tokens for job in jobs], seconds, stats)


def test_peers_take_turns_in_rotation_after_a_warm_up() -> None:
    log: list[str] = []
    seen: list[list[int]] = []

    def on_turn(result: PeersResult) -> None:
        seen.append([len(peer.tokens_per_second) for peer in result.peers])

    fakes = [FakePeer("a", [1.0, 2.0, 1.0, 5.0], log), FakePeer("b", [1.0, 1.0, 4.0, 1.0], log, token=8)]
    result = measure_peers("some", fakes, JOBS, range(3), on_turn=on_turn)
    assert log == [*"ab", *"ab", *"ba", *"ab"]
    assert seen == [[0, 0], [0, 0], [1, 0], [1, 1], [1, 2], [2, 2], [3, 2], [3, 3]]
    first, second = result.peers
    assert first.tokens_per_second == [5.0, 10.0, 2.0]
    assert first.median_tokens_per_second == 5.0
    assert result.ratio(second, first) == 2.0
    assert first.mean_acceptance_length == 2.0
    assert (first.num_equal, first.num_compared, second.num_equal, second.num_compared) == (6, 6, 0, 6)
    record = result.to_dict()
    assert record["peers"][0]["ratios"] == {"a": 1.0, "b": 0.5}
    assert [list(column.cells) for column in result.table().columns][2] == ["1.00", "2.00"]
    assert result.failures() == []


def test_names_are_no_markup() -> None:
    fakes = [FakePeer("[/]", [1.0, 1.0], []), FakePeer("[red]a", [1.0, 1.0], [])]
    table = measure_peers("some", fakes, JOBS, range(1)).table()
    console = Console(width=200, file=StringIO(), color_system=None)
    console.print(table)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]a" in written
    assert "x [/]" in written


def test_one_that_fails_takes_no_further_turn_and_the_others_go_on() -> None:
    log: list[str] = []
    fakes = [FakePeer("never", [], log), FakePeer("once", [1.0, 1.0], log), FakePeer("good", [1.0] * 4, log)]
    result = measure_peers("some", fakes, JOBS, range(3), is_compared=False)
    assert (log.count("never"), log.count("once"), log.count("good")) == (1, 3, 4)
    assert result.failures() == ["never: RuntimeError: out of memory", "once: RuntimeError: out of memory"]
    never, once, good = result.peers
    assert never.median_tokens_per_second is None
    assert once.median_tokens_per_second == 10.0
    assert result.ratio(good, never) is None
    assert good.num_compared == 0
    assert result.table().row_count == 3


def test_too_few_tokens_are_a_failure() -> None:
    class Short(FakePeer):
        def generate(self, jobs: Sequence[Job]) -> Generation:
            return Generation([(7,)], 1.0)

    result = measure_peers("some", [Short("short", [], [])], JOBS, range(1))
    assert result.failures() == ["short: it made 1 tokens in 1 outputs, not 10 in 2"]


def test_lengths_are_drawn_from_their_ranges_and_prompts_from_the_text() -> None:
    jobs = mixed_jobs(list(range(50)), 200, (3, 60), (2, 5))
    assert {len(job.prompt) for job in jobs} <= set(range(3, 61))
    assert {job.num_tokens for job in jobs} == {2, 3, 4, 5}
    assert all((b - a) % 50 == 1 for job in jobs for a, b in zip(job.prompt, job.prompt[1:]))
    assert jobs == mixed_jobs(list(range(50)), 200, (3, 60), (2, 5))
    assert jobs != mixed_jobs(list(range(50)), 200, (3, 60), (2, 5), seed=1)
    assert PeerResult("a").mean_acceptance_length is None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_modules=2, eos_token_id=3)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, num_blocks=64, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def others(path: Path) -> LoadedModel:
    return load_checkpoint(
        path, None, dtype=torch.float32, device=torch.device("cpu"), attn_implementation="sdpa", num_modules=2
    )


def test_all_ways_to_generate_give_the_same_tokens(llm: LLM, others: LoadedModel) -> None:
    peers: list[Peer] = [
        OurEngine(llm, 0, 1),
        OurEngine(llm, 2, 1),
        TransformersGenerate("dynamic", others.target),
        TransformersGenerate("static", others.target, cache="static"),
        TransformersGenerate("modules", others.target, mtp=others.mtp),
    ]
    jobs = mixed_jobs(range(4, 60), 3, (5, 20), (12, 12))
    result = measure_peers("one at a time", peers, jobs, range(1))
    assert result.failures() == []
    assert [(peer.num_equal, peer.num_compared) for peer in result.peers] == [(3, 3)] * 5
    assert result.peers[0].mean_acceptance_length is None
    assert (result.peers[1].mean_acceptance_length or 0) >= 1


def test_continuous_batching_gives_the_same_tokens_turn_after_turn(llm: LLM, others: LoadedModel) -> None:
    jobs = mixed_jobs(range(4, 60), 5, (3, 40), (2, 9))
    with TransformersBatching(others.target) as batching:
        result = measure_peers("together", [OurEngine(llm, 1), batching], jobs, range(2))
    assert result.failures() == []
    assert [(peer.num_equal, peer.num_compared) for peer in result.peers] == [(10, 10)] * 2


def test_no_turn_finds_what_another_has_cached(llm: LLM) -> None:
    llm.reset_stats()
    engine = OurEngine(llm, 1)
    for _ in range(2):
        engine.generate([Job(tuple(range(40)), 2)])
    assert llm.stats.num_cached_tokens == 0
