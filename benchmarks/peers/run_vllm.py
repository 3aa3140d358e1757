"""vLLM: run_vllm.py CHECKPOINT [--dtype float32] [--threads 0-1] [--eager]. Its settings that are environment variables
are set here where the command does not set them; LD_PRELOAD has to be in the command.
"""

from __future__ import annotations

from protocol import Batch, Connection

connection = Connection()

import argparse  # noqa: E402
import os  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", default="0-1", help="cores to bind to")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the longest sequence")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": options.threads,  # by itself it leaves a core to others
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)

    import vllm

    llm = vllm.LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.context,
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        skip_tokenizer_init=True,
    )

    def generate(batch: Batch) -> list[list[int]]:
        prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt, _ in batch]
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            for _, num_tokens in batch
        ]
        return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, params, use_tqdm=False)]

    connection.serve(generate, version=f"vllm {vllm.__version__}", dtype=options.dtype, eager=options.eager)


if __name__ == "__main__":  # vLLM may start processes that import this file again
    main()
