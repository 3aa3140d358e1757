"""The command line: in this process where that will do, as a process of its own where pipes and signals matter."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from tiny_models import tiny_llama
from typer.testing import CliRunner

import foredraft
from foredraft.cli.app import app, main
from foredraft.config import EngineConfig

COMMAND = [sys.executable, "-m", "foredraft"]
PROMPT = "w3 w1 w4 w1 w5"


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: object
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with three modules and a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    return str(tiny_llama(path, num_modules=3, max_position_embeddings=8192, tokenizer=True))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""

    def run_main(*args: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main(args)
        captured = capsys.readouterr()
        return Outcome(ended.value.code, captured.out, captured.err)

    return run_main


def generate(run: Run, model: str, *args: str) -> Outcome:
    return run("generate", PROMPT, "--model", model, "--max-tokens", "12", "--num-blocks", "64", *args)


def test_text_goes_to_stdout_and_statistics_to_stderr(run: Run, model: str) -> None:
    found = generate(run, model)
    assert found.code == 0
    assert re.fullmatch(r"( w\d+){12}\n", found.out)
    for label in ("drafted tokens", "mean acceptance length", "rows rebuilt", "tokens/s", "verification", "host"):
        assert label in found.err
    assert "\x1b" not in found.out + found.err


def test_the_cache_is_described_on_stderr(run: Run, model: str) -> None:
    # 2 key heads of 8 numbers in 2 layers and 3 modules, keys and values; h0 has 32 numbers; all of 4 bytes.
    described = (
        "cache: 1,008 tokens in 0.75 MiB, sequences of up to 1,008 tokens\n"
        "  target and h0: 64 blocks of 16 rows, 384 bytes a token\n"
        "  modules: 64 blocks of 16 rows, 384 bytes a token\n"
    )
    assert generate(run, model).err.startswith(described)
    host = generate(run, model, "--cpu-cache-gib", "0.25", "--max-model-len", "500").err
    assert "sequences of up to 500 tokens\n" in host
    assert "  host: 21,845 blocks of each group, 256.00 MiB\n" in host


def test_a_cache_that_cannot_be_is_an_error_with_the_numbers(run: Run, model: str) -> None:
    cases = {
        ("--num-blocks", "64", "--max-model-len", "1009"): "max_model_len=1009 does not fit the cache: 64 blocks of 16",
        ("--kv-cache-memory-bytes", "20000"): "1 blocks of 16 rows (from 20000 bytes)",
        ("--gpu-memory-utilization", "0.5", "--device", "cpu"): "has no effect on cpu: set kv_cache_memory_bytes",
    }
    for args, message in cases.items():
        found = run("generate", PROMPT, "--model", model, *args)
        assert (found.code, found.out) == (1, "")
        assert message in found.err
        assert len(found.err.splitlines()) == 1
    found = generate(run, model, "--gpu-memory-utilization", "0.5")
    assert found.code == 2
    assert "num_blocks and gpu_memory_utilization each set the size of the cache" in found.err


def test_statistics_have_a_row_for_each_depth(run: Run, model: str) -> None:
    found = generate(run, model, "-k", "2")
    assert re.search(r"^ *1 +\d+ +\d+ +\d\.\d{3} +\d\.\d{3} *$", found.err, flags=re.MULTILINE)
    assert re.findall(r"^ *(\d) .*\.\d{3} *$", found.err, flags=re.MULTILINE) == ["1", "2"]


def test_without_drafts_there_is_no_table_of_depths(run: Run, model: str) -> None:
    found = generate(run, model, "-k", "0")
    assert found.code == 0
    assert "conditional" not in found.err


def test_json_is_one_line_with_the_tokens_and_the_figures(run: Run, model: str) -> None:
    found = generate(run, model, "--json")
    assert found.err == ""
    (line,) = found.out.splitlines()
    record = json.loads(line)
    assert len(record["token_ids"]) == 12
    assert record["text"] == "".join(f" w{token_id}" for token_id in record["token_ids"])
    assert record["finish_reason"] == "length"
    assert record["num_speculative_tokens"] == 3
    assert len(record["speculation"]["accepted_rates"]) == 3
    assert sum(record["milliseconds_per_token"].values()) == pytest.approx(1000 * record["seconds"] / 12)


def test_the_chat_template_is_used_unless_raw(run: Run, model: str) -> None:
    chat, system, raw = (
        json.loads(generate(run, model, "--json", *args).out)["num_prompt_tokens"]
        for args in ((), ("--system", "w9"), ("--raw",))
    )
    # The template is w1 before each message and w2 at the end.
    assert (chat, system, raw) == (7, 9, 5)


def test_compare_finds_the_same_tokens(run: Run, model: str) -> None:
    found = generate(run, model, "--compare")
    assert found.code == 0
    assert len(found.out.splitlines()) == 1
    assert re.search(r"plain +K = 3", found.err)
    assert re.search(r"without drafts: identical; \d+\.\d\d times as fast", found.err)


def test_compare_as_json(run: Run, model: str) -> None:
    record = json.loads(generate(run, model, "--compare", "--json").out)
    assert record["is_identical"] is True
    assert record["ratio"] > 0
    assert record["plain"]["token_ids"] == record["speculative"]["token_ids"]
    assert record["plain"]["speculation"]["num_drafts"] == 0


def test_compare_claims_nothing_about_sampled_tokens(run: Run, model: str) -> None:
    found = generate(run, model, "--compare", "--temperature", "1", "--seed", "7")
    assert "sampled, so not comparable" in found.err


def test_compare_needs_drafts(run: Run, model: str) -> None:
    found = generate(run, model, "--compare", "-k", "0")
    assert found.code == 1
    assert "--compare needs drafts" in found.err


def test_sampling_options_reach_the_engine(run: Run, model: str) -> None:
    options = ("--json", "--temperature", "4", "--top-k", "20", "--top-p", "0.9", "--seed", "3")
    first = json.loads(generate(run, model, *options).out)["token_ids"]
    assert first == json.loads(generate(run, model, *options).out)["token_ids"]
    assert first != json.loads(generate(run, model, "--json").out)["token_ids"]
    stopped = json.loads(generate(run, model, *options, "--stop-token-id", str(first[5])).out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == first[: first.index(first[5]) + 1]


def test_colours_tell_the_depths_where_the_terminal_has_them(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(run, model).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = generate(run, model)
    assert "accepted drafts of depth" in coloured.err
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured.out) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert generate(run, model).out == plain


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "hello", "--no-such-option"], "No such option"),
        (["generate", "hello", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "hello", "--max-tokens", "-1"], "max_tokens must be at least 0"),
        (["generate", "hello", "--dtype", "int3"], "dtype must be one of auto, float32"),
        (["generate", "hello", "--system", "Be brief.", "--raw"], "--system needs the chat template"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "\udcff"], "the prompt is not UTF-8 text"),
        (["bench", "speed", "--depths", "1,two"], "--depths must be numbers"),
        (["bench", "speed", "--prompts", "no/such/file"], "prompts file no/such/file cannot be read"),
        (["swim"], "No such command 'swim'"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(run: Run, args: list[str], message: str) -> None:
    found = run(*args)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("foredraft: error: ")
    assert len(found.err.splitlines()) == 1
    assert message in found.err


def test_a_model_that_is_not_there_is_one_line_and_code_1(run: Run, tmp_path: Path) -> None:
    for args in (["generate", "hello", "--model"], ["info"]):
        found = run(*args, str(tmp_path / "nowhere"))
        assert (found.code, found.out) == (1, "")
        assert found.err == f"foredraft: error: {tmp_path / 'nowhere'}: no such directory\n"


def test_more_drafts_than_modules_is_an_error(run: Run, model: str) -> None:
    found = generate(run, model, "-k", "4")
    assert found.code == 1
    assert "num_speculative_tokens=4, but the checkpoint has 3 MTP modules" in found.err


def test_info_says_what_a_checkpoint_holds(run: Run, model: str) -> None:
    found = run("info", model)
    assert found.code == 0
    assert "LlamaForCausalLM" in found.out
    assert re.search(r"MTP modules +3,", found.out)
    record = json.loads(run("info", model, "--json").out)
    assert (record["num_mtp_modules"], record["mtp_layout"], record["vocab_size"]) == (3, "beside", 64)


def test_every_engine_setting_is_an_option() -> None:
    found = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert found.exit_code == 0
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in found.output
        assert field.metadata["help"] in found.output


def test_help_is_quick_because_torch_is_not_imported() -> None:
    script = "import sys; import foredraft.cli.app; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_version(run: Run) -> None:
    assert run("--version").out == f"foredraft {foredraft.__version__}\n"


def test_no_command_prints_the_help(run: Run) -> None:
    found = run()
    assert found.code == 2
    assert "Usage: foredraft" in found.out + found.err
    assert "error" not in found.err


def test_a_prompt_from_a_pipe(run: Run, model: str) -> None:
    args = ["generate", "--model", model, "--max-tokens", "12", "--num-blocks", "64"]
    found = subprocess.run([*COMMAND, *args], input=f"{PROMPT}\n", capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == generate(run, model).out
    assert "Loading weights" not in found.stderr


def start_long(model: str) -> subprocess.Popen[str]:
    """A process that would generate for many seconds."""
    args = ["generate", PROMPT, "--model", model, "--max-tokens", "8000", "--ignore-eos"]
    return subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def press_ctrl_c(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Once more where Python has dropped it, as it does within a callback of an import or of the garbage collector."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=4)
    return process.communicate(timeout=60)


def test_ctrl_c_ends_with_what_there_is(model: str) -> None:
    with start_long(model) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        rest, err = press_ctrl_c(process)
    assert process.returncode == 130
    assert re.fullmatch(r"( w\d+)*\n", first + rest)
    assert "interrupted" in err
    assert "drafted tokens" in err
    assert "Traceback" not in err


def test_ctrl_c_while_the_model_loads_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(foredraft, "LLM", interrupted)
    assert run("generate", "hello") == Outcome(130, "", "")


def test_a_reader_that_leaves_ends_it_quietly(model: str) -> None:
    with start_long(model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(20)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert re.fullmatch(r"cache: .*\n(  .*\n)*", process.stderr.read())
