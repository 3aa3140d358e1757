"""Prompts that show images and sound on a CUDA device: towers, merged embeddings, graphs once no module reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families.checkpoints_inkling import tiny_inkling
from families.shown_media import audio, image, prompts_of_row_ids, row_id
from gpu.test_inkling_gpu import SIZES
from scripted import finish

from foredraft import LLM, SamplingParams
from foredraft.media import MediaKind

pytestmark = pytest.mark.gpu

LONG = [image(7, 13), audio(8, 11)]
PROMPTS = [[row_id((7 * i + j) % 60) for j in range(length)] for i, length in enumerate((1, 9, 30))]


def tokens(path: Path, temperature: float, **settings: Any) -> list[list[int]]:
    """What each prompt is continued with, all at once, and again over the cached rows."""
    limits = {"num_speculative_tokens": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    llm = LLM(path, dtype="float32", kv_cache_memory_bytes=2**24, **limits, **settings)
    placeholders = llm.engine.limits.placeholders
    spans = [[1, *[placeholders[one.kind]] * one.num_tokens, 2] for one in LONG]
    outputs = []
    for attempt in range(2):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=3)
        with prompts_of_row_ids():
            requests = [llm.engine.add_request(f"{attempt} {i}", ids, params) for i, ids in enumerate(PROMPTS)]
        requests.append(
            llm.engine.add_request(
                f"{attempt} long", [token_id for span in spans for token_id in span], params, media=LONG
            )
        )
        finish(llm.engine)
        outputs.append([request.output_token_ids for request in requests])
        assert all(request.error is None for request in requests)
    assert outputs[0] == outputs[1]
    assert set(placeholders) == set(MediaKind)
    captured = llm.engine.runner.captured
    assert (captured is not None and captured.num_graphs > 0) == (settings["device"] == "cuda")
    llm.engine.cache.check_integrity()
    llm.close()
    return outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shown_prompts_give_the_tokens_of_the_cpu(tmp_path: Path, temperature: float) -> None:
    path = tiny_inkling(tmp_path / "model", layout="multimodal", rel_extent=40, **SIZES)
    expected = tokens(path, temperature, device="cpu", execution="reference")
    assert tokens(path, temperature, device="cuda", execution="overlapped", cuda_graphs="on-demand") == expected
