"""`foredraft bench peers`: our engine beside transformers, and beside engines in processes of their own."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_options import (
    Output,
    Prompts,
    engine_settings,
    integers,
    keeper,
    print_marks,
    tokenize,
    with_progress,
    with_room,
)
from foredraft.cli.display import open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, described

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.bench.peer_process import PeerProcess
    from foredraft.bench.peers import Job, Peer, PeersResult
    from foredraft.models.loader import LoadedModel

TRANSFORMERS_WAYS = ("generate", "static", "modules", "batching")
"""How transformers may take part: one at a time in three ways, and many at once."""


@dataclass(frozen=True)
class _Workload:
    name: str
    jobs: Sequence[Job]
    is_together: bool


@engine_options
def peers(
    depths: Annotated[str, typer.Option(help="draft tokens a step of our engine, a list")] = "0,2,8",
    external: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COMMAND", help="one more engine, in a process of its own; repeatable"),
    ] = None,
    external_timeout: Annotated[
        float, typer.Option(min=0.1, help="seconds that it may take to start, and a turn")
    ] = 900,
    transformers: Annotated[
        str, typer.Option(help=f"its ways that take part, of {','.join(TRANSFORMERS_WAYS)}; or none")
    ] = ",".join(TRANSFORMERS_WAYS),
    prompts: Prompts = DEFAULT_PROMPTS,
    random_tokens: Annotated[
        int, typer.Option(min=0, help="single prompts of so many random token ids instead, and random ids in all")
    ] = 0,
    num_single: Annotated[int, typer.Option(min=0, help="prompts that run one at a time")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens of each of those")] = 128,
    num_requests: Annotated[int, typer.Option(min=0, help="requests of mixed lengths that run together")] = 64,
    whole_prompts: Annotated[
        bool, typer.Option("--whole-prompts", help="they are whole prompts instead, with --max-tokens new tokens each")
    ] = False,
    prompt_lengths: Annotated[str, typer.Option(help="tokens of their prompts, from and to")] = "100,1500",
    new_tokens: Annotated[str, typer.Option(help="new tokens of each, from and to")] = "32,256",
    rounds: Annotated[int, typer.Option(min=1, help="turns of each")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of the lengths, the pieces and random token ids")] = 0,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Our engine against transformers with the same weights, and against engines in processes of their own.

    One request at a time: generate, generate with a compiled static cache, and generate with the MTP modules. Many at
    once, their prompts pieces of the prompts file: continuous batching. All are greedy, EOS is ignored, prefill is part
    of the time. What fails is reported with its reason. With --output the report grows with each turn. The weights are
    loaded twice, so on a GPU give --kv-cache-memory-bytes. A command of --external takes part in both; what it has to
    speak, and commands for several engines, are in benchmarks/peers/README.md. It is stopped between its turns.
    """
    from foredraft.bench.peers import measure_peers, mixed_jobs

    tried = list(dict.fromkeys(integers("--depths", depths, low=0) or [0]))
    lengths, new = _range("--prompt-lengths", prompt_lengths), _range("--new-tokens", new_tokens)
    ways, processes = _ways(transformers), _processes(external or [], external_timeout)
    with usage_errors():
        config = with_room(config, tried, 1)
        num_texts = max(1, num_single, num_requests if whole_prompts else 0)
        texts = [] if random_tokens else read_prompts(prompts, num_texts)
    llm = load(config)
    whole, text = _material(llm, texts, num_texts, random_tokens, lengths[1], seed)
    if whole_prompts:
        together = _whole_jobs(whole[:num_requests], max_tokens)
    else:
        together = mixed_jobs(text, num_requests, lengths, new, seed)
    workloads = [
        _Workload(
            f"one at a time, {num_single} in all", _whole_jobs(whole[:num_single], max_tokens), is_together=False
        ),
        _Workload(f"together, {num_requests} requests", together, is_together=True),
    ]
    settings = {"depths": tried, "num_single": num_single, "max_tokens": max_tokens, "num_requests": num_requests}
    settings |= {"whole_prompts": True} if whole_prompts else {"prompt_lengths": lengths, "new_tokens": new}
    settings |= {"rounds": rounds, "seed": seed}
    settings |= {"random_tokens": random_tokens} if random_tokens else {"prompts": prompts.name}
    keep = keeper(output, "peers", llm, settings | engine_settings(llm))
    found: dict[str, PeersResult] = {}
    console = open_console()
    print_marks(llm.config.marks)
    others, notes = _load_others(llm) if ways else (None, [])
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)

    def on_turn(result: PeersResult) -> None:
        found[result.workload] = result
        keep(
            {
                "marks": llm.config.marks,
                "notes": notes,
                "external": {process.name: process.about for process in processes},
                "workloads": [each.to_dict() for each in found.values()],
            }
        )

    is_compared = llm.config.synthetic_rates is None
    with ExitStack() as whole_run:
        for process in processes:
            whole_run.enter_context(process)
        for workload in workloads:
            if not workload.jobs:
                continue
            with ExitStack() as stack:
                taking_part = _peers(llm, others, ways, processes, tried, stack, is_together=workload.is_together)
                bar = with_progress(range(rounds))
                result = measure_peers(
                    workload.name, taking_part, workload.jobs, bar, is_compared=is_compared, on_turn=on_turn
                )
            console.print(result.table())
            for line in result.failures():
                console.print(f"Failed: {line}", soft_wrap=True, markup=False)


def _peers(
    llm: LLM,
    others: LoadedModel | None,
    ways: Sequence[str],
    processes: Sequence[PeerProcess],
    depths: Sequence[int],
    stack: ExitStack,
    *,
    is_together: bool,
) -> list[Peer]:
    """Those of one workload, ours first. stack: closes what has to be."""
    from foredraft.bench.peer_engines import ExternalEngine, OurEngine, TransformersBatching, TransformersGenerate

    found: list[Peer] = [OurEngine(llm, depth, None if is_together else 1) for depth in depths]
    found += [ExternalEngine(process, is_together=is_together) for process in processes]
    if others is None:
        return found
    target = others.target
    if is_together:
        return [*found, stack.enter_context(TransformersBatching(target))] if "batching" in ways else found
    if "generate" in ways:
        found.append(TransformersGenerate("transformers generate", target))
    if "static" in ways:
        found.append(TransformersGenerate("transformers generate, static cache", target, cache="static"))
    if "modules" in ways and others.mtp is not None and llm.config.synthetic_rates is None:
        name = f"transformers generate, {others.mtp.num_mtp_layers} MTP modules"
        found.append(TransformersGenerate(name, target, mtp=others.mtp))
    return found


def _ways(text: str) -> list[str]:
    """What --transformers asks for."""
    ways = [] if text == "none" else text.split(",")
    if unknown := set(ways) - set(TRANSFORMERS_WAYS):
        known = ", ".join(TRANSFORMERS_WAYS)
        raise typer.BadParameter(f"--transformers must be none, or some of {known}, not {', '.join(sorted(unknown))!r}")
    return ways


def _processes(options: Sequence[str], timeout: float) -> list[PeerProcess]:
    """What --external asks for; nothing is started yet. BadParameter if an option cannot be understood."""
    from foredraft.bench.peer_process import PeerProcess

    found: dict[str, PeerProcess] = {}
    for option in options:
        name, _, text = option.partition("=")
        try:
            command = shlex.split(text)
        except ValueError as error:
            raise typer.BadParameter(f"--external {name}: {error} in {text!r}") from error
        if not name or not command:
            raise typer.BadParameter(
                f"--external must be NAME=COMMAND, as in 'vLLM=python run_vllm.py', not {option!r}"
            )
        if shutil.which(command[0]) is None:
            raise typer.BadParameter(f"--external {name}: there is no executable {command[0]!r}")
        if name in found:
            raise typer.BadParameter(f"--external {name} is given twice")
        found[name] = PeerProcess(name, command, timeout)
    return list(found.values())


def _load_others(llm: LLM) -> tuple[LoadedModel | None, list[str]]:
    """The same weights once more, with transformers' own attention (None if they cannot be had), and what is left out
    of the comparison and why. There are as many modules as our engine may use."""
    from foredraft.engine.llm import resolve_model
    from foredraft.models.loader import load_checkpoint

    path, mtp = resolve_model(llm.config)
    try:
        loaded = load_checkpoint(
            path,
            mtp,
            num_modules=min(llm.engine.limits.max_depth, llm.info.num_mtp_modules),
            dtype=llm.dtype,
            device=llm.device,
            attn_implementation="sdpa",
            load_format=llm.config.load_format,
        )
    except Exception as error:  # no memory for a second copy, for instance: ours can still be measured
        return None, [f"Left out: transformers, {described(error)}"]
    notes = []
    if loaded.mtp is not None and llm.config.synthetic_rates is not None:
        notes.append("Left out: transformers' generate with MTP modules, which cannot accept drafts by chance")
    if llm.config.quantization != "none":
        notes.append(f"transformers runs the weights as they are, not quantization={llm.config.quantization}")
    return loaded, notes


def _material(
    llm: LLM, texts: list[str], num_texts: int, random_tokens: int, longest: int, seed: int
) -> tuple[list[list[int]], list[int]]:
    """Whole prompts, `num_texts` of them, and a text that the others are cut from."""
    from foredraft.bench.steady import random_prompts

    if random_tokens:
        return random_prompts(llm, num_texts, random_tokens, seed), random_prompts(llm, 1, 4 * longest, seed + 1)[0]
    if llm.tokenizer is None:
        raise ConfigError("the prompts are text, and the checkpoint has no tokenizer: give --random-tokens")
    return tokenize(llm, texts), [token_id for text in texts for token_id in llm.token_ids(text)]


def _whole_jobs(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Job]:
    from foredraft.bench.peers import Job

    return [Job(tuple(prompt), num_tokens) for prompt in prompts]


def _range(name: str, text: str) -> tuple[int, int]:
    """Two numbers, the lower first."""
    numbers = integers(name, text)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise typer.BadParameter(f"{name} must be two numbers, the lower first, as in 100,1500, not {text!r}")
    return numbers[0], numbers[1]
