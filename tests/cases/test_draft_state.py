"""The modules' rows after any step: what they were computed from, what they then draft, and how drafts are counted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases.replay import Replay, random_prompt
from reference import Checkpoint, assert_close
from safetensors.torch import load_file, save_file
from tiny_models import tiny_glm4_moe, tiny_llama
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.cache.prefix_index import PartKey
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.models.loader import load_checkpoint
from foredraft.request import Request


def assert_exact_to_the_end(request: Request, num_modules: int) -> None:
    """The modules have every row that can be exact: E_k = n - k."""
    expected = [max(0, request.num_tokens - k) for k in range(1, num_modules + 1)]
    assert list(request.exact.num_exact_rows[:num_modules]) == expected
    assert request.num_computed_tokens == request.num_tokens - 1


@pytest.mark.parametrize("depth", range(1, 11))
@pytest.mark.parametrize("kind", ["ten modules", "glm4_moe"])
def test_any_number_of_drafts(checkpoints: Callable[[str], Checkpoint], kind: str, depth: int) -> None:
    """sgl-project/sglang#33872: ids to copy, with 1 to 10 drafts a step; more than there are modules are refused."""
    opaque = random_prompt(7)
    replay = Replay(checkpoints(kind), depth, max_num_seqs=3)
    own = replay.add("own", opaque * 2 + opaque[:3], 20, own_drafts=True)
    right = replay.add("right", opaque * 2 + opaque[:4], 24)
    replay.run()
    for request in (own, right):
        replay.assert_right(request)
    replay.assert_drafts_right()
    assert len(replay.plans_of("right")) == 1 + -(-23 // (depth + 1))
    if kind == "ten modules":
        with pytest.raises(ConfigError, match="num_speculative_tokens=11, but the checkpoint has 10 MTP modules"):
            Replay(checkpoints(kind), 11)


@pytest.mark.parametrize("num_right", [0, 1])
def test_the_modules_never_fall_behind(checkpoint: Checkpoint, num_right: int) -> None:
    """lablup/mlxcel#994: 50 steps, in each of which the same draft is rejected."""
    replay = Replay(checkpoint, 3)
    request = replay.add("a", random_prompt(6), 6 + 1 + 50 * (num_right + 1), num_right=num_right)
    replay.step()
    num_modules = replay.engine.scheduler.num_modules
    for _ in range(50):
        (committed,) = replay.step()
        assert len(committed.token_ids) == num_right + 1
        assert_exact_to_the_end(request, num_modules)
    rows = [window.end - window.start for window in replay.windows_of("a")[1:]]
    assert rows == [max(num_modules, num_right + 1)] * 50
    replay.run()
    replay.assert_right(request)
    replay.assert_drafts_right()


@pytest.mark.parametrize("budget", [1024, 5])
@pytest.mark.parametrize("script", [[0, 3, 1], [3, 3, 3], [1, 0, 2]])
def test_every_committed_token_reaches_the_modules_once(checkpoint: Checkpoint, budget: int, script: list[int]) -> None:
    """ikawrakow/ik_llama.cpp#1757, ikawrakow/ik_llama.cpp#1979: draft inputs over a prefill and three steps."""
    replay = Replay(checkpoint, 3, max_num_seqs=1, max_num_batched_tokens=budget)
    request = replay.add("a", random_prompt(11), 24, script=script)
    while len(replay.drafts_of("a")) < 4:
        replay.step()
    assert request.num_tokens == 11 + 1 + sum(script) + 3
    first_passes = {forward.run: forward for forward in reversed(replay.drafter.forwards) if forward.module == 0}
    read = [
        (position, token_id)
        for _, forward in sorted(first_passes.items())
        for position, token_id, slot in zip(forward.positions, forward.token_ids, *forward.slots.values())
        if slot >= replay.engine.cache.block_size  # those in the reserved block are there already
    ]
    assert read == list(enumerate(request.token_ids))[1:]
    # Deeper modules read drafts at their last rows; what counts was read from committed tokens.
    for module, count in enumerate(request.exact.num_exact_rows):
        last = {
            position: token_id
            for forward in replay.drafter.forwards
            if forward.module == module and (module or forward == first_passes[forward.run])
            for position, token_id, slot in zip(forward.positions, forward.token_ids, *forward.slots.values())
            if slot >= replay.engine.cache.block_size
        }
        for row in range(count):
            assert last[row + module + 1] == request.token_ids[row + module + 1]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_hidden_state_of_the_last_accepted_row_is_handed_over(checkpoint: Checkpoint, depth: int) -> None:
    """charlie12345/ROCmFPX#15: 0 to K accepted, each in one batch with the others."""
    replay = Replay(checkpoint, depth)
    for accepted in range(depth + 1):
        replay.add(f"{accepted}", random_prompt(5, accepted), 30, num_right=accepted)
    replay.step()
    for _ in range(3):
        replay.drafter.seen.clear()
        replay.step()
        layout, size = replay.engine.cache.layout, replay.engine.cache.block_size
        for plan, (window, _) in zip(replay.plans[-1].requests, replay.drafter.seen):
            row = plan.first_row + int(plan.request_id)
            assert plan.first_row == plan.num_tokens - 1
            assert window.end - 1 == row
            assert int(window.hidden_slots[-1]) == plan.blocks[layout.hidden_group][row // size] * size + row % size
    replay.run()
    for request in replay.requests.values():
        replay.assert_right(request)


def test_drafts_of_every_hand_over_are_right(checkpoint: Checkpoint) -> None:
    """charlie12345/ROCmFPX#15 again: in any order of accepted counts, drafts are those of the whole history."""
    replay = Replay(checkpoint, 3)
    for index, script in enumerate(itertools.permutations(range(4))):
        replay.add(f"{index}", random_prompt(5, index % 3), 16, script=script)
    replay.run()
    replay.assert_drafts_right()


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_drafting_after_steps_without_drafts(checkpoint: Checkpoint, num_steps: int) -> None:
    """vllm-project/vllm-metal#716: drafts of 2, then none for a while, then 2 again."""
    replay = Replay(checkpoint, 2)
    requests = [replay.add(name, random_prompt(6, seed), 40) for seed, name in enumerate(("a", "b"))]
    num_modules = min(2, replay.engine.scheduler.num_modules)

    def steps(count: int, depth: int) -> list[int]:
        for request in requests:
            replay.engine.set_num_speculative_tokens(request.request_id, depth)
        return [len(update.token_ids) for _ in range(count) for update in replay.step()]

    assert steps(3, 2) == [1, 1, 3, 3, 3, 3]
    num_computed = [request.num_computed_tokens for request in requests]
    # The first of them verifies drafts that were made before.
    assert steps(num_steps, 0) == [3, 3] + [1, 1] * (num_steps - 1)
    num_seen = len(replay.drafter.seen)
    assert steps(1, 2) == [1, 1]
    # The last drafts were made at these rows; all that came later is missing, and no more is computed.
    assert [window.start for window, _ in replay.drafter.seen[num_seen:]] == num_computed
    for request in requests:
        assert_exact_to_the_end(request, num_modules)
    assert steps(3, 2) == [3, 3, 3, 3, 3, 3]
    replay.run()
    for request in requests:
        replay.assert_right(request)
        assert request.stats.accepted_by_depth == request.stats.drafted_by_depth
    replay.assert_drafts_right()


def cached_rows(replay: Replay, request: Request) -> dict[tuple[int, PartKey], list[Tensor]]:
    """The rows of every published block, by place and by what they depend on."""
    storage = replay.engine.runner.storage
    nodes = replay.engine.cache.match(request.token_ids, None, 0).nodes
    return {
        (index, key): list(storage.block(part.group, part.block))
        for index, node in enumerate(nodes)
        for key, part in node.parts.items()
        if part.block is not None
    }


@pytest.mark.parametrize("chunk", [4, 5, 6, 7])
def test_module_rows_of_chunks_equal_those_of_one_prefill(checkpoint: Checkpoint, chunk: int) -> None:
    """vllm-project/vllm#55055, NVIDIA/TensorRT-LLM#18093: a prompt of 15 in chunks, and what is cached of it."""
    replays, requests = [], []
    for budget in (chunk, 1024):
        replay = Replay(checkpoint, 3, max_num_seqs=1, max_num_batched_tokens=budget)
        request = replay.add("a", random_prompt(15), 12)
        while request.num_tokens == 15:
            replay.step()
        replays.append(replay)
        requests.append(request)
    ends = [plan.first_row + len(plan.token_ids) for plan in replays[0].plans_of("a")]
    assert ends == [*range(chunk, 15, chunk), 15]
    assert requests[0].exact == requests[1].exact
    assert_exact_to_the_end(requests[0], replays[0].engine.scheduler.num_modules)
    both = [replay.counted_rows(request) for replay, request in zip(replays, requests)]
    for (first, ours), (also_first, theirs) in zip(*both, strict=True):
        assert (first, ours.shape) == (also_first, theirs.shape)
        assert_close(ours, theirs, 1e-5)
    chunked, whole = [cached_rows(replay, request) for replay, request in zip(replays, requests)]
    assert chunked.keys() == whole.keys()
    module_groups = replays[0].engine.cache.layout.module_groups
    assert len({index for index, key in chunked if key[0] in module_groups}) == 3
    for key, tensors in chunked.items():
        for our_rows, their_rows in zip(tensors, whole[key]):
            assert_close(our_rows, their_rows, 1e-5)


def test_a_perfect_drafter_under_all_settings(checkpoint: Checkpoint) -> None:
    """NVIDIA/TensorRT-LLM#18662: each combination of settings accepts everything, the first time and on a hit."""
    for (is_cached, host), (policy, sampling), size, budget, vocab_size in itertools.product(
        ((False, 0), (True, 0), (True, 0.001)),
        (("fcfs", "greedy"), ("priority", "probabilistic")),
        (1, 5),
        (16, 1024),
        (None, 40),
    ):
        replay = Replay(
            checkpoint,
            3,
            enable_prefix_caching=is_cached,
            scheduling_policy=policy,
            draft_sampling=sampling,
            block_size=size,
            num_blocks=1 + 60 // size,
            max_num_batched_tokens=budget,
            draft_vocab_size=vocab_size,
            cpu_cache_gib=host,
        )
        for turn in range(2):
            requests = [replay.add(f"{turn}, {length}", random_prompt(length), 5) for length in (6, 17)]
            replay.run()
            for request in requests:
                replay.assert_right(request)
                assert request.token_depths == [0, 1, 2, 3, 0]
        assert replay.engine.stats.speculation.mean_acceptance_length == 4.0


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_proposed_is_verified(checkpoint: Checkpoint, depth: int) -> None:
    """vllm-project/vllm#52107: proposed, verified and accepted drafts by depth, after 20 steps."""
    replay = Replay(checkpoint, depth)
    script = [0, 2, 3, 1, 0, 3, 2, 1] * 3
    request = replay.add("a", random_prompt(5), 90, script=script)
    for _ in range(20):
        replay.step()
    *verified, pending = replay.drafts_of("a")
    assert pending == request.draft_token_ids
    assert len(verified) == 19
    expected = [sum(min(count, depth) > index for count in script[:19]) for index in range(depth)]
    for stats in (request.stats, replay.engine.stats.speculation):
        assert stats.drafted_by_depth == [19] * depth
        assert stats.accepted_by_depth == expected == sorted(expected, reverse=True)
        assert (stats.num_cycles, stats.num_drafts) == (20, 19)
        if stats is request.stats:
            assert sum(plan.num_draft_tokens for plan in replay.plans_of("a")) == 19 * depth
            replay.abort("a")  # the engine counts requests that have ended
    replay.assert_drained()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_last_chunk_of_one_token_is_no_decode(checkpoint: Checkpoint, depth: int) -> None:
    """vllm-project/vllm#34871: a prompt of 5 in chunks of 4, beside two requests that draft."""
    replay = Replay(checkpoint, depth, max_num_seqs=3, max_num_batched_tokens=2 * (depth + 1) + 4)
    requests = [replay.add("a", random_prompt(2), 14), replay.add("b", random_prompt(3), 14)]
    replay.step()
    requests.append(replay.add("c", random_prompt(5), 14))
    replay.step()
    committed = replay.step()
    chunks = replay.plans_of("c")
    assert [(plan.first_row, len(plan.token_ids), plan.is_sampling) for plan in chunks] == [(0, 4, False), (4, 1, True)]
    assert [plan.num_draft_tokens for plan in replay.plans[-1].requests] == [depth, depth, 0]
    assert [len(update.token_ids) for update in committed] == [depth + 1, depth + 1, 1]
    assert requests[2].stats.num_drafts == 0
    replay.run()
    for request in requests:
        replay.assert_right(request)
    replay.assert_drafts_right()


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "mistral, window 6", "qwen2"])
def test_four_rows_at_once_equal_four_single_ones(checkpoints: Callable[[str], Checkpoint], kind: str) -> None:
    """huggingface/transformers#46741: four tokens on a cache of three rows, in every kind of layer."""
    checkpoint = checkpoints(kind)
    found = []
    for depth, num_steps in ((3, 2), (0, 5)):
        replay = Replay(checkpoint, depth)
        request = replay.add("a", random_prompt(3), 12)
        for _ in range(num_steps):
            replay.step()
        assert [len(plan.token_ids) for plan in replay.plans_of("a")] == [3, 4] if depth else [3, 1, 1, 1, 1]
        rows = replay.counted_rows(request)
        num_layers = len(replay.engine.cache.layout.target)
        first, hidden = rows[num_layers]
        assert (first, len(hidden)) == (0, 7)
        with torch.inference_mode():
            logits = replay.engine.runner.target.logits(hidden)
        assert_close(logits, checkpoint.reference.logits(request.token_ids[:7]), 1e-5)
        found.append([*rows[: num_layers + 1], (0, logits)])
    for (first, ours), (also_first, theirs) in zip(*found, strict=True):
        assert first == also_first
        assert_close(ours, theirs, 1e-5)


def test_modules_have_no_vocabulary_of_their_own(tmp_path: Path) -> None:
    """sgl-project/sglang#24051: copies of embedding and head beside the modules change no draft, padded or left out;
    others are refused."""
    drafts = []
    path = tiny_glm4_moe(tmp_path / "model")
    file = path / "model.safetensors"
    copies = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    published = {name: tensor.clone() for name, tensor in load_file(file).items()}
    padded = {name: torch.cat([published[name], torch.randn(16, 32)]) for name in copies}
    own = {name: tensor for name, tensor in published.items() if name not in copies}
    for tensors in (published, published | padded, own):
        save_file(tensors, file, metadata={"format": "pt"})
        loaded = load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))
        assert loaded.mtp is not None
        assert loaded.mtp.embed_tokens.weight is loaded.target.get_parameter("model.embed_tokens.weight")
        llm = LLM(path, num_speculative_tokens=3, dtype="float32", device="cpu", block_size=4, num_blocks=32)
        (output,) = llm.generate([random_prompt(5)], SamplingParams(max_tokens=20, ignore_eos=True))
        drafts.append((output.token_ids, output.stats))
    assert drafts[0] == drafts[1] == drafts[2]
    for name in copies:
        save_file(published | {name: torch.randn(64, 32)}, file, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} is not the target's"):
            load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


def test_modules_of_another_width_are_refused(tmp_path: Path, llama: Checkpoint) -> None:
    """sgl-project/sglang#24051 again: what cannot fit the target is refused at the start."""
    target = tiny_llama(tmp_path / "target", num_modules=0)
    wide = tiny_llama(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ModelLoadError, match=r"eh_proj\.weight is \[48, 96\], but a target of hidden size 32"):
        load_checkpoint(target, wide / "mtp.safetensors", dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="draft_vocab_size=65 is more than the 64 token ids"):
        Replay(llama, 3, draft_vocab_size=65)
