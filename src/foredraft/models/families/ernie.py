"""ERNIE 4.5 MoE: modules under names of their own, without a norm before the head.

Beyond the rule:

- The parts of a module are published side by side, numbered last: `mtp_emb_norm.0`, `mtp_hidden_norm.0`,
  `mtp_linear_proj.0` and `mtp_block.0`.
- Head and next depth read what the block returns as it is. `MtpModel` builds modules so where the configuration has a
  `chain_hidden_post_norm` that is false.
"""

from __future__ import annotations

import re
from typing import Any

from foredraft.models.families.family import Family

_PARTS = {"emb_norm": "enorm", "hidden_norm": "hnorm", "linear_proj": "eh_proj", "block": "mtp_block"}
_NAMED = re.compile(rf"(?:model\.)?mtp_(?P<part>{'|'.join(_PARTS)})\.(?P<index>\d+)\.(?P<rest>.+)")


class Ernie(Family):
    """baidu/ERNIE-4.5-21B-A3B and its kind."""

    def prepare(self, text_config: Any, num_modules: int) -> None:
        text_config.chain_hidden_post_norm = False

    def mtp_name(self, name: str, num_hidden_layers: int) -> tuple[int, str] | None:
        if match := _NAMED.fullmatch(name):
            part, index, rest = match.groups()
            return int(index), f"layers.{index}.{_PARTS[part]}.{rest}"
        return super().mtp_name(name, num_hidden_layers)
