"""The OpenAPI document of the service, from what the handlers of its routes declare."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web

from relax_hpc import __version__

Schema = Mapping[str, Any]
Handler = TypeVar("Handler", bound=Callable[..., Any])
_ATTRIBUTE = "openapi_entry"
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "array", "items": TEXT}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": TEXT, "message": TEXT},
        },
        "detail": {**TEXT, "description": "The message again, for clients of Relax."},
    },
}


def mapping(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """Schema of an object with ``properties``."""
    schema = {"type": "object", "properties": dict(properties)}
    return {**schema, "required": list(required)} if required else schema


def documented(
    *,
    body: Schema | None = None,
    answers: Mapping[int, Schema | str] | None = None,
    errors: Sequence[int] = (),
    query: Sequence[str] = (),
    headers: Sequence[str] = (),
) -> Callable[[Handler], Handler]:
    """Decorator of a handler that declares its entry in the OpenAPI document. The first line of its
    docstring is the summary.

    ``answers``: JSON schema, or media type of another content, by HTTP status.
    """
    entry = {
        "body": body,
        "answers": dict(answers or {200: mapping({})}),
        "errors": list(errors),
        "query": list(query),
        "headers": list(headers),
    }

    def declare(handler: Handler) -> Handler:
        setattr(handler, _ATTRIBUTE, entry)
        return handler

    return declare


def make_document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of all documented routes of ``app``."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        entry = getattr(route.handler, _ATTRIBUTE, None)
        if entry is None or route.resource is None or route.method == "HEAD":
            continue
        path = route.resource.canonical
        paths.setdefault(path, {})[route.method.lower()] = _operation(path, route.handler, entry)
    return {
        "openapi": "3.1.0",
        "info": {"title": "relax_hpc: service of a run", "version": __version__},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": ERROR},
        },
    }


def _operation(path: str, handler: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall(r"\{(\w+)", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": TEXT} for name in entry["query"]]
    parameters += [{"name": name, "in": "header", "schema": TEXT} for name in entry["headers"]]
    responses = {str(status): _response(content) for status, content in entry["answers"].items()}
    reference = {"$ref": "#/components/schemas/Error"}
    for status in (401, *entry["errors"]):
        responses[str(status)] = _response(reference)
    summary = (handler.__doc__ or "").strip().splitlines()
    operation: dict[str, Any] = {
        "summary": summary[0] if summary else "",
        "operationId": handler.__name__,
        "responses": responses,
    }
    if parameters:
        operation["parameters"] = parameters
    if entry["body"] is not None:
        content = {"application/json": {"schema": entry["body"]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(content: Schema | str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"description": "", "content": {content: {}}}
    return {"description": "", "content": {"application/json": {"schema": content}}}
