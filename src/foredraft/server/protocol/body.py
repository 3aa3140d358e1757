"""What all bodies of requests have in common, and how one is read."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Tag, ValidationError, model_validator
from pydantic.types import Discriminator
from pydantic_core import PydanticCustomError

from foredraft.server.protocol.errors import REFUSAL, from_validation, invalid

MAX_TEXT = 16_777_216  # characters of one text
MAX_IDS = 4_194_304  # of one list of token ids
MAX_JSON = 1_000_000  # characters of an object of no fixed form
MAX_DEPTH = 100  # of such an object: braces within each other
MANY = 64  # unknown fields, after which nobody wants to know them all


def refusal(param: str, rule: str) -> PydanticCustomError:
    """For validators: what is wrong with the field `param` of the model that is being read ("": the value itself)."""
    return PydanticCustomError(REFUSAL, "{param} {rule}", {"param": param, "rule": rule})


def _allow_null(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Say in the schema that null stands for the default of each field that has one."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kinds = field.get("anyOf", [field])
        if name in required or {"type": "null"} in kinds or field.get("type") == "null":
            continue
        kept = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **kept}


class Body(BaseModel):
    """An object in a request. Types are strict, numbers finite, null is a field's default, other fields are refused."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_allow_null,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if len(value) > len(fields) + MANY:
            unknown = next(name for name in value if name not in fields)
            raise refusal(str(unknown), "is not a field that is known here")
        return {
            name: item
            for name, item in value.items()
            if item is not None or name not in fields or fields[name].is_required()
        }


def _plain_json(value: dict[str, Any]) -> dict[str, Any]:
    if not _is_flat(value, MAX_DEPTH):
        raise refusal("", f"is nested too deeply: {MAX_DEPTH} levels at most")
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise refusal("", "must be valid Unicode text") from None
    except ValueError as error:  # NaN, or an integer of too many digits
        raise refusal("", f"must be JSON: {error!s:.100}") from None
    if len(text) > MAX_JSON:
        raise refusal("", f"may have {MAX_JSON} characters at most, not {len(text)}")
    return value


def _is_flat(value: object, levels: int) -> bool:
    """Whether it has at most so many levels: what is deeper breaks whatever walks through it later."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(item, levels - 1) for item in items)


def text_or_ids(value: object) -> str:
    """Which of two forms is meant."""
    return "<ids>" if isinstance(value, list) else "<text>"


Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS)]
TextOrIds = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")],
    Discriminator(text_or_ids),
]
JsonObject = Annotated[dict[str, Any], AfterValidator(_plain_json)]
"""An object of no fixed form, which can be written as JSON again."""

BodyT = TypeVar("BodyT", bound=Body)


def read_body(raw: bytes, kind: type[BodyT]) -> BodyT:
    """Read the body of a request. Raises ApiError 400, which names the field, whatever the bytes are."""
    try:
        value = json.loads(raw)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as error:  # no JSON, not UTF-8, or an integer of too many digits
        raise invalid(f"the body is not JSON: {error!s:.200}") from None
    return validated(value, kind)


def validated(value: object, kind: type[BodyT]) -> BodyT:
    """A body that has been parsed already. Raises ApiError 400, which names the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
