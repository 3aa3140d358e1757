"""Numbers that draw drafts: another one for the same position in the next cycle."""

from __future__ import annotations

import torch

from foredraft.models.draft_head import DraftHead
from foredraft.sampling.sampler import SamplingTensors
from foredraft.speculation.drafter import Drafter, Window

NUM_WINDOWS, VOCAB_SIZE = 256, 64


def drawn(num_tokens: int, index: int) -> torch.Tensor:
    """Draft number `index` of cycles at so many tokens, all tokens being equally likely; a seed for each window."""
    window = Window("request", 0, 0, num_tokens, (), (), 1, 8, 0, torch.empty(0), {})
    sampling = SamplingTensors.from_params([(1.0, 0, 1.0, seed) for seed in range(NUM_WINDOWS)])
    drafter = object.__new__(Drafter)  # what it chooses depends on its arguments and on the tokens of its head
    drafter.head = DraftHead.build(torch.zeros(1, 1))
    token_ids, probs = drafter.choose(index, [window] * NUM_WINDOWS, torch.zeros(NUM_WINDOWS, VOCAB_SIZE), sampling)
    assert probs is not None
    return token_ids


def test_drafts_for_one_position_in_two_cycles_are_independent() -> None:
    """Under block verification a rejected draft influences what is accepted: its number must not come again."""
    first, second = drawn(10, 3), drawn(12, 1)
    assert int((first == second).sum()) < 16, "4 are to be expected"
    assert torch.equal(first, drawn(10, 3))
