"""The cache on a CUDA device takes what the setting says, and no step takes more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError

pytestmark = pytest.mark.gpu

LIMITS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096}


def builtin(**settings: Any) -> LLM:
    """The built-in model on a device on which nothing is left of others."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return LLM(dtype="bfloat16", device="cuda", num_speculative_tokens=8, **(LIMITS | settings))


def serve_full_load(llm: LLM, *, num_prompt_tokens: int) -> None:
    """More requests than run at once, each drafting all it can, sampled."""
    prompts = [[1 + (7 * i + 3 * row) % 40000 for row in range(num_prompt_tokens - i)] for i in range(80)]
    params = [SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=i, ignore_eos=True) for i in range(80)]
    for output in llm.generate(prompts, params):
        assert output.error is None
        assert len(output.token_ids) == 24


def test_utilization_bounds_what_is_used_and_sets_the_capacity() -> None:
    total_bytes = torch.cuda.mem_get_info()[1]
    capacity = {}
    for share in (0.3, 0.5):
        llm = builtin(gpu_memory_utilization=share)
        for num_prompt_tokens in (300, 4000):
            serve_full_load(llm, num_prompt_tokens=num_prompt_tokens)
        assert llm.stats.num_preemptions == 0
        used_by_others = total_bytes - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        reserved = torch.cuda.max_memory_reserved()
        print(f"{share}: {reserved / total_bytes:.4f} reserved, {used_by_others / total_bytes:.4f} others,", flush=True)
        print(*llm.cache_size.lines(), sep="\n", flush=True)
        assert reserved < share * total_bytes
        # Steps in another order than the profiling run's may leave gaps between what torch's allocator holds.
        assert reserved + used_by_others < (share + 0.01) * total_bytes
        # Little of it is unused: weights and steps of this model are small.
        assert llm.cache_size.num_bytes > (share - 0.1) * total_bytes
        assert llm.cache_size.num_bytes == llm.engine.runner.storage.num_bytes
        capacity[share] = llm.cache_size.num_tokens or 0
        del llm
    difference = (capacity[0.5] - capacity[0.3]) * 30336
    assert difference == pytest.approx(0.2 * total_bytes, rel=0.02)


def test_the_profiling_run_leaves_nothing() -> None:
    llm = builtin(gpu_memory_utilization=0.3)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in llm.engine.runner.target.model.parameters())
    allocated = torch.cuda.memory_allocated() - llm.cache_size.num_bytes
    assert allocated < weights + (1 << 30)
    assert llm.stats.num_steps == llm.stats.num_requests == 0
    assert not list(llm.engine.cache.cached_nodes())


def test_no_share_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.001 leaves no memory for the cache"):
        builtin(gpu_memory_utilization=0.001)


def test_memory_in_bytes_is_exact() -> None:
    llm = builtin(kv_cache_memory_bytes=1 << 30)
    assert (1 << 30) - 16 * 30336 < llm.cache_size.num_bytes <= 1 << 30
