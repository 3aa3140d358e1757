"""Requests over a fake target, checked by what must hold whatever is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fake_model import FakeModel

from foredraft import Choice, RequestOutput, SamplingParams

DEPTHS = (0, 1, 3, 8)
EOS = 15
PROMPT = [8, 9]
START = len(PROMPT)
LETTERS = "abcdefghijklmno$"


def served(fake: FakeModel, prompt: Sequence[int] | str, **options: Any) -> RequestOutput:
    """One request, alone and cold: a stream adds up to what is returned at once, and leaves nothing behind."""
    llm, params = fake.llm, SamplingParams(**options)
    llm.reset_prefix_cache()
    (whole,) = llm.generate([prompt], params)
    llm.reset_prefix_cache()
    chunks = list(llm.stream(prompt, params))
    output = chunks[-1].output
    assert output is not None
    assert replace(output, request_id=whole.request_id) == whole
    for choice in whole.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert tuple(token_id for chunk in own for token_id in chunk.token_ids) == choice.token_ids
        assert "".join(chunk.text for chunk in own) == choice.text
        assert tuple(logprob for chunk in own for logprob in chunk.logprobs) == (choice.logprobs or ())
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)
    assert_drained(fake)
    return whole


def served_alike(
    fake: FakeModel, prompt: Sequence[int] | str, depths: Sequence[int] = DEPTHS, **options: Any
) -> RequestOutput:
    """The same with any number of drafts a step; returned is the output with the most."""
    outputs = [served(fake, prompt, num_speculative_tokens=depth, **options) for depth in depths]
    assert all(seen(output) == seen(outputs[0]) for output in outputs)
    return outputs[-1]


def seen(output: RequestOutput) -> tuple[Any, ...]:
    """All that is promised to be the same at any depth and in any company."""
    return output.prompt_token_ids, output.prompt_logprobs, [seen_choice(choice) for choice in output.choices]


def seen_choice(choice: Choice) -> tuple[Any, ...]:
    return choice.token_ids, choice.text, choice.finish_reason, choice.error, choice.logprobs


def assert_drained(fake: FakeModel) -> None:
    """All blocks are free again, no count is negative, and the next good request is served."""
    assert not fake.engine.has_unfinished
    fake.engine.cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in fake.engine.cache.pools)
    stats = fake.engine.stats
    assert min([stats.num_generated_tokens, stats.num_cached_tokens, *stats.speculation.accepted_by_depth]) >= 0
    (output,) = fake.llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (3, "length")
