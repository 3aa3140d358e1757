"""What it costs not to rebuild the rows of modules after a rejection, on a small Inkling trained here and now.

A module's row reads tokens ahead of it: where those were drafts that were rejected, its keys and values, and the inputs
of its short convolutions, are those of another text. Drafts of a random model are right by chance only, so a target
and its eight modules are trained on a toy language, by transformers' own code, and then run by the engine twice: as it
is, and with a drafter that leaves such rows as they were written.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from foredraft import LLM, SamplingParams
from foredraft.cache.storage import CacheStorage
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.models.draft_head import DraftHead
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.speculation.drafter import Drafter, Drafts, Window
from foredraft.statistics import SpeculationStats

NUM_MODULES = 8
NUM_SYMBOLS = 32
NUM_NAMES = 12
VOCAB_SIZE = NUM_SYMBOLS + NUM_NAMES


class ToyLanguage:
    """Texts of phrases. Each begins with a name; its symbols follow each other by the two before (a Markov chain of
    order 2, the same in all texts). A name that comes again in a text brings the same phrase again, however far back.
    """

    def __init__(self, seed: int = 0) -> None:
        chance = random.Random(seed)
        symbols = range(NUM_SYMBOLS)
        self._followers = {(a, b): chance.sample(symbols, 3) for a in range(VOCAB_SIZE) for b in symbols}

    def prompts(self, count: int) -> list[list[int]]:
        """Texts that no training has: each gives three phrases or four, so that some names come again."""
        return self.texts(count, 40, seed=-1)

    def texts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """So many texts of `length` tokens."""
        chance = random.Random(seed)
        return [self._text(length, chance) for _ in range(count)]

    def _text(self, length: int, chance: random.Random) -> list[int]:
        names = chance.sample(range(NUM_SYMBOLS, VOCAB_SIZE), 5)
        phrases = {name: self._phrase(name, chance) for name in names}
        text: list[int] = []
        while len(text) < length:
            name = chance.choice(names)
            text += [name, *phrases[name]]
        first = chance.randrange(min(8, len(text) - length + 1))
        return text[first : first + length]

    def _phrase(self, name: int, chance: random.Random) -> list[int]:
        last, phrase = name, [chance.randrange(NUM_SYMBOLS)]
        while len(phrase) < 9:
            (follower,) = chance.choices(self._followers[last, phrase[-1]], (6, 3, 1))
            last = phrase[-1]
            phrase.append(follower)
        return phrase


@dataclass(frozen=True)
class Training:
    """How long each part is trained, in steps of `batch_size` texts of `length` tokens: the target, the first module
    alone, and the chain of all."""

    target_steps: int = 500
    module_steps: int = 150
    chain_steps: int = 100
    batch_size: int = 16
    length: int = 96
    seed: int = 0


@dataclass(frozen=True)
class TrainedModel:
    """What training came to: the mean loss, in nats, of the last steps of the target and of each module."""

    target_loss: float
    module_losses: tuple[float, ...]
    seconds: float


def train(directory: Path, language: ToyLanguage, training: Training) -> TrainedModel:
    """Train a target, then its modules, and write them to `directory` as a checkpoint."""
    started = time.perf_counter()
    torch.manual_seed(training.seed)
    config = _config()
    target: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    mtp = MtpModel(target, NUM_MODULES)  # before the target is trained: it initialises the embedding and the head
    target_loss = _train_target(target, language, training)
    with torch.no_grad():  # the modules have a copy, without its norm
        mtp.embed_tokens.get_parameter("weight").copy_(target.get_input_embeddings().get_parameter("weight"))
    target.requires_grad_(False)
    _begin_as_last_layer(target, mtp)
    losses = _train_modules(target, mtp, language, training)
    target.save_pretrained(directory)
    shared = ("embed_tokens.", "shared_head.")
    tensors = {name: tensor.contiguous() for name, tensor in mtp.state_dict().items() if not name.startswith(shared)}
    save_file(tensors, directory / "mtp.safetensors", metadata={"format": "pt"})
    return TrainedModel(target_loss, tuple(losses), time.perf_counter() - started)


def _config() -> Any:
    return AutoConfig.for_model(
        "inkling_text",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "dense"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=32,
        d_rel=8,
        rel_extent=64,
        vocab_size=VOCAB_SIZE,
        logits_mup_width_multiplier=1.0,
        max_position_embeddings=1024,
        num_mtp_layers=NUM_MODULES,
        chain_hidden_post_norm=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _batches(language: ToyLanguage, training: Training, num_steps: int, first_seed: int) -> Iterator[Tensor]:
    for step in range(num_steps):
        yield torch.tensor(language.texts(training.batch_size, training.length, first_seed + step))


def _optimizer(parameters: Iterator[torch.nn.Parameter], num_steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps, pct_start=0.1)
    return optimizer, schedule


def _train_target(target: PreTrainedModel, language: ToyLanguage, training: Training) -> float:
    optimizer, schedule = _optimizer(target.parameters(), training.target_steps)
    losses = []
    for tokens in _batches(language, training, training.target_steps, 0):
        logits = target(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        _step(optimizer, schedule, loss)
        losses.append(float(loss.detach()))
    return _mean(losses[-20:])


def _begin_as_last_layer(target: PreTrainedModel, mtp: MtpModel) -> None:
    """Modules that run the target's last layer again, over the sum of state and embedding, learn within a minute."""
    last, eye = target.get_decoder().layers[-1], torch.eye(mtp.config.hidden_size)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for number in range(NUM_MODULES):
            mtp.get_submodule(f"layers.{number}.mtp_block").load_state_dict(last.state_dict())
            mtp.get_parameter(f"layers.{number}.eh_proj.weight").copy_(torch.cat((eye, eye), dim=1))


def _train_modules(target: PreTrainedModel, mtp: MtpModel, language: ToyLanguage, training: Training) -> list[float]:
    """The first module alone to begin with, and the others from what it has learnt; then the chain of all."""
    decoder = target.get_decoder()  # type: ignore[no-untyped-call]
    losses: list[list[float]] = []
    for num_steps, depth in ((training.module_steps, 1), (training.chain_steps, NUM_MODULES)):
        for module in mtp.layers[1:depth]:
            module.load_state_dict(mtp.layers[0].state_dict())
        trained = (parameter for part in (mtp.layers, mtp.shared_post_norm) for parameter in part.parameters())
        optimizer, schedule = _optimizer(trained, num_steps)
        losses = []
        for tokens in _batches(language, training, num_steps, 10**6 * depth):
            with torch.no_grad():
                hidden = decoder(tokens, use_cache=False).last_hidden_state
            by_depth = _chain_losses(mtp, tokens, hidden, depth)
            _step(optimizer, schedule, torch.stack(by_depth).mean())
            losses.append([float(loss.detach()) for loss in by_depth])
    return [_mean(column) for column in zip(*losses[-20:])]


def _chain_losses(mtp: MtpModel, tokens: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
    """The loss of each module, every token before its own being the text's."""
    num_rows = tokens.shape[1] - depth - 1
    hidden = hidden[:, :num_rows]
    losses = []
    for module in range(depth):
        rows = slice(module + 1, module + 1 + num_rows)
        positions = torch.arange(rows.start, rows.stop)[None]
        hidden = mtp.forward_layer(module, hidden, positions, None, input_ids=tokens[:, rows])
        wanted = tokens[:, rows.start + 1 : rows.stop + 1]
        losses.append(F.cross_entropy(mtp._project_to_logits(hidden).flatten(0, 1), wanted.flatten()))
    return losses


def _step(optimizer: torch.optim.Optimizer, schedule: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class StaleDrafter(Drafter):
    """Runs modules over new rows only: rows that read drafts stay as they were, whatever became of the drafts.

    Only for caches that are not shared, and requests that are not preempted: what it leaves there counts as exact.
    """

    def __init__(self, target: TargetModel, modules: MtpModules, storage: CacheStorage, head: DraftHead) -> None:
        super().__init__(target, modules, storage, head)
        self._ends: dict[str, int] = {}

    def run(self, windows: Sequence[Window], sampling: Any, rules: Any) -> Drafts:
        drafts = super().run([self._new_rows(window) for window in windows], sampling, rules)
        for window in windows:
            if window.num_drafts == self.modules.num_modules:  # then every module has covered all rows
                self._ends[window.request_id] = window.end
        return drafts

    def _new_rows(self, window: Window) -> Window:
        num_old = max(0, self._ends.get(window.request_id, 0) - window.start)
        return replace(
            window,
            start=window.start + num_old,
            token_ids=window.token_ids[num_old:],
            hidden_slots=window.hidden_slots[num_old:],
        )


@dataclass(frozen=True)
class StaleRowsResult:
    """How drafts fared with rows that are rebuilt and with rows that are not; is_identical: the tokens are the same."""

    trained: TrainedModel
    rebuilt: SpeculationStats
    stale: SpeculationStats
    is_identical: bool

    def table(self) -> Table:
        """A table that is Markdown as well."""
        table = Table("rows after a rejection", box=box.MARKDOWN)
        for heading in (*(f"depth {depth}" for depth in range(1, NUM_MODULES + 1)), "tokens a cycle"):
            table.add_column(heading, justify="right")
        for name, stats in (("rebuilt", self.rebuilt), ("left as they were", self.stale)):
            rates = (f"{rate:.3f}" for rate in stats.accepted_rates)
            table.add_row(name, *rates, f"{stats.mean_acceptance_length:.2f}")
        return table

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        kinds = {"rebuilt": self.rebuilt, "stale": self.stale}
        figures = {
            name: {
                "num_cycles": stats.num_cycles,
                "accepted_rates": stats.accepted_rates,
                "mean_acceptance_length": stats.mean_acceptance_length,
            }
            for name, stats in kinds.items()
        }
        num_rebuilt = self.rebuilt.num_rebuilt_rows
        trained = asdict(self.trained)
        return {"trained": trained, "num_rebuilt_rows": num_rebuilt, **figures, "is_identical": self.is_identical}


def measure_stale_rows(
    llm: LLM, trained: TrainedModel, prompts: Sequence[list[int]], max_tokens: int
) -> StaleRowsResult:
    """Continue prompts greedily, by the engine of `llm` and by one over the same weights that leaves stale rows."""
    stale = build_engine(llm.loaded, llm.config, StaleDrafter)
    outputs = [_continue(engine, prompts, max_tokens) for engine in (llm.engine, stale)]
    rebuilt, left = llm.engine.stats.speculation, stale.stats.speculation
    return StaleRowsResult(trained, rebuilt, left, outputs[0] == outputs[1])


def _continue(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [engine.add_request(f"{index}", prompt, params) for index, prompt in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    return [request.token_ids for request in requests]


def load_trained(directory: Path) -> LLM:
    """An engine for the trained checkpoint, in which no two requests share rows."""
    return LLM(directory, dtype="float32", device="cpu", max_num_seqs=8, enable_prefix_caching=False, num_blocks=256)
