"""States of recurrent layers in the cache: found where they were kept, copied to the host, kept across restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families.test_gated_delta import ROPE, tiny

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.outputs import RequestOutput

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen3_5_text", ROPE, tmp_path_factory.mktemp("recurrent") / "model")


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(path: Path, depth: int = 3, **settings: Any) -> LLM:
    room = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 2, "max_model_len": 96, "state_interval": 8}
    return LLM(path, num_speculative_tokens=depth, dtype="float32", device="cpu", **(room | settings))


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params)
    llm.engine.cache.check_integrity()
    return outputs


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in outputs]


@pytest.mark.parametrize(("interval", "cached"), [(1, 36), (8, 32), (10, 36), (16, 32), (64, 0)])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("budget", [8, 1024])
def test_a_hit_ends_where_a_state_was_kept(path: Path, depth: int, budget: int, interval: int, cached: int) -> None:
    """Whole blocks: 10 rows are 12. What follows the hit is computed from the state, whatever chunks it came from."""
    llm = make(path, depth, state_interval=interval, max_num_batched_tokens=budget)
    shared, other = prompt(39), prompt(5, seed=1)
    generate(llm, [shared])
    (second,) = generate(llm, [[*shared[:38], *other]])
    assert second.num_cached_tokens == cached
    plain = make(path, 0, enable_prefix_caching=False)
    assert tokens([second]) == tokens(generate(plain, [[*shared[:38], *other]]))


def test_a_conversation_goes_on_from_its_answers(path: Path) -> None:
    """States that decoding has left behind are found as well."""
    llm, plain = make(path), make(path, 0, enable_prefix_caching=False)
    text = prompt(11)
    for turn in range(4):
        ours, theirs = generate(llm, [text]), generate(plain, [text])
        assert tokens(ours) == tokens(theirs)
        assert ours[0].num_cached_tokens == (0, 16, 32, 48)[turn]
        text = [*text, *ours[0].token_ids, *prompt(3, seed=turn)]


def test_choices_of_one_prompt(path: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5, n=3)
    ours = generate(make(path), [prompt(21)], params)
    theirs = generate(make(path, enable_prefix_caching=False), [prompt(21)], params)
    assert [choice.token_ids for choice in ours[0].choices] == [choice.token_ids for choice in theirs[0].choices]


def test_states_move_to_the_host_and_back(path: Path) -> None:
    """With two requests at a time in a small cache, prompts lose their blocks to each other."""
    llm = make(path, num_blocks=28, max_model_len=64, cpu_cache_gib=0.01)
    prompts = [prompt(30, seed=seed) for seed in range(8)]
    first = generate(llm, prompts)
    second = generate(llm, prompts)
    assert tokens(first) == tokens(second) == tokens(generate(make(path, 0, enable_prefix_caching=False), prompts))
    assert [output.num_cached_tokens for output in second] == [24] * 8


def test_states_outlive_the_process(path: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cpu_cache_gib": 0.01, "cache_dir": tmp_path / "kept"}
    with make(path, **settings) as llm:
        first = generate(llm, [prompt(30)])
    with make(path, **settings) as llm:
        second = generate(llm, [prompt(30)])
    assert second[0].num_cached_tokens == 24
    assert tokens(first) == tokens(second)


def test_states_that_are_not_there_are_no_hit(path: Path) -> None:
    """Rows without the state after them are of no use; the pool of states is the smallest."""
    llm = make(path, num_blocks=28, max_model_len=64)
    prompts = [prompt(30, seed=seed) for seed in range(8)]
    first, second = generate(llm, prompts), generate(llm, prompts)
    assert tokens(first) == tokens(second)
    assert any(output.num_cached_tokens == 0 for output in second)


@pytest.mark.parametrize("execution", ["overlapped", "synchronous"])
def test_decodes_on_the_device_are_refused(path: Path, execution: str) -> None:
    with pytest.raises(ConfigError, match=rf"execution={execution}: recurrent layers, as in qwen3_5_text"):
        make(path, execution=execution)


@pytest.mark.parametrize("length", range(5, 21))
def test_equal_requests_that_push_each_other_out(path: Path, length: int) -> None:
    """One comes back with pending drafts when the other has published all of its rows: nothing is to be replayed."""
    params = SamplingParams(max_tokens=96 - length, ignore_eos=True)
    llm = make(path, num_blocks=26, max_num_seqs=3, state_interval=4)
    outputs = generate(llm, [prompt(length)] * 2, params)
    assert tokens(outputs) == tokens(generate(make(path, 0, enable_prefix_caching=False), [prompt(length)] * 2, params))


def test_chats_find_more_states_than_requests_run(path: Path) -> None:
    """Inputs of recurrent layers that no hit can need do not push out those that one can."""
    llm = make(
        path, 1, state_interval=64, num_blocks=2000, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=32
    )
    prompts, params = [prompt(200, seed=seed) for seed in range(4)], SamplingParams(max_tokens=4, ignore_eos=True)
    for text in prompts:
        generate(llm, [text], params)
    again = [generate(llm, [text], params)[0].num_cached_tokens for text in prompts]
    assert again == [192] * 4


def test_states_take_no_more_memory_than_rows(path: Path) -> None:
    """64 requests could use more; what one needs at least is less than that here."""
    limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": None}
    llm = make(path, num_blocks=None, kv_cache_memory_bytes=1 << 21, **limits)
    layout, counts = llm.engine.cache.layout, llm.cache_size.num_blocks
    sizes = [count * layout.bytes_per_block(number, 4) for number, count in enumerate(counts)]
    recurrent = sum(sizes[number] for number in layout.recurrent_groups)
    assert 0.4 * sum(sizes) < recurrent <= 0.5 * sum(sizes)
    assert llm.cache_size.max_model_len == 256
    generate(llm, [prompt(30, seed=seed) for seed in range(6)])
