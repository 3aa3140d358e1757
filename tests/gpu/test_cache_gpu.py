"""Sharing, windows and the host's level of the cache on a CUDA device: the same tokens as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_alternating, tiny_glm4_moe, tiny_llama, tiny_mistral

from foredraft import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cuda",
    "num_speculative_tokens": 3,
    "block_size": 4,
    "num_blocks": 24,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
}
BUILDERS: dict[str, Callable[..., Path]] = {
    "full": tiny_llama,
    "sliding": lambda path: tiny_mistral(path, num_modules=3),
    "alternating": lambda path: tiny_alternating(path, sliding_window=8),
    "chained": tiny_glm4_moe,
}


@pytest.mark.parametrize("kind", BUILDERS)
def test_hits_spills_and_restarts_change_no_token(tmp_path: Path, kind: str) -> None:
    path = BUILDERS[kind](tmp_path / "model")
    prompts = [[1 + (7 * i + 5 * row) % 60 for row in range(20 + i)] for i in range(6)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = LLM(path, **SETTINGS, enable_prefix_caching=False)
    cold = [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    for host_cache in ({}, {"cpu_cache_gib": 0.01, "cache_dir": tmp_path / "cache"}):
        for start in range(2):
            with LLM(path, **SETTINGS, **host_cache) as llm:
                for turn in range(3):
                    outputs = llm.generate(prompts, params)
                    assert [output.token_ids for output in outputs] == cold
                    llm.engine.cache.check_integrity()
                    if host_cache and (start or turn):
                        assert all(output.num_cached_tokens >= 20 for output in outputs)
                if host_cache:
                    assert llm.engine.runner.host_storage is not None
                    assert llm.engine.runner.host_storage.hidden.is_pinned()
