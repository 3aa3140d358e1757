"""What training reports, one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.training.files import write_text


@dataclass(frozen=True)
class StepReport:
    """Means since the report before. loss, match, overlap: by depth, as in `Losses`. heldout_length: tokens a cycle on
    rows that are not trained on, and heldout_rates by depth, where they were measured at this step."""

    step: int
    num_steps: int | None
    seconds: float
    tokens_per_second: float
    learning_rate: float
    gradient_norm: float
    loss: list[float]
    match: list[float]
    overlap: list[float]
    heldout_length: float | None = None
    heldout_rates: list[float] | None = None


class MetricsFile:
    """Lines of one run; opened again at an earlier step, it forgets what came after that."""

    def __init__(self, file: Path, step: int) -> None:
        self._file = file
        kept = [line for line in _lines(file) if line["step"] <= step]
        write_text(file, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, report: StepReport) -> None:
        """Append a line."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(report)) + "\n")


def read_metrics(file: Path) -> list[StepReport]:
    """All that was reported; a line that a kill has cut off is left out."""
    return [StepReport(**line) for line in _lines(file)]


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            value: Any = json.loads(line)
        except ValueError:
            continue
        lines.append(value)
    return lines
