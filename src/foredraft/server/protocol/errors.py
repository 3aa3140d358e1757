"""What a client gets instead of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foredraft.errors import RequestError, shown
from foredraft.sampling_params import SamplingParams

MAX_MESSAGE = 1_000  # characters
MAX_PARAM = 200

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""`type` by status; otherwise it is the client's fault below 500, and the server's from there on."""

REFUSAL = "refusal"
"""Type of the errors that the models of the protocol raise themselves: ctx has `param` and `rule`."""

FIELDS = frozenset(SamplingParams.__dataclass_fields__) | {
    "prompt",
    "prompt_token_ids",
    "media",
    "messages",
    "tools",
    "tokens",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
}
"""What the message of a RequestError may begin with."""

RULES = {
    "missing": "is required",
    "extra_forbidden": "is not a field that is known here",
    "none_required": "must be null: nothing else can be honoured",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "dict_attributes_type": "must be an object",
    "string_unicode": "must be valid Unicode text",
}
"""What pydantic's errors say, in our words. The others only begin differently."""

SUBJECT = re.compile(r"^(Input|List|String|Dictionary|Value) should ")


class ApiError(Exception):
    """An answer with an HTTP status from 400 on, and a body in OpenAI's form.

    param: the field at fault, as a dotted path. code: a word that programs may look at. retry_after: seconds after
    which it makes sense to try again. Message and param are cut to a bounded length, and are always valid Unicode.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.status = status
        self.message = _plain(message, MAX_MESSAGE)
        self.param = None if param is None else _plain(param, MAX_PARAM)
        self.code = code
        self.retry_after = retry_after
        super().__init__(self.message)

    @property
    def type(self) -> str:
        """The word for the kind of error, which follows from the status."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")

    @property
    def headers(self) -> dict[str, str]:
        """What belongs in the head of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def body(self) -> dict[str, Any]:
        """The body of the response: always JSON."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def server_failed() -> ApiError:
    """What nobody has foreseen; the client is told no more than that."""
    return ApiError(500, "the server has failed; its log says why")


def invalid(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be served as asked, because of the field `param`."""
    return ApiError(400, message, param=param)


def from_validation(error: ValidationError | Sequence[Any]) -> ApiError:
    """The error for a body that a model of the protocol refuses: the first fault of them, and how many more there are.

    error: pydantic's, or the list that FastAPI's RequestValidationError has.
    """
    errors = error.errors(include_url=False) if isinstance(error, ValidationError) else list(error)
    if not errors:
        return invalid("the body is not valid")
    first: Mapping[str, Any] = errors[0]
    place = [str(part) for part in first["loc"]]
    if place[:1] == ["body"]:  # FastAPI's
        del place[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    if first["type"] == REFUSAL:
        place += [part for part in [first["ctx"]["param"]] if part]
    # "<text>" and the like say which of several forms was expected, "[key]" that a key is at fault.
    param = ".".join(part for part in place if part != "[key]" and not re.fullmatch(r"<\w+>", part))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return invalid(f"{_plain(param, MAX_PARAM) or 'the body'} {_rule(first)}{more}", param or None)


def from_request_error(error: RequestError, names: Mapping[str, str] | None = None) -> ApiError:
    """The error for a request that the engine refuses. param: the field that its message begins with, if it is one.

    names: what the API calls a field where it has another name for it; the message then begins with that.
    """
    message = str(error)
    found = re.match(r"(the )?([a-z_]+)((?:\.\d[.\w]*)?)", message)
    field = found.group(2) if found else None
    if found is None or field not in FIELDS:
        return invalid(message)
    param = (names or {}).get(field, field)
    inside = found.group(3)  # as in messages.0.content
    return invalid(message if param == field else f"{param}: {message}", param + inside)


def _rule(error: Mapping[str, Any]) -> str:
    if error["type"] == REFUSAL:
        return str(error["ctx"]["rule"])
    rule = RULES.get(error["type"])
    if rule is None:
        rule = SUBJECT.sub("must ", str(error["msg"])).replace(" after validation", "")
    if error["type"] in ("missing", "extra_forbidden", "string_unicode") or ", not " in rule:
        return rule
    return f"{rule}, not {_shown_json(error.get('input'))}"


def _shown_json(value: object) -> str:
    """Briefly, whatever it is: writing out something large or deep could take long or fail."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return shown(value)
        case str():
            return shown(value[:100])
        case list():
            return "a list"
        case _:
            return "an object"


def _plain(text: str, limit: int) -> str:
    text = text[: limit + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
