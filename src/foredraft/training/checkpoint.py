"""Where training stands, in one file that is whole or not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.training.files import write_atomically

FORMAT = 1


@dataclass
class Checkpoint:
    """Everything that the next step depends on. Order and draws follow from seed and step: no generator's state.

    made_with: the recipe, target and corpus. num_steps: None as long as it is not known. weights: of the modules, in
    float32; averages: of them, if the recipe keeps any. best_length: the largest that was measured on held-out rows,
    num_worse: measurements since.
    """

    made_with: dict[str, Any]
    step: int
    num_steps: int | None
    seconds: float
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    best_length: float = 0.0
    num_worse: int = 0
    is_done: bool = False
    format: int = field(default=FORMAT)

    def save(self, file: Path) -> None:
        """Write it, in the place of an older one."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_atomically(file, lambda partial: torch.save(content, partial))

    @classmethod
    def load(cls, file: Path, device: torch.device) -> Checkpoint:
        """Read one, its tensors to `device`. ConfigError if it is damaged or of another format."""
        try:
            content: Any = torch.load(file, map_location=device, weights_only=True)
            checkpoint = cls(**content)
        except Exception as error:  # torch.load fails in many ways
            raise ConfigError(f"{file} cannot be read as a checkpoint of training ({error}): delete it") from error
        if checkpoint.format != FORMAT:
            raise ConfigError(f"{file} was written by another version of Foredraft: delete it to begin anew")
        return checkpoint


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Weights alone, by name."""
    write_atomically(file, lambda partial: torch.save(weights, partial))


def load_weights(file: Path, device: torch.device) -> dict[str, Tensor]:
    """What `save_weights` wrote. ConfigError if it is not there or damaged."""
    try:
        weights: dict[str, Tensor] = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:
        raise ConfigError(f"{file} cannot be read as weights of modules ({error}); run the stage train") from error
    return weights
