"""Seeds, several choices of one prompt, and the same outputs alone, in a batch, in chunks and after preemptions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fake_replay import (
    DEPTHS,
    EOS,
    LETTERS,
    PROMPT,
    START,
    assert_drained,
    seen,
    seen_choice,
    served,
    served_alike,
)
from fake_model import FakeModel, Script, one_after_another, right, words_tokenizer
from torch import Tensor

from foredraft import SamplingParams
from foredraft.outputs import RequestOutput
from foredraft.sampling.philox import seed_of_choice

MODES = ["probabilistic", "greedy"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sixteen")


def undecided(token_id: int, position: int) -> Tensor:
    """Logits that leave much to chance, and depend on what comes before; EOS about once in 12 tokens."""
    generator = torch.Generator().manual_seed(16 * position + token_id)
    logits = torch.randn(16, generator=generator)
    logits[EOS] = 0.5
    return logits


def drafts_by_chance(request_id: str, position: int, depth: int, previous: int) -> Tensor:
    """Drawn from a flatter distribution than the target's, so that some are accepted and some are not."""
    return (undecided(previous, position - 1) / 2).softmax(-1)


def without_chance(request_id: str, position: int, depth: int, previous: int) -> int:
    return int(undecided(previous, position - 1).argmax())


SCRIPTS: dict[str, Script] = {"probabilistic": drafts_by_chance, "greedy": without_chance}


def sampling(path: Path, mode: str = "probabilistic", **settings: Any) -> FakeModel:
    tokenizer = words_tokenizer(LETTERS)
    settings = {"draft_sampling": mode, "eos_token_ids": [EOS], "tokenizer": tokenizer, **settings}
    return FakeModel(path, undecided, SCRIPTS[mode], **settings)


SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
OTHERS = [
    SamplingParams(temperature=1.4, max_tokens=17, ignore_eos=True),
    SamplingParams(max_tokens=11),
    SamplingParams(temperature=0.8, top_k=5, min_p=0.05, seed=3, max_tokens=20, frequency_penalty=0.5),
]
OTHER_PROMPTS = [[1, 2, 3], [4], PROMPT]


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_seeded_unseeded_and_greedy_rows_copy_a_certain_target(path: Path) -> None:
    """vllm-project/vllm#10863, vllm-project/vllm#9441: where the target leaves no choice there is none."""
    token_ids = [(5 * index) % 15 for index in range(30)]
    table = one_after_another(token_ids, 16, START, gap=200.0)
    flat = torch.full((16,), 1 / 16)

    def mixed(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        return flat if depth % 2 else token_ids[position - START]

    params = [
        SamplingParams(temperature=1.3, seed=1, max_tokens=20),
        SamplingParams(temperature=1.3, max_tokens=20),
        SamplingParams(max_tokens=20),
    ]
    for script in (right(table), right(table, 1), mixed):
        fake = FakeModel(path, table, script)
        for depth in DEPTHS:
            each = [replace(one, num_speculative_tokens=depth) for one in params]
            together = fake.llm.generate([PROMPT] * 3, each)
            alone = [fake.llm.generate([PROMPT], one)[0] for one in each]
            assert [list(output.token_ids) for output in [*together, *alone]] == [token_ids[:20]] * 6
        assert_drained(fake)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("mode", MODES)
def test_a_seeded_output_depends_neither_on_earlier_requests_nor_on_others(path: Path, mode: str, depth: int) -> None:
    """NVIDIA/TensorRT-LLM#17599: on a fresh engine, after five other requests, and beside three others."""
    seeded = replace(SEEDED, num_speculative_tokens=depth)
    fake = sampling(path, mode)
    (fresh,) = fake.llm.generate([PROMPT], seeded)
    for other, prompt in zip([*OTHERS, *OTHERS[:2]], [*OTHER_PROMPTS, *OTHER_PROMPTS[:2]]):
        fake.llm.generate([prompt], other)
    (later,) = fake.llm.generate([PROMPT], seeded)
    assert seen(later) == seen(fresh)
    for place in range(4):
        prompts = [*OTHER_PROMPTS[:place], PROMPT, *OTHER_PROMPTS[place:]]
        params = [*OTHERS[:place], seeded, *OTHERS[place:]]
        assert seen(fake.llm.generate(prompts, params)[place]) == seen(fresh)
    if depth:
        assert 0 < fresh.stats.num_accepted_tokens < fresh.stats.num_drafted_tokens
    assert_drained(fake)


def test_without_chance_in_drafts_a_seed_gives_the_same_at_any_depth(path: Path) -> None:
    for seed in range(6):
        output = served_alike(
            sampling(path, "greedy"), PROMPT, temperature=0.9, seed=seed, max_tokens=24, logprobs=2, stop="ab"
        )
        assert output.stats.num_drafted_tokens > 0


def test_a_seed_holds_beside_a_request_that_has_none(path: Path) -> None:
    """vllm-project/vllm#51226: six rounds of a pair of which only the first is seeded, then both are."""
    fake = sampling(path)
    (alone,) = fake.llm.generate([PROMPT], SEEDED)
    unseeded = [fake.llm.generate([PROMPT, PROMPT], [SEEDED, replace(SEEDED, seed=None)]) for _ in range(6)]
    assert {first.token_ids for first, _ in unseeded} == {alone.token_ids}
    assert len({second.token_ids for _, second in unseeded} | {alone.token_ids}) == 7
    seeded = [fake.llm.generate([PROMPT, PROMPT], [SEEDED, replace(SEEDED, seed=8)]) for _ in range(2)]
    assert {first.token_ids for first, _ in seeded} == {alone.token_ids}
    assert len({second.token_ids for _, second in seeded}) == 1


@pytest.mark.parametrize("depth", [0, 3])
def test_without_a_seed_requests_differ_and_seed_0_is_a_seed(path: Path, depth: int) -> None:
    """Blaizzy/mlx-vlm#1844: the same prompt again and again, one after the other and together."""
    fake = sampling(path)
    params = replace(SEEDED, temperature=0.7, seed=None, num_speculative_tokens=depth)
    outputs = [fake.llm.generate([PROMPT], params)[0] for _ in range(3)]
    outputs += fake.llm.generate([PROMPT] * 3, params)
    assert len({output.token_ids for output in outputs}) == 6
    zero = [fake.llm.generate([PROMPT], replace(params, seed=0))[0] for _ in range(3)]
    assert len({output.token_ids for output in zero}) == 1


# -- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("mode", MODES)
def test_choices_of_a_seed_are_different_and_end_by_themselves(path: Path, mode: str, depth: int) -> None:
    """vllm-project/vllm#11898, sgl-project/sglang#28805: four choices, streamed, each to its own end."""
    fake = sampling(path, mode)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "logprobs": 1, "num_speculative_tokens": depth}
    output = served(fake, PROMPT, n=4, seed=1, **options)
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in output.choices}) == 4
    assert len({len(choice.token_ids) for choice in output.choices}) > 1
    assert all((choice.finish_reason == "stop") == (choice.token_ids[-1] == EOS) for choice in output.choices)
    for choice in output.choices:
        single = served(fake, PROMPT, seed=seed_of_choice(1, choice.index), **options).choices[0]
        assert seen_choice(single) == seen_choice(choice)
    fake.llm.reset_prefix_cache()
    chunks = list(fake.llm.stream(PROMPT, SamplingParams(n=4, seed=1, **options)))
    first_end = next(place for place, chunk in enumerate(chunks) if chunk.finish_reason is not None)
    assert len({chunk.index for chunk in chunks[first_end + 1 :]}) == 3
    assert all(chunk.index != chunks[first_end].index for chunk in chunks[first_end + 1 :])


def test_a_first_choice_is_that_of_a_single_one(path: Path) -> None:
    fake = sampling(path)
    (single,) = fake.llm.generate([PROMPT], SEEDED)
    (several,) = fake.llm.generate([PROMPT], replace(SEEDED, n=3))
    (others,) = fake.llm.generate([PROMPT], replace(SEEDED, n=3, seed=8))
    assert seen_choice(several.choices[0]) == seen_choice(single.choices[0])
    assert not {c.token_ids for c in others.choices} & {c.token_ids for c in several.choices}


def test_unseeded_choices_differ(path: Path) -> None:
    fake = sampling(path)
    outputs = [fake.llm.generate([PROMPT], replace(SEEDED, seed=None, n=3))[0] for _ in range(2)]
    assert len({choice.token_ids for output in outputs for choice in output.choices}) == 6


# -- company, chunks, preemptions -------------------------------------------------------------------------------------

# The greedy ones have a seed because drafts here are drawn for them as well.
MIXED: list[tuple[list[int], dict[str, Any]]] = [
    (PROMPT, {"stop": ["ca", "be", "lk"], "seed": 4, "max_tokens": 24, "logprobs": 2, "ignore_eos": True}),
    ([1, 2, 3, 4, 5, 6, 7], {"temperature": 1.0, "seed": 1, "min_tokens": 12, "max_tokens": 24, "prompt_logprobs": 1}),
    (PROMPT, {"seed": 5, "frequency_penalty": 2.0, "repetition_penalty": 1.2, "max_tokens": 24, "min_tokens": 20}),
    (
        [3] * 11,
        {"temperature": 0.8, "seed": 2, "n": 3, "max_tokens": 20, "logprobs": 0, "echo": True, "bad_words": ["a"]},
    ),
    ([5, 6], {"temperature": 1.2, "seed": 3, "top_p": 0.7, "max_tokens": 24, "ignore_eos": True, "stop": "jj"}),
    ([7], {"seed": 6, "max_tokens": 15, "logit_bias": {2: 1.5}, "stop_token_ids": [4], "min_tokens": 5}),
]
SMALL: dict[str, dict[str, Any]] = {
    "in a batch": {},
    "one after the other": {"max_num_seqs": 1},
    "in chunks": {"max_num_seqs": 2, "max_num_batched_tokens": 18},
    "preempted": {"num_blocks": 14, "max_model_len": 40},
    "without a cache": {"enable_prefix_caching": False, "max_num_seqs": 3, "max_num_batched_tokens": 27},
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("mode", MODES)
def test_options_act_alike_alone_in_company_cached_in_chunks_and_preempted(path: Path, mode: str, depth: int) -> None:
    params = [SamplingParams(num_speculative_tokens=depth, **options) for _, options in MIXED]
    prompts = [prompt for prompt, _ in MIXED]
    fake = sampling(path, mode)
    alone = [served(fake, prompt, num_speculative_tokens=depth, **options) for prompt, options in MIXED]
    assert {choice.finish_reason.value for output in alone for choice in output.choices} == {"stop", "length"}
    for name, settings in SMALL.items():
        crowded = sampling(path, mode, **settings)
        for _ in range(2):  # then with cached rows
            outputs: list[RequestOutput] = crowded.llm.generate([*prompts], params)
            assert [seen(output) for output in outputs] == [seen(output) for output in alone]
        assert (crowded.llm.stats.num_preemptions > 0) == (name == "preempted")
        assert_drained(crowded)


@pytest.mark.parametrize("depth", [0, 3])
def test_after_a_bad_request_the_next_good_one_is_served(path: Path, depth: int) -> None:
    class Broken:
        is_stateful = False

        def process(self, history: object, logits: Tensor) -> Tensor:
            raise RuntimeError("broken")

    fake = sampling(path)
    bad = [
        SamplingParams(logits_processors=[Broken()]),
        SamplingParams(stop_token_ids=[16]),
        SamplingParams(logprobs=17),
        SamplingParams(num_speculative_tokens=9),
        SamplingParams(logit_bias=dict.fromkeys(range(16), -1e30), allowed_token_ids=[EOS], min_tokens=1),
    ]
    good = replace(SEEDED, num_speculative_tokens=depth)
    (expected,) = fake.llm.generate([PROMPT], good)
    for one in bad:
        failed, beside = fake.llm.generate([PROMPT, PROMPT], [one, good])
        assert failed.finish_reason == "error"
        assert failed.error
        assert seen(beside) == seen(expected)
        assert seen(fake.llm.generate([PROMPT], good)[0]) == seen(expected)
        assert_drained(fake)
