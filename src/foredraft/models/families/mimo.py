"""MiMo-V2-Flash: attention sinks, modules that all read the target, and keys wider than values.

Beyond the rule:

- Sliding layers have twice as many key heads as full ones, and a learnt score for each head that takes part in the
  softmax and has no value (`sinks`).
- Every module attends to a window and has a dense MLP, whatever the target's layers are. The configuration says nothing
  of them.
- A module reads the target's hidden state, not that of the module before it.
- Scores with sinks are computed by torch, which waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from foredraft.models.families.family import Family


class MiMo(Family):
    """XiaomiMiMo/MiMo-V2-Flash."""

    is_chained: ClassVar[bool] = False
    mtp_renames: ClassVar[Mapping[str, str]] = {
        "pre_mlp_layernorm": "post_attention_layernorm",
        "final_layernorm": "post_norm",
    }

    def prepare(self, text_config: Any, num_modules: int) -> None:
        text_config.mtp_layer_types = ["sliding_attention"] * num_modules
        text_config.mtp_mlp_layer_types = ["dense"] * num_modules
