"""Resident decoding on a CUDA device: kernels, graphs and overlap change no token, and padding reaches nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

from foredraft import LLM, SamplingParams

pytestmark = pytest.mark.gpu

BUILDERS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "llama": (lambda path: tiny_llama(path, num_modules=3), 3),
    "eight modules": (lambda path: tiny_llama(path, num_modules=8), 8),
    "glm4_moe": (lambda path: tiny_glm4_moe(path, mtp_names="beside"), 3),
    "qwen3": (tiny_qwen3, 2),
    "qwen2 sliding": (lambda path: tiny_qwen2(path, sliding_window=8), 2),
    "mistral sliding": (lambda path: tiny_mistral(path, sliding_window=8), 2),
}
MODES = [("synchronous", "off"), ("overlapped", "off"), ("overlapped", "on-demand"), ("overlapped", "at-start")]
PROMPTS = [[1 + (i * 7 + j) % 60 for j in range(length)] for i, length in enumerate((1, 5, 17, 30, 3, 9))]


def requests(depth: int) -> list[SamplingParams]:
    kinds = [(0, 0.0, 0), (depth, 0.0, 0), (1, 1.0, 0), (depth, 0.8, 5), (depth, 0.0, 0), (depth, 1.0, 0)]
    return [
        SamplingParams(
            max_tokens=24 + seed,
            ignore_eos=True,
            num_speculative_tokens=k,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        for seed, (k, temperature, top_k) in enumerate(kinds)
    ]


def tokens(path: Path, depth: int, poison: bool = False, **settings: object) -> list[tuple[int, ...]]:
    llm = LLM(
        path,
        dtype="float32",
        num_speculative_tokens=depth,
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
        storage.hidden.fill_(torch.nan)
    first = [output.token_ids for output in llm.generate(PROMPTS, requests(depth))]
    again = [output.token_ids for output in llm.generate(PROMPTS, requests(depth))]  # graphs from the first step on
    assert again == first
    llm.engine.cache.check_integrity()
    return first


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_way_to_run_gives_the_tokens_of_the_cpu(tmp_path: Path, kind: str) -> None:
    build, depth = BUILDERS[kind]
    path = build(tmp_path / "model")
    expected = tokens(path, depth, device="cpu", execution="reference")
    assert tokens(path, depth, device="cuda", execution="reference") == expected
    for execution, cuda_graphs in MODES:
        found = tokens(path, depth, device="cuda", execution=execution, cuda_graphs=cuda_graphs, poison=True)
        assert found == expected, (execution, cuda_graphs)


def test_mixtures_of_experts_run_in_graphs(tmp_path: Path) -> None:
    """In bfloat16, transformers' grouped experts; they are captured, and steps as graphs equal those without."""
    path = tiny_glm4_moe(tmp_path / "model", mtp_names="beside")
    found = []
    for cuda_graphs in ("off", "on-demand"):
        settings = {"num_speculative_tokens": 3, "kv_cache_memory_bytes": 2**26, "cuda_graphs": cuda_graphs}
        llm = LLM(path, device="cuda", dtype="bfloat16", **settings)
        found.append([output.token_ids for output in llm.generate(PROMPTS, requests(3))])
        captured = llm.engine.runner.captured
        assert (captured is not None and captured.num_graphs > 0) == (cuda_graphs != "off")
    assert found[0] == found[1]


def test_a_captured_step_waits_for_nothing(tmp_path: Path) -> None:
    """In steady decoding the host neither copies nor reads what makes it wait, but for the results themselves."""
    path = tiny_llama(tmp_path / "model", num_modules=3, max_position_embeddings=1024)
    llm = LLM(path, device="cuda", dtype="bfloat16", kv_cache_memory_bytes=2**26)
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(f"r{index}", prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(20):
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    llm.close()
