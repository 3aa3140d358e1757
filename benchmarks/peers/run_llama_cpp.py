"""llama.cpp, by llama-cpp-python, one prompt at a time: run_llama_cpp.py MODEL.gguf [--threads N]."""

from __future__ import annotations

from protocol import Batch, Connection

connection = Connection()

import argparse  # noqa: E402
from itertools import islice  # noqa: E402

import llama_cpp  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the longest sequence")
    options = parser.parse_args()
    llama = llama_cpp.Llama(
        options.model, n_ctx=options.context, n_threads=options.threads, n_threads_batch=options.threads, verbose=False
    )

    def generate(batch: Batch) -> list[list[int]]:
        if len(batch) > 1:
            raise NotImplementedError("llama-cpp-python generates for one prompt at a time")
        ((prompt, num_tokens),) = batch
        llama.reset()  # or the beginning that two prompts share would be kept
        return [list(islice(llama.generate(prompt, temp=0.0), num_tokens))]

    connection.serve(generate, version=f"llama-cpp-python {llama_cpp.__version__}")


main()
