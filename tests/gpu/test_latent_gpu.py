"""Latent attention, and sparse attention over latents, on a CUDA device: by torch's kernels, without graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families.checkpoints_latent import tiny_deepseek_v3, tiny_deepseek_v32, tiny_glm4_moe_lite, tiny_glm_moe_dsa

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("execution", ["auto", "overlapped"])
@pytest.mark.parametrize("build", [tiny_deepseek_v3, tiny_glm4_moe_lite, tiny_deepseek_v32, tiny_glm_moe_dsa])
def test_tiny_models_equal_the_cpu(tmp_path: Path, build: Callable[[Path], Path], execution: str) -> None:
    path = build(tmp_path / "model")
    prompts = [[1 + (i * 7 + j) % 60 for j in range(length)] for i, length in enumerate((1, 5, 17, 30))]
    settings = {"dtype": "float32", "num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    params = [SamplingParams(max_tokens=24, ignore_eos=True, num_speculative_tokens=k) for k in (0, 1, 2, 3)]
    on_cpu = LLM(path, device="cpu", **settings).generate(prompts, params)
    llm = LLM(path, device="cuda", execution=execution, **settings)
    on_gpu = llm.generate(prompts, params)
    assert [output.token_ids for output in on_gpu] == [output.token_ids for output in on_cpu]
    assert llm.engine.runner.captured is None
    assert (llm.engine.runner.resident is None) == (execution == "auto")


def test_graphs_at_the_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs=at-start: passes of deepseek_v3 wait for the GPU"):
        LLM(tiny_deepseek_v3(tmp_path / "model"), device="cuda", cuda_graphs="at-start")
