"""The JSON body of a request of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from foredraft.bench.serving.datasets import WorkItem
from foredraft.errors import ConfigError, shown

Endpoint = Literal["completions", "chat"]

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
RESERVED = frozenset({"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "n", "best_of"})


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of a benchmark ask for. Raises ConfigError.

    Fields that not every server knows (ignore_eos, num_speculative_tokens) are sent only if they are set. Request i has
    the seed `seed` + i where tokens are drawn, at temperature > 0. extra_body: more fields, which win over these.
    """

    endpoint: Endpoint = "completions"
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in get_args(Endpoint):
            raise ConfigError(f"endpoint must be one of {', '.join(get_args(Endpoint))}, not {shown(self.endpoint)}")
        if not isinstance(self.extra_body, Mapping):
            raise ConfigError(f"extra_body must be a JSON object, not {shown(self.extra_body)}")
        if taken := sorted(RESERVED & set(self.extra_body)):
            raise ConfigError(f"extra_body must leave {', '.join(taken)} to the benchmark, which sets them itself")

    def check(self, items: Sequence[WorkItem]) -> None:
        """Raise ConfigError if the endpoint has no way to ask for one of them."""
        for index, item in enumerate(items):
            if self.endpoint == "completions" and item.messages is not None:
                raise ConfigError(f"prompt {index} has messages: they need endpoint=chat")
            if self.endpoint == "chat" and item.messages is None and not isinstance(item.prompt, str):
                raise ConfigError(f"prompt {index} is made of token ids: they need endpoint=completions")

    def body(self, item: WorkItem, index: int, model: str) -> dict[str, Any]:
        """The body of request `index`."""
        body: dict[str, Any] = {"model": model}
        if self.endpoint == "completions":
            body["prompt"] = item.prompt if isinstance(item.prompt, str) else list(item.prompt)
        else:
            body["messages"] = (
                [{"role": "user", "content": item.prompt}] if item.messages is None else list(item.messages)
            )
        body |= {"max_tokens": item.max_tokens, "temperature": self.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.temperature > 0:
            body["seed"] = self.seed + index
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.num_speculative_tokens is not None:
            body["num_speculative_tokens"] = self.num_speculative_tokens
        return body | dict(self.extra_body)
