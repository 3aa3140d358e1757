"""Engines in processes of their own: what they answer, how they fail, and that they run in their turns only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_llama

from foredraft import LLM
from foredraft.bench.peer_engines import ExternalEngine, OurEngine
from foredraft.bench.peer_process import PeerProcess
from foredraft.bench.peers import Job, Peer, measure_peers
from foredraft.errors import ForedraftError

JOBS = [Job((1, 2), 3), Job((5,), 2)]
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"

GREET = """
import json, os, subprocess, sys, time

def say(**fields):
    print(json.dumps(fields), flush=True)

say(ready=True, version="1.0")
for line in sys.stdin:
    request = json.loads(line)
    started = time.perf_counter()
    outputs = [[prompt[0] + i for i in range(n)] for prompt, n in zip(request["prompts"], request["num_tokens"])]
    seconds = time.perf_counter() - started
"""

Make = Callable[..., PeerProcess]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(body: str, *, deadline: float = 60.0, grace: float = 10.0, greet: str = GREET) -> PeerProcess:
        script = tmp_path / "peer.py"
        script.write_text(greet + "".join(f"    {line}\n" for line in body.splitlines()))
        return PeerProcess("some", [sys.executable, str(script)], deadline, grace)

    return make


def state(pid: int) -> str:
    """The letter of /proc: R, S, T (stopped), Z; X where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def becomes(pid: int, states: str) -> bool:
    """Whether the process is in one of the states soon."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if state(pid) in states:
            return True
        time.sleep(0.01)
    return False


def test_outputs_in_the_order_of_the_jobs_and_what_it_says_about_itself(make: Make) -> None:
    drafts = '{"num_cycles": 2, "num_drafts": 2, "drafted_by_depth": [2], "accepted_by_depth": [1]}'
    with make(f"say(outputs=outputs, seconds=seconds, speculation={drafts})") as process:
        generation = process.generate(JOBS, is_together=True)
        assert process.about == {"version": "1.0"}
        again = process.generate(JOBS[1:], is_together=True)
    assert generation.token_ids == [(1, 2, 3), (5, 6)]
    assert generation.speculation is not None
    assert generation.speculation.mean_acceptance_length == 1.5
    assert again.token_ids == [(5, 6)]


def test_seconds_are_those_of_the_process(make: Make) -> None:
    with make("time.sleep(0.2)\nsay(outputs=outputs, seconds=0.125)") as process:
        assert process.generate(JOBS, is_together=False).seconds == 0.125


def test_a_request_larger_than_a_pipe_arrives_whole(make: Make) -> None:
    with make("say(outputs=[[len(request['prompts'][0])]], seconds=seconds)") as process:
        assert process.generate([Job((70_000,) * 100_000, 1)], is_together=True).token_ids == [(100_000,)]


def test_it_is_told_whether_jobs_run_together(make: Make) -> None:
    with make("say(outputs=[[int(request['together'])]], seconds=seconds)") as process:
        peers = [ExternalEngine(process, is_together=is_together) for is_together in (False, True)]
        assert [peer.generate([Job((1,), 1)]).token_ids for peer in peers] == [[(0,)], [(1,)]]


def test_it_is_stopped_between_turns_with_its_whole_group(make: Make) -> None:
    body = """child = subprocess.Popen(["sleep", "600"])
say(outputs=[[os.getpid(), child.pid]], seconds=seconds)"""
    with make(body) as process:
        for _ in range(2):
            ((own, child),) = process.generate([Job((1,), 2)], is_together=False).token_ids
            assert becomes(own, "T")
            assert becomes(child, "T")
    assert state(own) == "X"
    assert becomes(child, "XZ")


def test_it_may_end_by_itself_when_it_is_closed(make: Make, tmp_path: Path) -> None:
    note = tmp_path / "note"
    body = f"""say(outputs=outputs, seconds=seconds)
import atexit, pathlib
atexit.register(pathlib.Path({str(note)!r}).touch)"""
    with make(body) as process:
        process.generate(JOBS, is_together=True)
    assert note.exists()


def test_one_that_does_not_end_is_killed(make: Make) -> None:
    body = "say(outputs=[[os.getpid()]], seconds=seconds)\nwhile True: time.sleep(1)"
    with make(body, grace=0.2) as process:
        ((pid,),) = process.generate([Job((1,), 1)], is_together=True).token_ids
    assert state(pid) == "X"


def test_an_exception_ends_it(make: Make) -> None:
    def fail(process: PeerProcess) -> int:
        with process:
            ((pid,),) = process.generate([Job((1,), 1)], is_together=True).token_ids
            pids.append(pid)
            raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fail(make("say(outputs=[[os.getpid()]], seconds=seconds)"))
    assert state(pids[0]) == "X"


def test_it_ends_with_us_however_we_end(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(GREET + "    say(outputs=[[os.getpid()]], seconds=seconds)\n")
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import os, sys\n"
        "from foredraft.bench.peer_process import PeerProcess\n"
        "from foredraft.bench.peers import Job\n"
        f"process = PeerProcess('some', [sys.executable, {str(peer)!r}])\n"
        "print(process.generate([Job((1,), 1)], is_together=True).token_ids[0][0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, str(parent)], check=False, capture_output=True, text=True)
    assert ended.returncode == -9
    assert becomes(int(ended.stdout), "XZ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('out of memory')", "it ended with exit code 1: out of memory"),
        ("print('one', file=sys.stderr)\nprint('two', file=sys.stderr)\nos._exit(3)", "exit code 3: one / two"),
        ("os.kill(os.getpid(), 9)", "it ended with exit code -9"),
        ("print('Loading 100%', flush=True)", "it answered 'Loading 100%\\n', which is no JSON object"),
        ("print('[]', flush=True)", "it answered '[]\\n', which is no JSON object"),
        ("say(seconds=seconds)", "its answer cannot be understood: KeyError: 'outputs'"),
        ("say(outputs=[['x']], seconds=seconds)", "its answer cannot be understood: ValueError"),
        ("say(outputs=outputs, seconds=seconds, speculation={'drafts': 1})", "cannot be understood: TypeError"),
        ("say(outputs=outputs, seconds=seconds, speculation={'num_drafts': 'x'})", "must consist of counts"),
        ("say(outputs=outputs, seconds=seconds, speculation={'num_drafts': -1})", "must consist of counts"),
        ("say(outputs=outputs, seconds=seconds, speculation={'drafted_by_depth': None})", "lists of one length"),
        ("say(outputs=outputs, seconds=seconds, speculation={'drafted_by_depth': [3]})", "lists of one length"),
        ("say(outputs=[[float('inf')]], seconds=seconds)", "cannot be understood: OverflowError"),
        ("print('[' * 200000, flush=True)", "which is no JSON object"),
        ("say(outputs=outputs, seconds=100)", "it says that it took 100 s, and has answered after"),
        ("say(outputs=outputs, seconds=0)", "it says that it took 0 s"),
    ],
)
def test_what_goes_wrong_is_said_and_the_next_turn_starts_it_anew(make: Make, body: str, message: str) -> None:
    with make(body) as process:
        for _ in range(2):
            with pytest.raises(ForedraftError) as raised:
                process.generate(JOBS, is_together=True)
            assert message in str(raised.value)


def test_an_error_that_it_answers_leaves_it_running(make: Make) -> None:
    body = """if request["together"]: say(error="no batches")
else: say(outputs=[[os.getpid()]], seconds=seconds)"""
    with make(body) as process:
        first = process.generate([Job((1,), 1)], is_together=False).token_ids
        with pytest.raises(ForedraftError, match=r"^no batches$"):
            process.generate(JOBS, is_together=True)
        assert becomes(first[0][0], "T")
        assert process.generate([Job((1,), 1)], is_together=False).token_ids == first


def test_one_that_hangs_is_ended_at_the_deadline(make: Make) -> None:
    body = "print('stuck', os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(600)"
    with (
        make(body, deadline=2.0) as process,
        pytest.raises(ForedraftError, match=r"longer than 2 s: stuck \d+$") as raised,
    ):
        process.generate(JOBS, is_together=True)
    assert state(int(str(raised.value).split()[-1])) == "X"


def test_one_that_reads_nothing_is_ended_at_the_deadline(make: Make) -> None:
    greet = "import time\nprint('{\"ready\": true}', flush=True)\nwhile True:\n"
    with (
        make("time.sleep(1)", deadline=2.0, greet=greet) as process,
        pytest.raises(ForedraftError, match="longer than 2 s"),
    ):
        process.generate([Job((70_000,) * 100_000, 1)], is_together=True)


@pytest.mark.parametrize(
    ("greet", "message"),
    [
        ("import nothing_like_this\nif True:\n", "exit code 1: .*No module named 'nothing_like_this'"),
        ("print('{\"hello\": 1}')\nif True:\n", "its first line does not say that it is ready: {'hello': 1}"),
    ],
)
def test_one_that_does_not_get_ready(make: Make, greet: str, message: str) -> None:
    with make("pass", greet=greet) as process, pytest.raises(ForedraftError, match=message):
        process.generate(JOBS, is_together=True)


def test_one_that_cannot_be_started(tmp_path: Path) -> None:
    process = PeerProcess("some", [str(tmp_path / "none")])
    with process, pytest.raises(ForedraftError, match=r"it cannot be started: .*No such file"):
        process.generate(JOBS, is_together=True)


def test_what_goes_wrong_is_the_failure_of_a_peer(make: Make) -> None:
    with make("sys.exit('no')") as process:
        result = measure_peers("some", [ExternalEngine(process, is_together=True)], JOBS, range(2))
    assert result.failures() == ["some: ForedraftError: it ended with exit code 1: no"]


def test_the_protocol_of_the_scripts_keeps_prints_apart(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(PEERS)!r})\n"
        "from protocol import Connection\n"
        "connection = Connection()\n"
        "import os\n"
        "print('hello')\n"
        "os.system('echo from a child')\n"
        "def generate(batch):\n"
        "    print('generating', flush=True)\n"
        "    if any(n > 3 for _, n in batch): raise ValueError('too long')\n"
        "    return [[len(batch)] * n for _, n in batch]\n"
        "connection.serve(generate, version='2.0')\n"
    )
    with PeerProcess("noisy", [sys.executable, str(script)]) as process:
        assert process.generate(JOBS, is_together=False).token_ids == [(1, 1, 1), (1, 1)]
        assert process.generate(JOBS, is_together=True).token_ids == [(2, 2, 2), (2, 2)]
        assert process.about["version"] == "2.0"
        with pytest.raises(ForedraftError, match=r"^ValueError: too long$"):
            process.generate([Job((1,), 4)], is_together=True)


@pytest.mark.parametrize("is_together", [False, True])
def test_our_engine_in_another_process_gives_the_same_tokens(tmp_path: Path, is_together: bool) -> None:
    path = tiny_llama(tmp_path / "model", num_modules=2, eos_token_id=3)
    llm = LLM(path, num_blocks=64, dtype="float32", device="cpu")
    options = ["--model", str(path), "--depth", "2", "--num-blocks", "64", "--dtype", "float32", "--device", "cpu"]
    jobs = [Job((4, 5, 6, 7), 12), Job((9, 8), 5), Job((11,) * 20, 9)]
    with PeerProcess("depth 2", [sys.executable, str(PEERS / "run_foredraft.py"), *options]) as process:
        peers: list[Peer] = [OurEngine(llm, 2), ExternalEngine(process, is_together=is_together)]
        result = measure_peers("some", peers, jobs, range(1))
    assert result.failures() == []
    ours, other = result.peers
    assert (other.num_equal, other.num_compared) == (3, 3)
    assert other.mean_acceptance_length == ours.mean_acceptance_length
    assert (ours.mean_acceptance_length or 0) >= 1
