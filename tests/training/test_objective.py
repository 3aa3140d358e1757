"""The chunked loss against the same computed at once, with its gradients; and the positions that it looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama, tiny_qwen3
from torch import Tensor
from torch.nn import functional as F

from foredraft.training import objective as objective_module
from foredraft.training.chain import TeacherForcedChain
from foredraft.training.frozen_target import FrozenTarget
from foredraft.training.initial import initial_modules, own_parts
from foredraft.training.objective import Objective, chunk_terms
from foredraft.training.recipe import Recipe

CPU = torch.device("cpu")
DEPTHS, LENGTH = 3, 20
TOKENS = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(5))
SPOKEN = torch.ones(2, LENGTH, dtype=torch.bool)


def setting(path: Path, draft_tokens: list[int] | None = None, **changes: Any) -> tuple[Objective, Any, FrozenTarget]:
    """An objective over new modules of a tiny target, the modules, and the target."""
    recipe = Recipe(**{"depths": DEPTHS, "row_length": LENGTH, "position_share": 1.0, **changes})
    target = FrozenTarget.load(path, DEPTHS, CPU, torch.float32)
    modules = initial_modules(target, recipe)
    modules.layers.requires_grad_(True)
    chain = TeacherForcedChain(target, modules, is_checkpointed=recipe.gradient_checkpointing)
    return Objective(target, chain, recipe, draft_tokens, torch.float32), modules, target


def at_once(
    modules: Any, target: FrozenTarget, columns: list[int], *, is_hard: bool, overlap_weight: float
) -> list[Tensor]:
    """The mean loss of each depth, by `MtpModel`'s own forward of a layer and whole logits."""
    hidden = target.hidden(TOKENS)
    probs = target.model.lm_head(hidden).softmax(-1)
    losses = []
    for module in range(DEPTHS):
        rows = slice(module + 1, None)
        hidden = modules.forward_layer(
            module, hidden[:, : LENGTH - module - 1], torch.arange(module + 1, LENGTH)[None].expand(2, -1), None,
            input_ids=TOKENS[:, rows],
        )  # fmt: skip
        first = DEPTHS - module - 1  # as far as the deepest module has rows for
        log_probs = target.model.lm_head(hidden[:, first:])[..., columns].log_softmax(-1)[:, :-1]
        wanted = probs[:, DEPTHS:-1][..., columns]
        if is_hard:
            wanted = F.one_hot(TOKENS[:, DEPTHS + 1 :], 64).float()[..., columns]
        loss = -(wanted * log_probs).sum(-1)
        if overlap_weight:
            loss = loss + overlap_weight * (1 - torch.minimum(wanted, log_probs.exp()).sum(-1))
        losses.append(loss.mean())
        hidden = hidden
    return losses


CASES: dict[str, dict[str, Any]] = {
    "soft": {},
    "hard": {"targets": "hard"},
    "overlap": {"overlap_weight": 0.7},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("vocabulary", [None, [3, 1, 40, 17, 63, 20, 21, 22, 5]], ids=["all", "some"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_losses_and_gradients_are_those_computed_at_once(
    changes: dict[str, Any], vocabulary: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective_module, "_MAX_CHUNK_ROWS", 8)  # 32 positions: several chunks
    objective, modules, target = setting(tiny_llama(tmp_path, num_modules=0), vocabulary, **changes)
    losses = objective(TOKENS, SPOKEN, DEPTHS, torch.Generator())
    objective.total(losses).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in modules.layers.named_parameters()}
    modules.zero_grad()
    is_hard, weight = changes.get("targets") == "hard", changes.get("overlap_weight", 0.0)
    expected = at_once(modules, target, vocabulary or list(range(64)), is_hard=is_hard, overlap_weight=weight)
    torch.testing.assert_close(losses.loss, torch.stack(expected).detach())
    sum(0.95**k * loss for k, loss in enumerate(expected)).backward()  # type: ignore[union-attr]
    for name, parameter in modules.layers.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name, atol=1e-5, rtol=1e-4)
    assert all(each.grad is None for each in target.model.parameters())


def test_the_target_is_not_changed_by_its_modules(tmp_path: Path) -> None:
    path = tiny_qwen3(tmp_path, num_modules=0)
    before = FrozenTarget.load(path, DEPTHS, CPU, torch.float32).model.state_dict()
    objective, modules, target = setting(path)
    optimizer = torch.optim.SGD([p for p in modules.parameters() if p.requires_grad], 1.0)
    objective.total(objective(TOKENS, SPOKEN, DEPTHS, torch.Generator())).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())
    assert not any(name.startswith(("embed_tokens", "shared_head")) for name in own_parts(modules))


def test_positions_that_an_assistant_said_are_chosen_first(tmp_path: Path) -> None:
    objective, *_ = setting(tiny_llama(tmp_path, num_modules=0), position_share=0.25, other_weight=0.0)
    spoken = torch.zeros(4, 16, dtype=torch.bool)
    spoken[1] = True
    chosen = objective._choose(spoken, torch.Generator().manual_seed(0))
    assert sorted(chosen.tolist()) == list(range(16, 32))


def test_the_share_of_other_positions_follows_their_weight(tmp_path: Path) -> None:
    objective, *_ = setting(tiny_llama(tmp_path, num_modules=0), position_share=0.01, other_weight=0.25)
    spoken = torch.arange(20_000).view(2, -1) % 2 == 0
    chosen = objective._choose(spoken, torch.Generator().manual_seed(0))
    assert len(chosen) == len(set(chosen.tolist())) == 200
    assert 0.7 < float(spoken.flatten()[chosen].float().mean()) < 0.9


def test_own_drafts_replace_inputs_of_later_depths(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, num_modules=0)
    plain, *_ = setting(path)
    own, modules, target = setting(path, on_policy_share=1.0)
    of_text = plain(TOKENS, SPOKEN, DEPTHS, torch.Generator()).loss
    of_drafts = own(TOKENS, SPOKEN, DEPTHS, torch.Generator()).loss
    assert of_drafts[0] == of_text[0]
    assert (of_drafts[1:] != of_text[1:]).all()
    hidden = target.hidden(TOKENS)
    chain = TeacherForcedChain(target, modules).run(TOKENS, hidden, 2, torch.float32)
    drafts = target.model.lm_head(next(chain)).argmax(-1)
    generator = torch.Generator()
    replaced = own._own_inputs(
        TOKENS, 1, next(TeacherForcedChain(target, modules).run(TOKENS, hidden, 1, torch.float32)), generator
    )
    torch.testing.assert_close(replaced, target.model.get_input_embeddings()(drafts))


def test_a_match_is_the_targets_greedy_token_and_overlap_the_chance_to_be_accepted() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    target = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    normalizer = target.logsumexp(-1, keepdim=True)
    best = target.argmax(-1)
    _, match, overlap, _ = chunk_terms(logits, target, normalizer, best, best, is_hard=False, overlap_weight=0.0)
    assert match == (logits.argmax(-1) == best).sum()
    torch.testing.assert_close(overlap, torch.minimum(logits.softmax(-1), target.softmax(-1)).sum())
