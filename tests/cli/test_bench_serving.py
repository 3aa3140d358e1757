"""The commands `serve`, `offline` and `overhead` of `foredraft bench`: options, tables, JSON, exit codes."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from scripted_peer import DONE, Answer, Peer, chunk, serving, usage

from foredraft import LLM, SamplingParams
from foredraft.cli.bench_serving import _ending_on_sigterm, engine_arguments, offline, overhead, serve
from foredraft.config import EngineConfig

app = typer.Typer(pretty_exceptions_enable=False)
for command in (serve, offline, overhead):
    app.command()(command)


def bench(*args: str) -> int:
    """Run a command; its exit code."""
    code: Any = app(list(args), standalone_mode=False)
    return code if isinstance(code, int) else 0


def refused(*args: str) -> str:
    """Why a command line is refused."""
    with pytest.raises(typer.TyperException) as error:
        bench(*args)
    assert error.value.exit_code == 2
    return error.value.format_message()


def answer(body: dict[str, Any]) -> Answer:
    return Answer((chunk("a"), chunk("bc"), chunk("d", finish_reason="length"), usage(5, 6, 2), DONE))


METRICS = """# TYPE foredraft:spec_decode_num_drafts_total counter
foredraft:spec_decode_num_drafts_total{{model_name="m"}} {0}
# TYPE foredraft:spec_decode_num_draft_tokens_total counter
foredraft:spec_decode_num_draft_tokens_total{{model_name="m"}} {1}
# TYPE foredraft:spec_decode_num_accepted_tokens_total counter
foredraft:spec_decode_num_accepted_tokens_total{{model_name="m"}} {2}
# TYPE foredraft:spec_decode_num_accepted_tokens_per_pos_total counter
foredraft:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {2}
# TYPE foredraft:num_requests_running gauge
foredraft:num_requests_running{{model_name="m"}} {3}
"""


def test_serve_reports_what_the_server_did(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "serve.json"
    # One request still runs when the last answer has come: its step is not counted yet.
    pages: list[str | None] = [METRICS.format(10, 20, 5, 0), METRICS.format(11, 22, 6, 1), METRICS.format(14, 28, 8, 0)]
    with serving(Peer(answer, metrics=pages)) as peer:
        options = ["--base-url", peer.base_url, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "6"]
        options += ["--warm-up", "2", "--percentiles", "50,99", "--goodput", "ttft:60000 tpot:60000", "-k", "2"]
        options += ["--max-concurrency", "2", "--extra-body", '{"top_k": 3}', "--api-key", "k", "--ignore-eos"]
        assert bench("serve", *options, "--output", str(output)) == 0
    assert len(peer.bodies) == 6
    assert peer.bodies[0]["prompt"] == "Warm-up 0. w1 w2 w3"
    assert {body["prompt"] for body in peer.bodies[2:]} == {"w1 w2 w3", "w9", "w4 w5 w6 w7 w8", "w11 w12"}
    assert {(body["num_speculative_tokens"], body["top_k"], body["ignore_eos"]) for body in peer.bodies} == {
        (2, 3, True)
    }
    assert set(peer.authorizations) == {"Bearer k"}
    assert peer.most_open <= 2
    printed = capsys.readouterr().out
    assert "| Successful requests " in printed
    assert "which had 2.00 tokens each" in printed
    record: dict[str, Any] = json.loads(output.read_text())
    assert record["benchmark"] == "serve"
    assert record["server"] == {"base_url": peer.base_url, "model": "scripted", "marks": []}
    assert {"date", "command", "machine", "versions"} <= set(record)
    assert (record["completed"], record["failed"]) == (4, 0)
    assert (record["total_input_tokens"], record["total_cached_tokens"], record["total_output_tokens"]) == (20, 8, 24)
    assert record["tokens_per_chunk"] == 2.0
    assert record["request_goodput"] == pytest.approx(record["request_throughput"])
    assert 0 < record["mean_ttft_ms"] <= record["mean_e2el_ms"]
    assert record["p99_itl_ms"] >= 0
    assert record["speculation"]["num_drafts"] == 4
    assert record["speculation"]["acceptance_rate"] == 3 / 8
    assert record["speculation"]["mean_acceptance_length"] == 1.75
    assert record["settings"] == {
        "dataset": "prompts",
        "num_prompts": 4,
        "seed": 0,
        "max_tokens": 6,
        "prompts": "words.jsonl",
        "endpoint": "completions",
        "temperature": 0.0,
        "ignore_eos": True,
        "num_speculative_tokens": 2,
        "extra_body": {"top_k": 3},
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "warm_up": 2,
        "goodput_ms": {"ttft": 60000.0, "tpot": 60000.0},
    }


def test_failed_requests_are_listed_and_the_code_is_1(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    def sometimes(body: dict[str, Any]) -> Answer:
        if "w9" in body["messages"][0]["content"]:
            return Answer((b'{"error": {"message": "[the queue] is full"}}',), status=429)
        return Answer((chunk("a"), DONE))

    with serving(Peer(sometimes)) as peer:
        options = ["--base-url", peer.base_url, "--prompts", prompts, "--num-prompts", "4", "--endpoint", "chat"]
        assert bench("serve", *options, "--model", "mine", "--warm-up", "0", "--request-rate", "500") == 1
    assert {body["model"] for body in peer.bodies} == {"mine"}
    printed = capsys.readouterr().out
    assert "1 of 4 requests FAILED:" in printed
    assert "1 x HTTP 429: Too Many Requests: [the queue] is full" in printed
    assert "Speculation: the server's /metrics has no counters of speculation" in printed
    assert "3 of 3 answers came without usage" in printed


def test_serve_sends_random_ids_and_shared_prefixes() -> None:
    with serving(Peer(answer)) as peer:
        options = ["--base-url", peer.base_url, "--num-prompts", "4", "--warm-up", "0"]
        random = ["--input-len", "6", "--output-len", "3", "--range-ratio", "0.5", "--vocab-size", "9"]
        assert bench("serve", *options, "--dataset", "random", *random) == 0
        shared = ["--prefix-len", "4", "--num-prefixes", "2", "--suffix-len", "3", "--output-len", "5"]
        assert bench("serve", *options, "--dataset", "shared-prefix", *shared) == 0
    first, second = peer.bodies[:4], peer.bodies[4:]
    assert all(3 <= len(body["prompt"]) <= 9 and max(body["prompt"]) < 9 for body in first)
    assert {len(body["prompt"]) for body in second} == {7}
    assert len({tuple(body["prompt"][:4]) for body in second}) == 2


def test_a_warm_up_that_fails_ends_the_run(prompts: str) -> None:
    with serving(Peer(lambda body: Answer((b"no",), status=500))) as peer:
        options = ["--base-url", peer.base_url, "--prompts", prompts, "--num-prompts", "1"]
        with pytest.raises(Exception, match="warm-up request 1 failed: HTTP 500"):
            bench("serve", *options)
    assert len(peer.bodies) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "sharegpt"], "dataset must be one of"),
        (["--input-len", "5"], "input_len has no effect with dataset=prompts"),
        (["--endpoint", "chat", "--dataset", "random"], "token ids: they need endpoint=completions"),
        (["--endpoint", "responses"], "endpoint must be one of completions, chat"),
        (["--request-rate", "0"], "request_rate must be more than 0"),
        (["--burstiness", "2"], "burstiness has no effect without request_rate"),
        (["--percentiles", "101"], "percentiles must be numbers from 0 to 100"),
        (["--goodput", "ttfb:1"], "goodput must be limits in ms"),
        (["--extra-body", "{"], "extra_body is not JSON"),
        (["--extra-body", "[]"], "extra_body must be a JSON object"),
        (["--extra-body", '{"stream": false}'], "extra_body must leave stream to the benchmark"),
        (["--base-url", "localhost"], "base_url must be like http://127.0.0.1:8000"),
        (["--num-prompts", "0"], "'--num-prompts'"),
    ],
)
def test_serve_refuses_wrong_settings_before_it_sends_anything(prompts: str, options: list[str], message: str) -> None:
    named = [] if "--dataset" in options else ["--prompts", prompts]
    number = [] if "--num-prompts" in options else ["--num-prompts", "2"]
    assert message in refused("serve", *named, *number, *options)


SMALL = ["--num-blocks", "128", "--device", "cpu", "--block-size", "4"]


def test_offline_throughput(model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "offline.json"
    options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "6", "--ignore-eos"]
    assert bench("offline", *options, *SMALL, "--concurrency", "2", "--raw", "--output", str(output)) == 0
    record: dict[str, Any] = json.loads(output.read_text())
    assert (record["completed"], record["total_input_tokens"], record["total_output_tokens"]) == (4, 11, 24)
    assert record["max_concurrent_requests"] == 2
    assert record["mean_tpot_ms"] > 0
    assert record["output_throughput"] == pytest.approx(24 / record["duration"])
    assert record["speculation"]["num_drafts"] > 0
    assert record["model"]["num_mtp_modules"] == 3
    assert record["settings"]["concurrency"] == 2
    assert record["settings"]["marks"] == []
    assert record["settings"]["num_speculative_tokens"] == 3
    assert "| Drafts " in capsys.readouterr().out


def test_offline_latency_without_drafts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "offline.json"
    options = ["--model", model, "--dataset", "random", "--num-prompts", "3", "--input-len", "8", "--output-len", "4"]
    options += [*SMALL, "-k", "0", "--ignore-eos", "--mode", "latency", "--repeats", "3", "--warm-up", "1"]
    assert bench("offline", *options, "--percentiles", "90", "--output", str(output)) == 0
    record: dict[str, Any] = json.loads(output.read_text())
    assert len(record["latency_seconds"]) == 3
    assert record["mean_latency_ms"] == pytest.approx(1e3 * sum(record["latency_seconds"]) / 3)
    assert record["p90_latency_ms"] >= record["median_latency_ms"]
    assert record["total_output_tokens"] == 3 * 3 * 4
    printed = capsys.readouterr().out
    assert "latency of a batch (ms)" in printed
    assert "Speculation: no drafts were made" in printed


def test_offline_says_where_the_output_is_not_the_models_own(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "offline.json"
    options = [
        "--model",
        model,
        "--prompts",
        prompts,
        "--num-prompts",
        "4",
        "--max-tokens",
        "9",
        "--ignore-eos",
        *SMALL,
    ]
    assert bench("offline", *options, "--synthetic-acceptance", "1", "--output", str(output)) == 0
    assert capsys.readouterr().out.startswith("NOT the model's own output: acceptance by chance")
    record: dict[str, Any] = json.loads(output.read_text())
    assert len(record["settings"]["marks"]) == 1
    assert record["tokens_per_chunk"] == 3.0  # of 9 tokens one by the prompt, four by all drafts of a step, and four
    assert record["speculation"]["acceptance_rate"] == 1.0


def test_offline_takes_messages_and_failures_give_code_1(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "work.jsonl"
    lines = [{"messages": [{"role": "user", "content": "w5"}], "output_tokens": 2}, {"prompt": [64]}, {"prompt": [3]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", model, "--dataset", "jsonl", "--prompts", str(file), "--num-prompts", "3", *SMALL]
    assert bench("offline", *options, "--warm-up", "0", "--max-tokens", "3") == 1
    printed = capsys.readouterr().out
    assert "1 of 3 requests FAILED:" in printed
    assert "1 x refused: prompt_token_ids must be between 0 and 63, not 64" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "speed"], "mode must be throughput or latency"),
        (["--mode", "latency", "--concurrency", "2"], "concurrency has no effect with mode=latency"),
        (["--repeats", "2"], "repeats has no effect with mode=throughput"),
        (["--dataset", "random", "--raw"], "raw has no effect with dataset=random"),
        (["--dataset", "jsonl"], "dataset=jsonl needs a file"),
        (["--temperature", "-1"], "temperature must be"),
    ],
)
def test_offline_refuses_wrong_settings_before_it_loads_anything(
    prompts: str, options: list[str], message: str
) -> None:
    named = [] if "--dataset" in options else ["--prompts", prompts]
    assert message in refused("offline", "--model", "nowhere", "--num-prompts", "2", *named, *options)


def test_overhead_compares_both_sides(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = LLM(model, device="cpu", num_blocks=128)

    def really(body: dict[str, Any]) -> Answer:
        params = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=body["ignore_eos"])
        (output,) = theirs.generate(body["prompt"], replace(params, cache_salt=body["cache_salt"]))
        return Answer((chunk("x", token_ids=list(output.token_ids)), DONE))

    output = tmp_path / "overhead.json"
    with serving(Peer(really)) as peer:
        options = ["--model", model, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "5", *SMALL]
        options += ["--concurrency", "2", "--rounds", "2", "--base-url", peer.base_url]
        assert bench("overhead", *options, "--output", str(output)) == 0
    assert capsys.readouterr().out.endswith("All outputs identical: yes\n")
    record: dict[str, Any] = json.loads(output.read_text())
    assert record["is_identical"] is True
    assert [len(side["tokens_per_second"]) for side in record["sides"]] == [2, 2]
    assert record["ratio"] > 0
    assert len(peer.bodies) == 3 * 4
    assert {body["cache_salt"] for body in peer.bodies} == {"warm-up", "round 0", "round 1"}


def test_overhead_refuses_a_key_for_a_server_of_its_own(prompts: str) -> None:
    assert "api_key has no effect without base_url" in refused("overhead", "--prompts", prompts, "--api-key", "k")


def test_sigterm_ends_the_server_that_was_started() -> None:
    before = signal.getsignal(signal.SIGTERM)
    has_ended = False

    def work() -> None:
        nonlocal has_ended
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()  # unless the signal has come already
        finally:
            has_ended = True

    with pytest.raises(SystemExit) as ended, _ending_on_sigterm():
        work()
    assert (ended.value.code, has_ended) == (143, True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_of_its_own_gets_the_same_settings() -> None:
    config = EngineConfig(model="here", num_speculative_tokens=0, enable_prefix_caching=False, num_blocks=9)
    assert engine_arguments(EngineConfig()) == []
    arguments = ["--model", "here", "--num-speculative-tokens", "0", "--num-blocks", "9", "--no-enable-prefix-caching"]
    assert engine_arguments(config) == arguments
    rates = EngineConfig(synthetic_acceptance=(0.5, 0.25))
    assert engine_arguments(rates) == ["--synthetic-acceptance", "0.5,0.25"]
