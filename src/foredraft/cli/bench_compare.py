"""Commands of `foredraft bench` that put depths and methods side by side: speed, and drafts accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console

from foredraft.bench.prompts import DEFAULT_PROMPTS, read_prompts
from foredraft.cli.bench_options import (
    MaxTokens,
    NumPrompts,
    Output,
    Prompts,
    Raw,
    integers,
    print_marks,
    tokenize,
    write,
)
from foredraft.cli.bench_options import with_progress as with_bar
from foredraft.cli.display import depth_table, open_console
from foredraft.cli.options import engine_options, load, usage_errors
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError
from foredraft.sampling_params import SamplingParams
from foredraft.statistics import SpeculationStats

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.bench.acceptance import CycleCounts, Forecast
    from foredraft.bench.compare import CompareVariant

DEFAULT_DEPTHS = (0, 1, 2, 4, 8)

RandomTokens = Annotated[
    int, typer.Option(min=0, help="prompts of so many random token ids instead; needs no tokenizer and no file")
]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy")]
Seed = Annotated[int, typer.Option(min=0, help="the first prompt's; each next one has the next")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="go on after EOS")]


@engine_options
def compare(
    prompts: Prompts = DEFAULT_PROMPTS,
    num_prompts: NumPrompts = 16,
    random_tokens: RandomTokens = 0,
    max_tokens: MaxTokens = 128,
    depths: Annotated[str, typer.Option(help="draft tokens a step to compare; 0,1,2,4,8 as far as they go")] = "",
    methods: Annotated[str, typer.Option(help="verification methods to compare instead, as in rejection,block")] = "",
    concurrency: Annotated[str, typer.Option(help="requests in flight, a list")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="turns of each variant at each concurrency")] = 3,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    raw: Raw = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw acceptance and throughput: a .svg or .png file, or a directory for both")
    ] = None,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """Depths or verification methods against each other, at several concurrencies, in one run.

    All take turns, round by round, in an order that rotates. In a turn all prompts run in a closed loop: a request that
    ends is replaced at once. Figures are medians over the rounds, prefill included; the others are compared with the
    first variant. Each method has an engine of its own, so on a GPU give --kv-cache-memory-bytes.
    """
    from foredraft.bench.compare import check_concurrencies, measure_compare
    from foredraft.bench.plots import plot_compare, plot_files

    tried, concurrencies = integers("--depths", depths, low=0), integers("--concurrency", concurrency) or [1]
    names = list(dict.fromkeys(filter(None, methods.split(","))))
    with usage_errors():
        _check_variants(config, tried, names, temperature)
        files = [] if plot is None else plot_files(plot)
        check_concurrencies(concurrencies, num_prompts, config.max_num_seqs)
        texts = [] if random_tokens else read_prompts(prompts, num_prompts)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    variants = _method_variants(config, names) if names else _depth_variants(config, tried)
    llm = variants[0].llm
    token_ids = _prompts_of(llm, texts, num_prompts, random_tokens, is_raw=raw)
    result = measure_compare(variants, token_ids, params, concurrencies, with_bar(range(rounds)))
    console = open_console()
    print_marks(llm.config.marks)
    console.print(result.table())
    console.print(result.equality)
    if files:
        plot_compare(result, files, f"{llm.info.path.name}, {str(llm.dtype).removeprefix('torch.')}, {llm.device}")
        console.print(f"Plots: {', '.join(map(str, files))}", soft_wrap=True)
    settings = _prompt_settings(prompts, num_prompts, random_tokens)
    settings |= {"max_tokens": max_tokens, "rounds": rounds, "temperature": temperature, "seed": seed}
    settings |= {"ignore_eos": ignore_eos, "verification": llm.engine.limits.verification, "marks": llm.config.marks}
    write(output, "compare", llm, {"settings": settings, **result.to_dict()})


@engine_options
def acceptance(
    prompts: Prompts = DEFAULT_PROMPTS,
    num_prompts: NumPrompts = 16,
    random_tokens: RandomTokens = 0,
    max_tokens: MaxTokens = 128,
    depths: Annotated[str, typer.Option(help="draft tokens a step to try, as in 2,4,8; the largest if left out")] = "",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    raw: Raw = False,
    output: Output = None,
    *,
    config: EngineConfig,
) -> None:
    """How many drafts are accepted: by depth, and by how many the cycle before accepted.

    From the cycles of the largest depth it is foretold what smaller ones give, and with --depths these are measured on
    the same prompts. "Same starts" takes the cycles of the largest depth as they are, cut to the smaller one;
    "foretold" follows the starts of the smaller one, of which more lie in easy text.
    """
    from foredraft.bench.acceptance import forecast_table

    tried = sorted(set(integers("--depths", depths)))
    with usage_errors():
        texts = [] if random_tokens else read_prompts(prompts, num_prompts)
        config = _with_room(config, tried)
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + index, ignore_eos=ignore_eos)
            for index in range(num_prompts)
        ]
    llm = load(config)
    if llm.engine.limits.max_depth == 0:
        raise ConfigError("there is nothing to accept: num_speculative_tokens is 0, or there are no MTP modules")
    token_ids = _prompts_of(llm, texts, num_prompts, random_tokens, is_raw=raw)
    measured = {
        depth: _Measured(llm, token_ids, params, depth) for depth in with_bar(tried or [llm.engine.limits.max_depth])
    }
    deepest = measured[max(measured)]
    if not deepest.cycles.num_cycles:
        raise ForedraftError(f"no output has room for a cycle of {max(measured)} drafts: raise max_tokens")
    forecasts = _forecasts(measured)
    console = open_console()
    print_marks(llm.config.marks)
    deepest.show(console)
    for depth, one in measured.items():
        console.print(f"K = {depth}, by what the cycle before accepted:", one.cycles.table())
        console.print(f"{one.cycles.num_left_out} cycles at the ends of outputs are left out")
    if forecasts:
        console.print(f"Foretold from the cycles of K = {max(measured)}:", forecast_table(forecasts))
    settings = _prompt_settings(prompts, num_prompts, random_tokens)
    settings |= {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "ignore_eos": ignore_eos}
    settings |= {"num_speculative_tokens": max(measured), "verification": llm.engine.limits.verification}
    settings["marks"] = llm.config.marks
    figures = {"num_tokens": sum(deepest.lengths), **deepest.speculation.to_dict()}
    figures["depths"] = [one.to_dict() for one in measured.values()]
    figures["forecasts"] = [one.to_dict() for one in forecasts]
    write(output, "acceptance", llm, {"settings": settings, **figures})


class _Measured:
    """All prompts at one depth. lengths: tokens of each output."""

    def __init__(self, llm: LLM, prompts: list[list[int]], params: Sequence[SamplingParams], depth: int) -> None:
        from foredraft.bench.acceptance import CycleCounts

        self.cycles: CycleCounts = CycleCounts(depth)
        self.speculation = SpeculationStats()
        self.lengths: list[int] = []
        limit = llm.engine.limits.max_model_len
        for result, one in zip(
            llm.generate(prompts, [replace(one, num_speculative_tokens=depth) for one in params]), params
        ):
            if result.error is not None:
                raise ForedraftError(result.error)
            room = limit - len(result.prompt_token_ids)
            self.cycles.observe_output(result.token_depths, min(one.max_tokens or room, room))
            self.speculation.add(result.stats)
            self.lengths.append(len(result.token_ids))

    def show(self, console: Console) -> None:
        """The depths, and the mean over all cycles with drafts, those at the ends of outputs included."""
        stats = self.speculation
        console.print(depth_table(stats, box.MARKDOWN))
        console.print(
            f"Mean acceptance length {stats.mean_acceptance_length:.2f}, "
            f"over {stats.num_drafts} drafts for {sum(self.lengths)} tokens"
        )

    def to_dict(self) -> dict[str, Any]:
        return self.cycles.to_dict() | {"speculation": self.speculation.to_dict()}


def _forecasts(measured: dict[int, _Measured]) -> list[Forecast]:
    """From the largest depth: of the others measured; if there are none, of all smaller ones."""
    from foredraft.bench.acceptance import forecast

    largest = max(measured)
    source = measured[largest]
    if not source.cycles.num_cycles:
        return []
    depths = [depth for depth in measured if depth < largest] or range(1, largest)
    return [forecast(source.cycles, depth, measured[depth].cycles if depth in measured else None) for depth in depths]


def _check_variants(config: EngineConfig, depths: list[int], methods: list[str], temperature: float) -> None:
    from foredraft.bench.verification import method_config

    for flag, values in (("--depths", depths), ("--methods", methods)):
        if len(set(values)) < len(values):
            raise ConfigError(f"{flag} must name each variant once, not {values}")
    if depths and methods:
        raise ConfigError("--depths and --methods cannot be compared in one run: give one of them")
    if methods and temperature == 0:
        raise ConfigError("--methods need a --temperature above 0: greedy requests are verified alike by all")
    for method in methods:
        method_config(config, method)
    _with_room(config, depths)


def _with_room(config: EngineConfig, depths: list[int]) -> EngineConfig:
    """With room for the deepest of `depths`, if the settings say nothing. ConfigError if they have no room for it."""
    deepest = max(depths, default=0)
    if config.num_speculative_tokens is None:
        return replace(config, num_speculative_tokens=deepest) if depths else config
    if deepest > config.num_speculative_tokens:
        raise ConfigError(f"--depths has {deepest}, but num_speculative_tokens={config.num_speculative_tokens}")
    return config


def _depth_variants(config: EngineConfig, depths: list[int]) -> list[CompareVariant]:
    from foredraft.bench.compare import CompareVariant

    llm = load(_with_room(config, depths))
    tried = depths or [depth for depth in DEFAULT_DEPTHS if depth <= llm.engine.limits.max_depth]
    return [CompareVariant(f"K={depth}", llm, depth) for depth in dict.fromkeys(tried)]


def _method_variants(config: EngineConfig, methods: list[str]) -> list[CompareVariant]:
    from foredraft.bench.compare import CompareVariant
    from foredraft.bench.verification import method_config

    llms = {name: load(method_config(config, name), is_quiet=name != methods[0]) for name in methods}
    if any(llm.engine.limits.max_depth == 0 for llm in llms.values()):
        raise ConfigError("--methods have nothing to verify: num_speculative_tokens is 0, or there are no MTP modules")
    return [CompareVariant(name, llm, llm.engine.limits.max_depth) for name, llm in llms.items()]


def _prompts_of(llm: LLM, texts: list[str], count: int, random_tokens: int, *, is_raw: bool) -> list[list[int]]:
    """Token ids of the texts, or random ones, the same in every run."""
    if random_tokens:
        draw, vocab_size = random.Random(0), llm.engine.limits.vocab_size
        return [[draw.randrange(vocab_size) for _ in range(random_tokens)] for _ in range(count)]
    if llm.tokenizer is None:
        raise ConfigError("the prompts are text, and the checkpoint has no tokenizer: give --random-tokens")
    return tokenize(llm, texts, is_raw=is_raw)


def _prompt_settings(prompts: Path, num_prompts: int, random_tokens: int) -> dict[str, Any]:
    if random_tokens:
        return {"random_tokens": random_tokens, "num_prompts": num_prompts}
    return {"prompts": prompts.name, "num_prompts": num_prompts}
