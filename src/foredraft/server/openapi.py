"""The OpenAPI document: FastAPI writes it, but for the bodies, which the endpoints read by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from foredraft.server.protocol.body import Body
from foredraft.server.protocol.responses import ErrorBody

_REASONS = {
    400: "A field is not as it must be: `param` names it",
    401: "No key that the server knows",
    404: "No such model",
    408: "The body has not come in time",
    413: "The body is too large",
    415: "The body is not sent as JSON",
    429: "Too many requests wait: try again after Retry-After seconds",
    503: "The server loads, drains or has failed: try again after Retry-After seconds",
}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that an endpoint may answer with."""
    return {status: {"description": _REASONS[status], "model": ErrorBody} for status in statuses}


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[Body]]) -> None:
    """Put the body that each path takes by POST into the document."""
    write: Callable[[], dict[str, Any]] = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = write()
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            schemas |= _schemas(list(bodies.values()))
            for path, body in bodies.items():
                schema = {"$ref": f"#/components/schemas/{body.__name__}"}
                content = {"application/json": {"schema": schema}}
                operation = found["paths"][path]["post"]
                operation["requestBody"] = {"required": True, "content": content}
                if "stream" in body.model_fields:
                    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
            _drop_validation_errors(found)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _drop_validation_errors(document: dict[str, Any]) -> None:
    """FastAPI tells of a 422 wherever there is a parameter; here what is not valid is a 400."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _schemas(bodies: Sequence[type[Body]]) -> dict[str, Any]:
    _, found = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    return dict(found["$defs"])
