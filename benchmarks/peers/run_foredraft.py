"""Foredraft with other settings than those of the run: run_foredraft.py [--depth K] [--dtype bfloat16] ..."""

from __future__ import annotations

from protocol import Batch, Connection

connection = Connection()

from dataclasses import asdict  # noqa: E402
from typing import Annotated, Any  # noqa: E402

import typer  # noqa: E402

import foredraft  # noqa: E402
from foredraft.bench.peer_engines import OurEngine  # noqa: E402
from foredraft.bench.peers import Job  # noqa: E402
from foredraft.cli.bench_options import with_room  # noqa: E402
from foredraft.cli.options import engine_options, load, usage_errors  # noqa: E402
from foredraft.config import EngineConfig  # noqa: E402
from foredraft.statistics import SpeculationStats  # noqa: E402


@engine_options
def main(depth: Annotated[int, typer.Option(min=0, help="draft tokens a step")] = 0, *, config: EngineConfig) -> None:
    """Generate for `foredraft bench peers --external`, with `depth` draft tokens a step."""
    with usage_errors():
        config = with_room(config, [depth], 1)
    llm = load(config)
    engine = OurEngine(llm, depth)
    counted = SpeculationStats()

    def generate(batch: Batch) -> list[list[int]]:
        generation = engine.generate([Job(tuple(prompt), num_tokens) for prompt, num_tokens in batch])
        if generation.speculation is not None:
            counted.add(generation.speculation)
        return [list(token_ids) for token_ids in generation.token_ids]

    def speculation() -> dict[str, Any]:
        nonlocal counted
        turn, counted = counted, SpeculationStats()
        return asdict(turn)

    about = {"dtype": str(llm.dtype).removeprefix("torch."), "quantization": config.quantization}
    connection.serve(generate, speculation, version=f"foredraft {foredraft.__version__}", **about)


if __name__ == "__main__":
    typer.run(main)
