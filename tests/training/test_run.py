"""From a bare target to modules that the engine and transformers run: one command, stages, kills, other settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import new_mtp_model, tiny_qwen3
from toy_target import NUM_TOKENS
from transformers import AutoModelForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.cli.app import main
from foredraft.training.metrics_file import read_metrics

DEPTHS = 3
COMMON = [
    "--depths",
    str(DEPTHS),
    "--num-rows",
    "192",
    "--row-length",
    "40",
    "--synthesis-batch",
    "64",
    "--device",
    "cpu",
]
SHORT = [*COMMON, "--batch-size", "8", "--warmup-steps", "5", "--heldout-rows", "8", "--report-every", "5"]


def foredraft(*arguments: object) -> int:
    """Run the command in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beginnings of texts of the toy language."""
    file = tmp_path_factory.mktemp("prompts") / "beginnings.jsonl"
    rows = [{"token_ids": [first, (5 * first + 3) % NUM_TOKENS, first % 4]} for first in range(NUM_TOKENS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def trained(toy_target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the whole command made."""
    out = tmp_path_factory.mktemp("run") / "modules"
    sets = ["--evaluate-on", f"{prompts}:0", "--evaluate-on", f"{prompts}:1", "--evaluation-tokens", "60"]
    fit = ["--num-steps", "240", "--batch-size", "16", "--learning-rate", "0.01", "--warmup-steps", "10"]
    kept = ["--heldout-every", "60", "--heldout-rows", "12", "--storage", "float32"]
    assert foredraft("train", toy_target, "--out", out, *COMMON, *fit, *kept, *sets) == 0
    return out


def test_acceptance_rises_above_four_fifths_at_depth_one(trained: Path) -> None:
    reports = read_metrics(trained / "training" / "metrics.jsonl")
    lengths = [each.heldout_length for each in reports if each.heldout_length is not None]
    assert len(lengths) == 4
    assert lengths[-1] > lengths[0]
    greedy, _ = json.loads((trained / "training" / "evaluation.json").read_text())[trained.name]
    assert greedy["engine"]["rates"][0] > 0.8
    assert all(match > 0.8 for match in reports[-1].match)
    assert len(reports[-1].match) == DEPTHS


def test_acceptance_from_passes_is_what_the_engine_measures(trained: Path) -> None:
    greedy, sampled = json.loads((trained / "training" / "evaluation.json").read_text())[trained.name]
    assert greedy["engine"] == greedy["exact"]
    assert sampled["engine"]["num_cycles"] > 100
    assert sampled["engine"]["mean_length"] == pytest.approx(sampled["exact"]["mean_length"], rel=0.1)
    assert sampled["engine"]["rates"] == pytest.approx(sampled["exact"]["rates"], abs=0.12)


def test_modules_draft_the_same_in_transformers_and_in_the_engine(trained: Path, toy_target: Path) -> None:
    target: Any = AutoModelForCausalLM.from_pretrained(toy_target, dtype=torch.float32)
    modules = new_mtp_model(target, DEPTHS)
    missing, surplus = modules.load_state_dict(load_file(trained / "mtp.safetensors"), strict=False)
    assert not surplus
    assert all(name.startswith(("embed_tokens.", "shared_head.")) for name in missing)
    llm = LLM(toy_target, mtp=trained, dtype="float32", device="cpu", num_blocks=32)
    for index, prompt in enumerate(([1, 2, 3, 4], [7, 0, 5, 5, 1, 9, 2], [3])):
        request = llm.engine.add_request(str(index), prompt, SamplingParams(max_tokens=20, ignore_eos=True))
        llm.engine.step()
        token_ids = torch.tensor([request.token_ids])
        with torch.no_grad():
            hidden = target.model(token_ids[:, :-1]).last_hidden_state
            positions = torch.arange(1, token_ids.shape[1])[None]
            drafts, *_ = modules(token_ids[:, 1:], hidden, None, positions, None)
        assert request.draft_token_ids == tuple(drafts[0].tolist())
        llm.engine.abort(str(index))


def test_the_output_is_the_targets_own(trained: Path, toy_target: Path, prompts: Path) -> None:
    beginnings = [json.loads(line)["token_ids"] for line in prompts.read_text().splitlines()]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 64}
    drafted = LLM(toy_target, mtp=trained, **settings).generate(beginnings, params)
    plain = LLM(toy_target, num_speculative_tokens=0, **settings).generate(beginnings, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_the_export_says_what_it_is(trained: Path) -> None:
    card = (trained / "README.md").read_text()
    for part in (
        "# MTP modules for target",
        "192 rows of text, 7,680 tokens",
        "| num_steps | 240 |",
        "| beginnings, temperature 0 |",
    ):
        assert part in card
    assert json.loads((trained / "config.json").read_text())["num_mtp_layers"] == DEPTHS
    assert json.loads((trained / "recipe.json").read_text())["depths"] == DEPTHS
    assert (trained / "training" / "training.svg").stat().st_size > 1000


def test_killed_at_any_moment_it_ends_with_the_same_weights(trained: Path, toy_target: Path, tmp_path: Path) -> None:
    corpus = trained / "training" / "corpus"
    fit = [*SHORT, "--num-steps", "40", "--ema-decay", "0.9", "--solo-steps", "8", "--on-policy-share", "0.2"]
    command = [
        "train",
        str(toy_target),
        "--corpus",
        str(corpus),
        "--stages",
        "train",
        *fit,
        "--checkpoint-seconds",
        "0",
    ]
    assert foredraft(*command, "--out", tmp_path / "whole") == 0
    broken = tmp_path / "broken"
    checkpoint, num_kills = broken / "training" / "checkpoint.pt", 0
    while num_kills < 2:
        process = subprocess.Popen(
            [sys.executable, "-m", "foredraft", *command, "--out", str(broken)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
            time.sleep(0.01)
        time.sleep(0.03 * num_kills)  # wherever it is then
        process.send_signal(signal.SIGKILL)
        process.wait()
        num_kills += 1
    assert foredraft(*command, "--out", broken) == 0
    whole, resumed = (
        torch.load(run / "training" / "last.pt", weights_only=True) for run in (tmp_path / "whole", broken)
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    steps = [each.step for each in read_metrics(broken / "training" / "metrics.jsonl")]
    assert steps == list(range(5, 41, 5))


def test_text_goes_on_where_it_was_stopped(trained: Path, toy_target: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "training" / "corpus", tmp_path / "training" / "corpus")
    lost = tmp_path / "training" / "corpus" / "rows-000001.safetensors"
    before = load_file(lost)
    lost.unlink()
    command = ["train", toy_target, "--out", tmp_path, "--stages", "synthesise", *COMMON]
    assert foredraft(*command, "--workers", "2") == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in load_file(lost).items())


def test_a_time_limit_stops_where_it_can_go_on(trained: Path, toy_target: Path, tmp_path: Path) -> None:
    command = ["train", toy_target, "--out", tmp_path, "--corpus", trained / "training" / "corpus", *SHORT]
    endless = [*command, "--num-steps", "1000000", "--stages", "train,export", "--max-seconds", "1"]
    assert foredraft(*endless) == 3
    first = torch.load(tmp_path / "training" / "checkpoint.pt", weights_only=True)["step"]
    assert not (tmp_path / "mtp.safetensors").exists()
    assert foredraft(*endless) == 3
    assert torch.load(tmp_path / "training" / "checkpoint.pt", weights_only=True)["step"] > first > 0
    assert foredraft(*command, "--num-steps", "1000000", "--stages", "export") == 0
    assert "had not come to its end" in (tmp_path / "README.md").read_text()


def test_another_recipe_is_refused_where_one_has_begun(
    trained: Path, toy_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train",
        toy_target,
        "--out",
        tmp_path,
        "--corpus",
        trained / "training" / "corpus",
        *SHORT,
        "--stages",
        "train",
    ]
    assert foredraft(*command, "--num-steps", "3") == 0
    assert foredraft(*command, "--num-steps", "4") == 1
    assert "num_steps was 3 and is 4" in capsys.readouterr().err
    other = ["train", toy_target, "--out", trained, *COMMON, "--greedy-share", "0.1", "--stages", "synthesise"]
    assert foredraft(*other) == 1
    assert "greedy_share was 0.5 and is 0.1" in capsys.readouterr().err


def test_training_ends_early_with_the_weights_that_were_best(trained: Path, toy_target: Path, tmp_path: Path) -> None:
    command = ["train", toy_target, "--out", tmp_path, "--corpus", trained / "training" / "corpus", *SHORT]
    stale = ["--learning-rate", "0", "--num-steps", "100", "--heldout-every", "5", "--patience", "2"]
    assert foredraft(*command, *stale, "--stages", "train,export", "--storage", "float32") == 0
    state = torch.load(tmp_path / "training" / "checkpoint.pt", weights_only=True)
    assert (state["step"], state["is_done"]) == (15, True)
    assert not (tmp_path / "training" / "last.pt").exists()
    best = torch.load(tmp_path / "training" / "best.pt", weights_only=True)
    assert all(torch.equal(best[name], tensor) for name, tensor in load_file(tmp_path / "mtp.safetensors").items())


def test_narrow_modules_with_a_draft_vocabulary_run(
    trained: Path, toy_target: Path, prompts: Path, tmp_path: Path
) -> None:
    command = ["train", toy_target, "--out", tmp_path, "--corpus", trained / "training" / "corpus", *SHORT]
    narrow = ["--block-width", "40", "--draft-vocab-size", "6", "--num-steps", "30", "--learning-rate", "0.01"]
    sets = ["--stages", "train,evaluate,export", "--evaluate-on", f"{prompts}:0", "--evaluation-tokens", "20"]
    assert foredraft(*command, *narrow, *sets) == 0
    with safe_open(tmp_path / "mtp.safetensors", "pt") as tensors:
        weight = tensors.get_slice("layers.0.mtp_block.mlp.gate_proj.weight")
        assert (weight.get_shape(), weight.get_dtype()) == ([40, 48], "I8")
    (greedy,) = json.loads((tmp_path / "training" / "evaluation.json").read_text())[tmp_path.name]
    assert greedy["engine"] == greedy["exact"]
    vocabulary = json.loads((tmp_path / "draft_vocab.json").read_text())
    llm = LLM(
        toy_target, mtp=tmp_path, dtype="float32", device="cpu", num_blocks=32,
        draft_vocab=tmp_path / "draft_vocab.json", draft_vocab_size=6,
    )  # fmt: skip
    request = llm.engine.add_request("0", [1, 2], SamplingParams(max_tokens=20))
    llm.engine.step()
    assert len(vocabulary) == 6
    assert set(request.draft_token_ids) <= set(vocabulary)


def test_another_architecture_needs_no_change(tmp_path: Path) -> None:
    target = tiny_qwen3(tmp_path / "target", num_modules=0)
    command = ["train", target, "--out", tmp_path / "out", "--depths", "2", "--num-rows", "24", "--row-length", "32"]
    fit = ["--synthesis-batch", "12", "--num-steps", "6", "--batch-size", "4", "--heldout-rows", "2", "--device", "cpu"]
    assert foredraft(*command, *fit) == 0
    llm = LLM(target, mtp=tmp_path / "out", dtype="float32", device="cpu", num_blocks=32)
    assert llm.info.num_mtp_modules == 2
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].token_ids) == 8


def test_two_processes_take_the_steps_of_one(trained: Path, toy_target: Path, tmp_path: Path) -> None:
    # All positions are in the loss, so that each process's half of a batch counts the same.
    fit = [*SHORT, "--num-steps", "6", "--position-share", "1", "--optimizer", "adamw", "--learning-rate", "0.001"]
    command = ["train", str(toy_target), "--corpus", str(trained / "training" / "corpus"), "--stages", "train", *fit]
    assert foredraft(*command, "--out", tmp_path / "one") == 0
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "foredraft",
         *command, "--out", str(tmp_path / "two")],
        check=True, capture_output=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip
    one, two = (torch.load(tmp_path / name / "training" / "last.pt", weights_only=True) for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=2e-4, rtol=1e-3, msg=name)
