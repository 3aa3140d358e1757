"""OpenVINO GenAI: run_openvino.py MODEL [--threads N] [--property NAME=VALUE ...]. MODEL: an IR directory or a GGUF."""

from __future__ import annotations

from protocol import Batch, Connection

connection = Connection()

import argparse  # noqa: E402

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gb", type=int, default=1, help="size of the KV cache")
    parser.add_argument(
        "--property", action="append", default=[], help="of the CPU plug-in, as in KV_CACHE_PRECISION=f32"
    )
    options = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.cache_gb
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    properties = {"INFERENCE_NUM_THREADS": options.threads} | dict(each.split("=", 1) for each in options.property)
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)

    def generate(batch: Batch) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in batch]
        results = pipeline.generate(prompts, [_settings(num_tokens) for _, num_tokens in batch])
        return [[int(token_id) for token_id in result.m_generation_ids[0]] for result in results]

    connection.serve(generate, version=f"openvino-genai {openvino_genai.__version__}", properties=options.property)


def _settings(num_tokens: int) -> openvino_genai.GenerationConfig:
    settings = openvino_genai.GenerationConfig()
    settings.do_sample = False
    settings.ignore_eos = True
    settings.max_new_tokens = num_tokens
    return settings


main()
