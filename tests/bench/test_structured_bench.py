"""The benchmark of structured answers: its tasks, its check of answers, and what it compares."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest
from byte_models import byte_llama
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from foredraft import LLM, SamplingParams
from foredraft.bench.json_tasks import MAX_TASKS, JsonTask, json_tasks
from foredraft.bench.steps import time_decode_steps
from foredraft.bench.structured import DepthResult, SchemaCheck, StructuredTrials, measure_structured
from foredraft.errors import ConfigError, ForedraftError
from foredraft.outputs import RequestOutput

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bird", "fish"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
TASKS = [JsonTask(name, f"Describe the {name}", SCHEMA) for name in ("owl", "eel", "emu", "carp", "gull")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = byte_llama(tmp_path_factory.mktemp("model"))
    return LLM(model, num_blocks=256, dtype="float32", device="cpu")


def prompted(llm: LLM) -> list[tuple[JsonTask, list[int]]]:
    return [(task, llm.token_ids(task.prompt)) for task in TASKS]


def test_kinds_of_tasks_take_turns() -> None:
    tasks = json_tasks(MAX_TASKS)
    assert len(tasks) == len({task.prompt for task in tasks}) == MAX_TASKS == 40
    kinds = [task.name.partition(":")[0] for task in tasks]
    assert kinds == kinds[:5] * 8
    assert len(set(kinds)) == 5
    assert json_tasks(7) == tasks[:7]
    assert tasks[5].prompt == (
        "Describe the animal emperor penguin as JSON with the fields name, kind, legs, diet, habitats, description."
    )


@pytest.mark.parametrize("task", json_tasks(5), ids=lambda task: task.name)
def test_schemas_are_valid_and_everything_in_them_is_bounded(task: JsonTask) -> None:
    Draft202012Validator.check_schema(task.schema)
    assert is_bounded(task.schema)


def is_bounded(schema: dict[str, Any]) -> bool:
    match schema.get("type"):
        case "object":
            return schema["additionalProperties"] is False and all(map(is_bounded, schema["properties"].values()))
        case "array":
            return "maxItems" in schema and is_bounded(schema["items"])
        case "string":
            return "maxLength" in schema
        case "integer":
            return "minimum" in schema and "maximum" in schema
        case kind:
            return kind == "boolean" or "enum" in schema


@pytest.mark.parametrize(
    ("text", "is_fit"),
    [
        ('{"kind": "bird", "legs": 2}', True),
        ('{"kind": "bird", "legs": 9}', False),
        ('{"kind": "bird"}', False),
        ('{"kind": "bird", "legs": 2', False),
        ("", False),
        ("[]", False),
    ],
)
def test_answers_are_checked(text: str, is_fit: bool) -> None:
    assert SchemaCheck().fits(text, SCHEMA) is is_fit


def test_without_jsonschema_there_is_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match="pip install jsonschema"):
        SchemaCheck()


def test_free_text_is_as_long_as_the_answer_before_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[bool, int | None, str, int, str | None]] = []
    generate = llm.generate

    def watch(prompts: Any, params: Any) -> list[RequestOutput]:
        outputs = generate(prompts, params)
        if isinstance(params, SamplingParams):
            is_structured = params.structured_output is not None
            depth, salt = params.num_speculative_tokens, params.cache_salt
            (output,) = outputs
            runs.append((is_structured, depth, output.text if is_structured else "", len(output.token_ids), salt))
        return outputs

    monkeypatch.setattr(llm, "generate", watch)
    result = measure_structured(llm, prompted(llm), SamplingParams(max_tokens=200), (0, 3), 2, range(5))
    assert [(is_structured, depth) for is_structured, depth, *_ in runs] == [
        (is_structured, depth) for turn in range(5) for depth in ((0, 3), (3, 0))[turn % 2] for is_structured in (1, 0)
    ]
    for answer, free in zip(runs[::2], runs[1::2], strict=True):
        assert answer[3] == free[3]
        assert json.loads(answer[2])["kind"] in ("bird", "fish")
    assert len({salt for *_, salt in runs}) == len(runs)
    plain, drafting = result.depths
    assert plain.finish_reasons == drafting.finish_reasons == Counter(stop=5)
    assert plain.num_valid == drafting.num_valid == 5
    assert plain.num_tokens == drafting.num_tokens == sum(run[3] for run in runs) / 4
    assert (plain.structured.mean_acceptance_length, plain.free.mean_acceptance_length) == (None, None)
    assert drafting.structured.mean_acceptance_length is not None
    assert drafting.structured.mean_acceptance_length > 1
    for depth in result.depths:
        assert depth.num_masks > 0 < depth.mask_seconds
        assert depth.slowdown is not None
        assert len(depth.structured.tokens_per_second) == len(depth.free.tokens_per_second) == 5


def test_every_second_request_of_a_mixed_batch_is_structured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[bool]] = []

    def watch(llm: LLM, prompts: Any, params: list[SamplingParams], num_steps: int) -> Any:
        batches.append([one.structured_output is not None for one in params])
        assert {one.max_tokens for one in params} == {200}
        return time_decode_steps(llm, prompts, params, num_steps)

    monkeypatch.setattr("foredraft.bench.structured.time_decode_steps", watch)
    trials, result = StructuredTrials(llm, prompted(llm), SamplingParams(max_tokens=200)), DepthResult(3)
    trials.time_batch([0, 1, 2], result)
    assert batches == [[True, False, True], [False] * 3]
    assert len(result.mixed_steps) >= 1
    assert len(result.free_steps) == 32


def test_too_few_tasks_for_a_batch_leave_steps_out(llm: LLM) -> None:
    result = measure_structured(llm, prompted(llm)[:1], SamplingParams(max_tokens=200), (0,), 2, range(1))
    assert result.depths[0].slowdown is None
    assert [len(table.rows) for table in result.tables().values()] == [1, 1, 1]


def test_an_answer_that_fails_is_an_error(llm: LLM) -> None:
    trials = StructuredTrials(llm, [(TASKS[0], [1] * 2000)], SamplingParams(max_tokens=20))
    with pytest.raises(ForedraftError, match="the prompt has 2000 tokens"):
        trials.answer(0, DepthResult(0))
