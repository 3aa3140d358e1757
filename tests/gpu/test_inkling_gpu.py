"""Inkling with eight modules on a CUDA device: short convolutions and biases in graphs change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families.checkpoints_inkling import tiny_inkling

from foredraft import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[1 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate((1, 9, 30, 17))]
PARAMS = {
    "greedy": [SamplingParams(max_tokens=24, ignore_eos=True)] * 4,
    "sampled": [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=seed) for seed in range(4)],
    "mixed": [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=seed, num_speculative_tokens=depth)
        for seed, (temperature, depth) in enumerate([(0.0, 8), (1.0, 3), (0.0, 0), (0.8, 8)])
    ],
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "swa_head_dim": 32,
    "swa_num_key_value_heads": 2,
}
"""Heads of 16 at least, which the kernels' products need."""

BUILDERS: dict[str, dict[str, Any]] = {
    "sliding and full modules": {},
    "no norm after a depth": {"layout": "inside", "chain_hidden_post_norm": False, "log_scaling_n_floor": None},
    "multimodal": {"layout": "multimodal", "conv_kernel_size": 2},
}


def build(path: Path, name: str) -> Path:
    return tiny_inkling(path, **SIZES, **BUILDERS[name])


def tokens(path: Path, kind: str, *, poison: bool = False, **settings: Any) -> list[tuple[int, ...]]:
    """What a batch of four gives, twice; poison: with NaN in all of the cache at first."""
    llm = LLM(
        path,
        dtype="float32",
        num_speculative_tokens=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2**24,
        **settings,
    )
    if poison:
        storage = llm.engine.runner.storage
        for layer in (*storage.target, *storage.modules):
            layer.key.fill_(torch.nan)
            layer.value.fill_(torch.nan)
        for inputs in (*storage.target_inputs.values(), *storage.module_inputs.values()):
            inputs.rows.fill_(torch.nan)
        storage.hidden.fill_(torch.nan)
    first = [output.token_ids for output in llm.generate(PROMPTS, PARAMS[kind])]
    again = [output.token_ids for output in llm.generate(PROMPTS, PARAMS[kind])]  # graphs from the first step on
    assert again == first
    llm.engine.cache.check_integrity()
    captured = llm.engine.runner.captured
    assert (captured is not None and captured.num_graphs > 0) == (settings.get("cuda_graphs", "off") != "off")
    llm.close()
    return first


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", BUILDERS)
def test_graphs_give_the_tokens_of_the_cpu(tmp_path: Path, name: str, kind: str) -> None:
    path = build(tmp_path / "model", name)
    expected = tokens(path, kind, device="cpu", execution="reference")
    found = tokens(path, kind, poison=True, device="cuda", execution="overlapped", cuda_graphs="on-demand")
    assert found == expected


@pytest.mark.parametrize(
    ("execution", "cuda_graphs"),
    [("reference", "off"), ("synchronous", "off"), ("overlapped", "off"), ("overlapped", "at-start")],
)
def test_every_way_to_run_gives_the_tokens_of_the_cpu(tmp_path: Path, execution: str, cuda_graphs: str) -> None:
    path = build(tmp_path / "model", "sliding and full modules")
    expected = tokens(path, "mixed", device="cpu", execution="reference")
    found = tokens(path, "mixed", poison=True, device="cuda", execution=execution, cuda_graphs=cuda_graphs)
    assert found == expected
