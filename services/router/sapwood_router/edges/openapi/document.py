"""``/openapi.json``: the routes, with the shapes that their requests and answers are checked against or written as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from sapwood_common.contract.sampling import SamplingParams
from sapwood_router.edges.http.errors import OPENAI
from sapwood_router.edges.routes import Post, Route

_REFERENCE = "#/components/schemas/{name}"
_SECURITY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"x-api-key": []}]
_WIDER: dict[str, dict[str, Any]] = {
    "top_k": {"type": "integer", "minimum": -1},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
}
"""Sampling settings of which HTTP takes more than the workers do."""


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document; routes without a summary are not in it."""
    told = [route for route in routes if route.summary]
    types = list(dict.fromkeys(each for route in told for each in _types(route)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(types, schemas, strict=True))
    of_settings = {name: schema for name, schema in _settings().items() if name != SamplingParams.__name__}
    paths: dict[str, dict[str, Any]] = {}
    for route in told:
        path = f"{route.path}{{name}}" if route.path.endswith("/") else route.path
        paths.setdefault(path, {})[_method(route)] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sapwood", "version": version("sapwood"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": of_settings | components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _method(route: Route) -> str:
    return "post" if isinstance(route, Post) else route.method.lower()


def _types(route: Route) -> Sequence[type[msgspec.Struct]]:
    taken = route.takes if isinstance(route, Post) else ()
    return (*taken, (route.dialect or OPENAI).shape, *(() if route.gives is None else (route.gives,)))


def _operation(route: Route, schema_of: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "object"} if route.gives is None else schema_of[route.gives]
    content = {"application/json": {"schema": answer}}
    made: dict[str, Any] = {"summary": route.summary, "security": _SECURITY}
    if route.path.endswith("/"):
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if isinstance(route, Post):
        taken: dict[str, Any] = {"anyOf": [schema_of[each] for each in route.takes]}
        if len(route.takes) < 2:
            taken = schema_of[route.takes[0]] if route.takes else {"type": "object"}
        if route.settings:
            taken = {"allOf": [taken, {"type": "object", "properties": _sampling(route.settings)}]}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": taken}}}
        if route.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": schema_of[(route.dialect or OPENAI).shape]}}
    made["responses"] = {
        "200": {"description": "the answer", "content": content},
        "default": {"description": "an error", "content": error},
    }
    return made


def _settings() -> dict[str, Any]:
    """The schemas of the sampling settings' type, and of those that it refers to, by name."""
    return msgspec.json.schema_components([SamplingParams], ref_template=_REFERENCE)[1]


def _sampling(names: Iterable[str]) -> dict[str, Any]:
    """The schemas of sampling settings; null is as none."""
    known = _settings()[SamplingParams.__name__]["properties"]
    return {
        name: {"anyOf": [_WIDER.get(name) or _without_default(known[name]), {"type": "null"}]} for name in sorted(names)
    }


def _without_default(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "default"}
