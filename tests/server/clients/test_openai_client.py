"""The official client: conversations and completions, whole, against the engine without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live_server import LiveServer
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from foredraft import LLM, SamplingParams
from foredraft.logprobs import TokenLogprob
from foredraft.outputs import RequestOutput

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something"}]
CHAT_PROMPT = "Say something:"
PROMPT = "Once upon a time"


def text_of(token_id: int) -> str:
    return bytes([token_id]).decode("utf-8", "replace")


def offline(llm: LLM, prompt: str | list[int], **options: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**options))
    return output


def test_chat(client: OpenAI, byte_llm: LLM) -> None:
    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, max_completion_tokens=12, temperature=0, extra_body={"return_token_ids": True}
    )
    right = offline(byte_llm, CHAT_PROMPT, max_tokens=12)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "model"
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.content) == ("assistant", right.text)
    assert choice.message.tool_calls is None
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == list(right.token_ids)
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == list(CHAT_PROMPT.encode())
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (14, 12, 26)


def test_completion(client: OpenAI, byte_llm: LLM) -> None:
    answer = client.completions.create(model="model", prompt=PROMPT, temperature=0)
    right = offline(byte_llm, PROMPT, max_tokens=16)  # the API's default
    (choice,) = answer.choices
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, right.text, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 16)
    assert answer.usage.prompt_tokens_details is not None


def test_async_client_answers_many_at_once(byte_server: LiveServer, byte_llm: LLM) -> None:
    prompts = [f"Number {index}" for index in range(8)]

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{byte_server.url}/v1", api_key="none") as client:
            calls = [client.completions.create(model="model", prompt=each, temperature=0) for each in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == [output.text for output in byte_llm.generate(prompts, SamplingParams(max_tokens=16))]


def test_prompts_in_all_four_forms(client: OpenAI, byte_llm: LLM) -> None:
    texts = ["One", "Two and", "Three"]
    ids = [list(text.encode()) for text in texts]
    right = [offline(byte_llm, text, max_tokens=8).text for text in texts]

    def answered(prompt: Any) -> list[tuple[int, str]]:
        answer = client.completions.create(model="model", prompt=prompt, max_tokens=8, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8 * len(answer.choices)
        return [(choice.index, choice.text) for choice in answer.choices]

    assert answered(texts[1]) == answered(ids[1]) == [(0, right[1])]
    assert answered(texts) == answered(ids) == list(enumerate(right))


def test_several_choices_of_several_prompts(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "model", "max_tokens": 8, "temperature": 1, "n": 2, "seed": 3}
    both = client.completions.create(prompt=["One", "Two"], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    apart = [client.completions.create(prompt=prompt, **options) for prompt in ("One", "Two")]
    assert [choice.text for choice in both.choices] == [choice.text for each in apart for choice in each.choices]
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (6, 32)


def test_a_seed_repeats_an_answer(client: OpenAI, byte_llm: LLM) -> None:
    def answer(seed: int) -> list[str | None]:
        found = client.chat.completions.create(
            model="model", messages=MESSAGES, max_completion_tokens=16, temperature=0.9, top_p=0.95, n=3, seed=seed
        )
        return [choice.message.content for choice in found.choices]

    first = answer(11)
    assert len(set(first)) == 3
    assert answer(11) == first != answer(12)
    right = offline(byte_llm, CHAT_PROMPT, max_tokens=16, temperature=0.9, top_p=0.95, n=3, seed=11)
    assert first == [choice.text for choice in right.choices]


def check_scores(found: list[TokenLogprob], texts: list[str], values: list[float]) -> None:
    assert texts == [text_of(score.token_id) for score in found]
    assert values == pytest.approx([score.logprob for score in found], abs=1e-4)


def test_logprobs_of_a_chat(client: OpenAI, byte_llm: LLM) -> None:
    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, max_completion_tokens=10, temperature=0, logprobs=True, top_logprobs=4
    )
    right = offline(byte_llm, CHAT_PROMPT, max_tokens=10, logprobs=4).logprobs
    assert right is not None
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    check_scores(list(right), [each.token for each in content], [each.logprob for each in content])
    assert [each.bytes for each in content] == [[score.token_id] for score in right]
    for each, score in zip(content, right, strict=True):
        assert [top.bytes for top in each.top_logprobs] == [[token_id] for token_id, _ in score.top]
        expected = [logprob for _, logprob in score.top]
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(expected, abs=1e-4)


def test_logprobs_without_alternatives(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="model", messages=MESSAGES, max_completion_tokens=3, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [each.top_logprobs for each in answer.choices[0].logprobs.content or []] == [[], [], []]


def test_logprobs_of_a_completion(client: OpenAI, byte_llm: LLM) -> None:
    answer = client.completions.create(model="model", prompt=PROMPT, max_tokens=10, temperature=0, logprobs=3)
    right = offline(byte_llm, PROMPT, max_tokens=10, logprobs=3).logprobs
    assert right is not None
    scores = answer.choices[0].logprobs
    assert scores is not None
    check_scores(list(right), scores.tokens or [], scores.token_logprobs or [])
    assert scores.text_offset == list(range(10))
    for top, score in zip(scores.top_logprobs or [], right, strict=True):
        expected: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            expected.setdefault(text_of(token_id), logprob)
        assert top == pytest.approx(expected, abs=1e-4)


def test_echo_scores_the_prompt_too(client: OpenAI, byte_llm: LLM) -> None:
    answer = client.completions.create(model="model", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=1, echo=True)
    right = offline(byte_llm, PROMPT, max_tokens=4, logprobs=1, prompt_logprobs=1)
    assert answer.choices[0].text == PROMPT + right.text
    assert right.logprobs is not None
    assert right.prompt_logprobs is not None
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None
    known = [score for score in (*right.prompt_logprobs, *right.logprobs) if score is not None]
    assert scores.tokens is not None
    check_scores(known, scores.tokens[1:], scores.token_logprobs[1:])
    only_prompt = client.completions.create(model="model", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert only_prompt.choices[0].text == PROMPT
    assert only_prompt.choices[0].logprobs is not None
    prompt_scores = scores.token_logprobs[: len(PROMPT)]
    assert only_prompt.choices[0].logprobs.token_logprobs == pytest.approx(prompt_scores, abs=1e-4)


def test_stop_strings_and_the_limit(client: OpenAI, byte_llm: LLM) -> None:
    full = offline(byte_llm, CHAT_PROMPT, max_tokens=24)
    at = next(index for index, byte in enumerate(full.token_ids) if index > 4 and byte < 0x80)
    stop = bytes(full.token_ids[at : at + 1]).decode()
    right = offline(byte_llm, CHAT_PROMPT, max_tokens=24, stop=stop)
    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, max_completion_tokens=24, temperature=0, stop=["never found", stop]
    )
    assert answer.choices[0].message.content == right.text
    assert answer.choices[0].finish_reason == "stop" == right.finish_reason.value
    older = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=5, temperature=0)
    assert older.choices[0].message.content == offline(byte_llm, CHAT_PROMPT, max_tokens=5).text
    assert older.choices[0].finish_reason == "length"


def test_our_own_fields(client: OpenAI) -> None:
    def ask(**extra: Any) -> Any:
        return client.chat.completions.create(
            model="model",
            messages=MESSAGES,
            max_completion_tokens=12,
            temperature=0,
            extra_body={"return_token_ids": True, "return_speculation": True, "cache_salt": "ours", **extra},
        )

    plain, drafted = ask(num_speculative_tokens=0), ask(num_speculative_tokens=2)
    assert plain.choices[0].token_ids == drafted.choices[0].token_ids
    assert len(plain.choices[0].token_ids) == 12
    assert plain.choices[0].speculation["num_drafted_tokens"] == 0
    assert plain.choices[0].speculation["token_depths"] == [0] * 12
    found = drafted.choices[0].speculation
    assert found["drafted_by_depth"][0] > 0
    assert not any(found["drafted_by_depth"][2:])
    assert sum(depth > 0 for depth in found["token_depths"]) == found["num_accepted_tokens"]
    assert drafted.usage.prompt_tokens_details.cached_tokens > 0
    assert ask(cache_salt="another").usage.prompt_tokens_details.cached_tokens == 0


def test_fields_that_are_not_asked_for_are_not_there(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="model", messages=MESSAGES, max_completion_tokens=2)
    assert not {"prompt_token_ids", "prompt_logprobs"} & set(answer.model_extra or {})
    assert not {"token_ids", "speculation"} & set(answer.choices[0].model_extra or {})


def test_messages_of_all_roles_and_in_parts(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]},
        {"role": "assistant", "content": "D"},
        {"role": "user", "content": "E", "name": "somebody"},
    ]
    answer = client.chat.completions.create(
        model="model", messages=messages, max_completion_tokens=1, extra_body={"return_token_ids": True}
    )
    assert bytes((answer.model_extra or {})["prompt_token_ids"]) == b"AB\nCDE:"


def test_an_answer_can_be_sent_back(client: OpenAI) -> None:
    ascii_only = {str(byte): -100 for byte in range(0x80, 0x100)}
    first = client.chat.completions.create(
        model="model", messages=MESSAGES, max_completion_tokens=4, temperature=0, logit_bias=ascii_only
    )
    message: Any = first.choices[0].message
    second = client.chat.completions.create(
        model="model",
        messages=[*MESSAGES, message, {"role": "user", "content": "Go on"}],
        max_completion_tokens=1,
        extra_body={"return_token_ids": True},
    )
    prompt = bytes((second.model_extra or {})["prompt_token_ids"]).decode()
    assert message.content
    assert prompt == f"Say something{message.content}Go on:"


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("model", "model", "foredraft")
    assert client.models.retrieve("model") == model
