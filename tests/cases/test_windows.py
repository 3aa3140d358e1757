"""Sliding windows: drafts across their edge, and room for no more rows than they reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases.replay import BLOCK, Replay, num_blocks_for, random_prompt
from reference import Checkpoint, assert_close
from torch import Tensor

WINDOW = 8


@pytest.mark.parametrize("length", [4, 10])
@pytest.mark.parametrize("num_right", range(5))
def test_logits_within_a_burst_of_drafts(checkpoints: Callable[[str], Checkpoint], length: int, num_right: int) -> None:
    """huggingface/transformers#48280: a window of 6, four drafts a step: each drafted row sees its own window."""
    checkpoint = checkpoints("mistral, window 6")
    # Drafts choose from the first 64 ids, which are all, so that only verification asks the target for its logits.
    replay = Replay(checkpoint, 4, draft_vocab_size=64)
    target = replay.engine.runner.target
    seen: list[Tensor] = []
    logits = target.logits

    def watched(hidden: Tensor) -> Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    target.logits = watched  # type: ignore[method-assign]
    request = replay.add("a", random_prompt(length), 20, num_right=num_right)
    num_drafts = []
    while request.finish_reason is None:
        first, history = request.num_tokens - 1, [*request.token_ids, *request.draft_token_ids]
        replay.step()
        num_drafts.append(len(history) - first - 1)
        assert_close(seen.pop(), checkpoint.reference.logits(history)[first:])
        assert not seen
    assert num_drafts[:3] == [0, 4, 4]
    replay.assert_right(request)
    replay.assert_drafts_right()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [1024, 7])
@pytest.mark.parametrize("length", [14, 15, 16, 17, 20])
def test_output_across_the_window(
    checkpoints: Callable[[str], Checkpoint], depth: int, budget: int, length: int
) -> None:
    """ml-explore/mlx-swift-lm#505, raullenchai/Rapid-MLX#3605: a window of 16, ended within, at and beyond it."""
    replay = Replay(checkpoints("mistral, window 16"), depth, max_num_seqs=1, max_num_batched_tokens=budget)
    for num_tokens in (1, 2, 3, 10):
        request = replay.ask(f"{num_tokens}", random_prompt(length), num_tokens, cache_salt=f"{num_tokens}")
        assert (len(request.output_token_ids), request.num_cached_tokens) == (num_tokens, 0)
    for script in ([0, 2, 1], [2, 0, 0], [1, 1, 2]):
        request = replay.ask(f"{script}", random_prompt(length), 10, script=script)
        assert len(request.output_token_ids) == 10
    replay.assert_drafts_right()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_prompt_longer_than_the_pool_of_windows(checkpoints: Callable[[str], Checkpoint], depth: int) -> None:
    """vllm-project/vllm#55800: where all layers slide, 64 tokens are admitted to a pool that holds fewer."""
    replay = Replay(
        checkpoints("mistral"), depth, num_blocks=18, max_model_len=96, max_num_seqs=1, max_num_batched_tokens=8
    )
    assert all(pool.num_usable_blocks < num_blocks_for(64 + 20) for pool in replay.engine.cache.pools)
    request = replay.add("a", random_prompt(64), 20, num_right=1)
    hidden, target, modules = range(3)
    most = [0, 0, 0]
    while True:
        replay.step()
        if request.finish_reason is not None:
            break
        held = replay.engine.cache.num_held_blocks("a")
        most = [max(pair) for pair in zip(most, held)]
    replay.assert_drained()
    replay.assert_right(request)
    replay.assert_drafts_right()
    # The window before the next row, the rows of a step, and where they begin and end within a block.
    assert most[target] <= num_blocks_for(WINDOW - 1 + 8) + 1
    assert most[modules] <= (num_blocks_for(WINDOW - 1 + 8) + 1 if depth else 0)
    num_hidden = 3 * (WINDOW - 1) + 3  # enough to begin all three modules anew
    assert most[hidden] <= num_blocks_for(num_hidden + 8) + 1
    assert replay.engine.stats.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_windowed_modules_are_charged_for_their_window(checkpoints: Callable[[str], Checkpoint], depth: int) -> None:
    """vllm-project/vllm#55800 again: beside a layer that keeps all rows, four long prompts run at once."""
    replay = Replay(checkpoints("qwen2"), depth, num_blocks=89, max_model_len=90, max_num_batched_tokens=16)
    layout = replay.engine.cache.layout
    windowed = [number for number, group in enumerate(layout.groups) if group.retention is not None]
    assert [layout.groups[number].owner.value for number in windowed] == ["target", "modules"]
    requests = [replay.add(f"{seed}", random_prompt(64, seed), 20, num_right=seed) for seed in range(4)]
    most = [0] * len(layout.groups)
    while replay.engine.has_unfinished:
        replay.step()
        for request in replay.engine.scheduler.requests():
            if request.num_computed_tokens:
                held = replay.engine.cache.num_held_blocks(request.request_id)
                most = [max(pair) for pair in zip(most, held)]
    replay.assert_drained()
    for request in requests:
        replay.assert_right(request)
    replay.assert_drafts_right()
    for number, group in enumerate(layout.groups):
        is_windowed = number in windowed
        assert most[number] <= (num_blocks_for(WINDOW - 1 + 16) + 1 if is_windowed else num_blocks_for(84))
        assert is_windowed or most[number] >= 80 // BLOCK
        assert group.first_kept_row(64) == (64 - WINDOW + 1 if is_windowed else 0)
    assert replay.engine.stats.num_preemptions == 0
