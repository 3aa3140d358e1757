"""What modules are trained with: one frozen dataclass, checked once, saved beside what came of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from foredraft.errors import ConfigError
from foredraft.training.files import write_text

Stage = Literal["synthesise", "train", "evaluate", "export"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Targets = Literal["soft", "hard"]
Storage = Literal["int8", "bfloat16", "float32"]
Optimizer = Literal["muon", "adamw"]
Precision = Literal["auto", "bfloat16", "float32"]


def _setting(default: Any, stage: Stage, help: str) -> Any:
    return field(default=default, metadata={"help": help, "stage": stage})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides which modules come out. Raises ConfigError, which names the field and the rule.

    The metadata of a field name the stage that it belongs to: what other stages made stays good when it changes.
    """

    num_rows: int = _setting(31_000, "synthesise", "rows of text that the target writes")
    row_length: int = _setting(512, "synthesise", "tokens of a row")
    greedy_share: float = _setting(0.5, "synthesise", "share of conversations whose answers are greedy")
    min_temperature: float = _setting(0.4, "synthesise", "least temperature of the other answers")
    max_temperature: float = _setting(1.0, "synthesise", "greatest temperature of the other answers")
    user_temperature: float = _setting(0.9, "synthesise", "mean temperature of user turns; they vary by a tenth")
    prompts: str | None = _setting(
        None, "synthesise", "file of user turns to begin with: .jsonl with prompt or token_ids, or .txt"
    )
    prompt_share: float = _setting(0.25, "synthesise", "share of conversations that begin with one of them")
    synthesis_batch: int = _setting(512, "synthesise", "conversations that are written at once, a file of rows each")
    synthesis_seed: int = _setting(0, "synthesise", "seed of what is written")

    depths: int = _setting(8, "train", "number of modules (K)")
    block_width: int | None = _setting(None, "train", "neurons of a module's MLP; as the target's if left out")
    num_steps: int | None = _setting(None, "train", "optimizer steps; 4100 if neither this nor train-seconds is given")
    train_seconds: float | None = _setting(
        None, "train", "as many steps as fit these seconds, by the speed of the first"
    )
    batch_size: int = _setting(32, "train", "rows of text a step, over all processes")
    learning_rate: float = _setting(2e-3, "train", "of matrices and norms alike")
    optimizer: Optimizer = _setting("muon", "train", "of matrices: muon or adamw; norms have adamw")
    warmup_steps: int = _setting(150, "train", "steps in which the rate rises to that")
    flat_share: float = _setting(0.4, "train", "share of the steps after which it falls, linearly")
    final_rate: float = _setting(0.02, "train", "share of the rate that is left at the end")
    weight_decay: float = _setting(0.01, "train", "of matrices")
    max_gradient_norm: float = _setting(1.0, "train", "gradients are scaled down to it")
    data_share: float = _setting(1.0, "train", "share of the rows of text that is trained on")
    position_share: float = _setting(0.5, "train", "share of the positions of a batch in the loss, drawn by chance")
    other_weight: float = _setting(0.15, "train", "how likely tokens are drawn that no assistant said, against 1")
    depth_decay: float = _setting(0.95, "train", "weight of each depth's loss against that of the one before")
    targets: Targets = _setting("soft", "train", "soft: the target's distribution; hard: the token that came")
    overlap_weight: float = _setting(0.0, "train", "adds so much of the probability that a sampled draft is rejected")
    on_policy_share: float = _setting(0.0, "train", "share of inputs of later depths that are the chain's own drafts")
    solo_steps: int = _setting(0, "train", "steps of the first module alone, before the others begin as its copies")
    ema_decay: float = _setting(0.0, "train", "average of weights that is kept and exported (0: the weights)")
    draft_vocab_size: int | None = _setting(
        None, "train", "loss over the N most frequent tokens only, for a draft head"
    )
    start: str | None = _setting(None, "train", "modules to begin with (.safetensors or a directory); new if left out")
    projection_hidden: float = _setting(1.0, "train", "multiple of the identity on the hidden state at the start")
    projection_embedding: float = _setting(0.3, "train", "multiple of the identity on the embedding at the start")
    projection_noise: float = _setting(0.01, "train", "standard deviation of what is added to both")
    gradient_checkpointing: bool = _setting(False, "train", "compute modules again in the backward pass: less memory")
    heldout_rows: int = _setting(64, "train", "rows of text that are kept back to measure acceptance on")
    heldout_every: int = _setting(500, "train", "steps between two such measurements")
    patience: int | None = _setting(None, "train", "measurements without a better one after which training ends")
    precision: Precision = _setting("auto", "train", "auto: bfloat16 on a GPU, float32 on a CPU; masters are float32")
    seed: int = _setting(0, "train", "seed of the start, the order of rows and the draws")

    evaluation_tokens: int = _setting(256, "evaluate", "most tokens of an answer that acceptance is measured on")
    evaluation_prompts: int = _setting(64, "evaluate", "most prompts of a file")

    storage: Storage = _setting("int8", "export", "int8 rows with a scale each, bfloat16 or float32")

    def __post_init__(self) -> None:
        for name in ("num_rows", "synthesis_batch", "depths", "batch_size", "heldout_every", "evaluation_tokens"):
            self._integer(name, 1)
        for name in ("synthesis_seed", "seed", "warmup_steps", "solo_steps", "heldout_rows"):
            self._integer(name, 0)
        self._integer("evaluation_prompts", 1)
        for name in ("block_width", "num_steps", "draft_vocab_size", "patience"):
            if getattr(self, name) is not None:
                self._integer(name, 1)
        self._integer("row_length", 2 * self.depths + 2)
        for name in ("greedy_share", "prompt_share", "flat_share", "final_rate", "on_policy_share", "other_weight"):
            self._number(name, 0, 1)
        for name in ("data_share", "position_share", "depth_decay"):
            self._number(name, 1e-6, 1)
        self._number("ema_decay", 0, 0.999999)
        for name in ("min_temperature", "max_temperature", "user_temperature"):
            self._number(name, 0.01, 10)
        for name in ("learning_rate", "weight_decay", "overlap_weight", "projection_noise"):
            self._number(name, 0, 100)
        for name in ("projection_hidden", "projection_embedding"):
            self._number(name, -100, 100)
        self._number("max_gradient_norm", 1e-6, 1e6)
        if self.train_seconds is not None:
            self._number("train_seconds", 1, 1e7)
        if self.num_steps is not None and self.train_seconds is not None:
            raise ConfigError("num_steps and train_seconds each say how long to train: give one")
        if self.min_temperature > self.max_temperature:
            raise ConfigError(f"min_temperature={self.min_temperature} is above max_temperature={self.max_temperature}")
        if self.prompts is not None and Path(self.prompts).suffix not in (".jsonl", ".txt"):
            raise ConfigError(
                f"prompts={self.prompts!r} must end in .jsonl (objects with prompt) or .txt (a turn a line)"
            )
        if self.targets == "hard" and self.overlap_weight:
            raise ConfigError("overlap_weight needs targets=soft: it compares with the target's distribution")
        for name, kind in (
            ("targets", Targets),
            ("optimizer", Optimizer),
            ("storage", Storage),
            ("precision", Precision),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")

    def of_stage(self, stage: Stage) -> dict[str, Any]:
        """The settings that decide what a stage makes."""
        values = asdict(self)
        return {each.name: values[each.name] for each in fields(self) if each.metadata["stage"] == stage}

    def save(self, file: Path) -> None:
        """Write all settings as JSON."""
        write_text(file, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, file: Path) -> Recipe:
        """Read what `save` wrote. ConfigError names the file and what is wrong with it."""
        try:
            values: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"recipe {file} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"recipe {file} must be an object of settings")
        if unknown := sorted(set(values) - set(get_type_hints(cls))):
            raise ConfigError(f"recipe {file}: unknown setting {', '.join(unknown)}")
        return cls(**values)

    def _integer(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or not low <= value <= high:
            raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def require_equal(made: dict[str, Any], wanted: dict[str, Any], where: Path, except_for: Collection[str] = ()) -> None:
    """Refuse to go on with what other settings have begun. ConfigError names those that differ."""
    names = [name for name in wanted if name not in except_for and made.get(name) != wanted[name]]
    if names:
        changes = ", ".join(f"{name} was {made.get(name)!r} and is {wanted[name]!r}" for name in names)
        raise ConfigError(f"{where} was made by another recipe: {changes}; take the same or another directory")
