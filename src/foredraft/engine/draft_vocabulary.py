"""From settings to the head that drafts are chosen with."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.models.draft_head import DraftHead, best_bits
from foredraft.models.draft_vocab import builtin_ranking, frequent_tokens, read_ranking
from foredraft.models.loader import LoadedModel
from foredraft.models.target import TargetModel, head_weights

BUILTIN = "builtin"
"""What `draft_vocab` calls the ranking that comes with the built-in model."""


def build_draft_head(config: EngineConfig, loaded: LoadedModel, target: TargetModel) -> DraftHead:
    """The head for drafts of a target, as `draft_vocab_size`, `draft_vocab` and `draft_head_bits` want it; a part of
    the target's own, or of that of each module where they have some.

    Raises ConfigError for settings that do not fit the model.
    """
    size = config.draft_vocab_size
    if size is not None and size > target.vocab_size:
        raise ConfigError(f"draft_vocab_size={size} is more than the {target.vocab_size} token ids")
    bits = config.draft_head_bits or best_bits(target.head_weights[0])
    token_ids: Tensor | None = None
    if config.draft_vocab is not None and size is not None:
        path = builtin_ranking() if config.draft_vocab == BUILTIN else Path(config.draft_vocab)
        ranking = read_ranking(path, loaded.tokenizer)
        token_ids = frequent_tokens(ranking, size, target.vocab_size, loaded.eos_token_ids)
        size = None  # they are what is taken of the rows

    def build(weight: Tensor, bias: Tensor | None, scales: Tensor | None, norm: nn.Module | None = None) -> DraftHead:
        bias, scales = (None if rows is None else rows[:size] for rows in (bias, scales))
        return DraftHead.build(weight[:size], bias, token_ids, bits, scales, target.head_divisor, norm)

    own = target.family.draft_heads(loaded.mtp) if loaded.mtp is not None else ()
    if not own:
        return build(*target.head_weights)
    return DraftHead.of_modules([build(*head_weights(head), head.norm) for head in own])
