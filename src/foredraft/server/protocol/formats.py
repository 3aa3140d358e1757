"""What the output must look like, as a request says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator
from pydantic.types import Discriminator

from foredraft.server.protocol.body import Body, JsonObject, Text, TextOrIds, refusal
from foredraft.server.protocol.tools import Name
from foredraft.structured_output import MAX_CHARACTERS, MAX_REGEX, StructuredOutput

MAX_CHOICES = 65_536


class JsonSchemaFormat(Body):
    """A JSON schema with a name. It is always followed strictly. Without a schema: any object."""

    name: Name
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to say what the output must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal("json_schema", "is required if type is json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise refusal("json_schema", f"has no effect if type is {self.type}: leave it out")
        return self

    def record(self) -> StructuredOutput | None:
        """As the engine takes it; None for free text. Raises RequestError."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return StructuredOutput(json_object=True) if schema is None else StructuredOutput(json_schema=schema)


def _schema_form(value: object) -> str:
    if isinstance(value, str):
        return "<text>"
    return "<true>" if isinstance(value, bool) else "<schema>"


SchemaOrText = Annotated[
    Annotated[JsonObject, Tag("<schema>")] | Annotated[Text, Tag("<text>")] | Annotated[bool, Tag("<true>")],
    Discriminator(_schema_form),
]


class StructuredOutputBody(Body):
    """Our own way to say it: exactly one of json_schema, json_object, regex, grammar and choice.

    json_schema: an object, its text, or true for any JSON. after: text or token ids up to which the output is free.
    """

    json_schema: SchemaOrText | None = None
    json_object: bool = False
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)
        ]
        | None
    ) = None
    after: TextOrIds | None = None
    whitespace: bool = True

    def record(self) -> StructuredOutput:
        """As the engine takes it. Raises RequestError."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        return StructuredOutput(**fields)
