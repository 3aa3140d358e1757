"""The built-in model answers in JSON: every answer fits its schema, the same at every K."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutput
from foredraft.bench.json_tasks import JsonTask, json_tasks
from foredraft.bench.structured import SchemaCheck


def answers(llm: LLM, tasks: Sequence[JsonTask], depth: int, temperature: float = 0.0) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=1000,
            temperature=temperature,
            seed=index,
            structured_output=StructuredOutput(json_schema=task.schema),
            num_speculative_tokens=depth,
        )
        for index, task in enumerate(tasks)
    ]
    return llm.chat([[{"role": "user", "content": task.prompt}] for task in tasks], params)


def assert_fit(outputs: Sequence[RequestOutput], tasks: Sequence[JsonTask]) -> None:
    for output, task in zip(outputs, tasks, strict=True):
        assert output.finish_reason == "stop", task.name
        assert SchemaCheck().fits(output.text, task.schema), task.name


def test_answers_fit_their_schemas(builtin_llm: LLM) -> None:
    tasks = json_tasks(3)
    assert_fit(answers(builtin_llm, tasks, 3), tasks)


@pytest.mark.slow
def test_forty_answers_fit_their_schemas_at_every_depth(builtin_llm: LLM) -> None:
    tasks = json_tasks(40)
    texts = []
    for depth in (0, 3, 8):
        outputs = answers(builtin_llm, tasks, depth)
        assert_fit(outputs, tasks)
        texts.append([output.text for output in outputs])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3, 8])
def test_forty_sampled_answers_fit_their_schemas(builtin_llm: LLM, depth: int) -> None:
    tasks = json_tasks(40)
    assert_fit(answers(builtin_llm, tasks, depth, temperature=1.0), tasks)
