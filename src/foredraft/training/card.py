"""The card beside exported modules: what they are, how they were made, what they give."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import transformers

import foredraft
from foredraft.training.metrics_file import StepReport
from foredraft.training.recipe import Recipe


@dataclass(frozen=True)
class CardFacts:
    """target: its name and fingerprint; storage bytes of the weights; spoken_share of the corpus's tokens."""

    target: str
    target_fingerprint: str
    device: str
    num_parameters: int
    num_bytes: int
    num_rows: int
    num_tokens: int
    spoken_share: float
    num_steps: int
    seconds: float
    is_done: bool
    last: StepReport | None
    evaluations: Mapping[str, Sequence[Mapping[str, Any]]]


def card(facts: CardFacts, recipe: Recipe) -> str:
    """The card as Markdown."""
    parts = [
        f"# MTP modules for {facts.target}: {recipe.depths} depths",
        _what(facts, recipe),
        "## Figures",
        *(_figures(name, rows) for name, rows in facts.evaluations.items()),
        *([] if facts.evaluations else ["They were not evaluated on prompts."]),
        _training(facts),
        "## Recipe",
        _settings(recipe),
        "## Versions",
        _versions(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def versions() -> dict[str, str]:
    """What trained the modules."""
    return {
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _what(facts: CardFacts, recipe: Recipe) -> str:
    layouts = {
        "int8": "Matrices are int8 with one float32 scale for each row (`NAME_scale`; weight = int8 * scale), "
        "the rest is bf16",
        "bfloat16": "All tensors are bf16",
        "float32": "All tensors are float32",
    }
    size = f"{facts.num_parameters / 1e6:.1f} M parameters, {facts.num_bytes / 2**20:.1f} MiB"
    return (
        f"`mtp.safetensors`: {recipe.depths} multi-token-prediction modules, {size}, in the layout of transformers' "
        f"`MtpModel`. {layouts[recipe.storage]}. Embedding and head are the target's. They were trained by "
        f"`foredraft train` over the frozen target, on text that the target wrote itself; a lossless engine gives the "
        f"target's own output with them.\n\n"
        f"Module k (0 to {recipe.depths - 1}) at row i reads the hidden state of the depth before it at i (the "
        f"target's, after its final norm, for k = 0), the embedding of token i+k+1 and position i+k+1, and predicts "
        f"token i+k+2."
    )


def _figures(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{name}: mean acceptance length, with the target's own token; as the engine measured it, and exactly, from "
        f"passes over the same texts.",
        "",
        "| prompts | number | engine | exact | accepted by depth, share of cycles |",
        "|---|---:|---:|---:|---|",
    ]
    for row in rows:
        rates = " ".join(f"{rate:.3f}" for rate in row["engine"]["rates"])
        lines.append(
            f"| {row['name']} | {row['num_prompts']} | {row['engine']['mean_length']:.3f} "
            f"| {row['exact']['mean_length']:.3f} | {rates} |"
        )
    return "\n".join(lines)


def _training(facts: CardFacts) -> str:
    state = "" if facts.is_done else " **Training had not come to its end.**"
    lines = [
        "## Training",
        "",
        f"{facts.num_rows:,} rows of text, {facts.num_tokens:,} tokens, {facts.spoken_share:.0%} of them an "
        f"assistant's. {facts.num_steps:,} steps in {facts.seconds:,.0f} s.{state}",
    ]
    if facts.last is not None:
        lines += ["", "| depth | loss, nats | greedy match | overlap |", "|---:|---:|---:|---:|"]
        columns = zip(facts.last.loss, facts.last.match, facts.last.overlap)
        lines += [f"| {k} | {a:.3f} | {b:.3f} | {c:.3f} |" for k, (a, b, c) in enumerate(columns, start=1)]
        if facts.last.heldout_length is not None:
            lines += [
                "",
                f"Tokens a cycle on rows that were held out, greedily drafted: {facts.last.heldout_length:.3f}.",
            ]
    return "\n".join(lines)


def _settings(recipe: Recipe) -> str:
    values = asdict(recipe)
    lines = ["| setting | value | |", "|---|---|---|"]
    for each in fields(recipe):
        value = values[each.name]
        lines.append(f"| {each.name} | {'' if value is None else value} | {each.metadata['help']} |")
    return "\n".join(lines)


def _versions(facts: CardFacts) -> str:
    what = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"{what}; on {facts.device}. Target fingerprint {facts.target_fingerprint}."
