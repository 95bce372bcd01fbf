"""``/openapi.json`` and ``/docs``, made when somebody first asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec

from sapwood_common.contract.sampling import SamplingParams
from sapwood_router.edges.http.errors import OPENAI
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.status_page import HEADERS
from sapwood_router.edges.routes import Ask, Post, Route

_REFERENCE = "#/components/schemas/{name}"
_SECURITY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"x-api-key": []}]
_WIDER: dict[str, dict[str, Any]] = {
    "top_k": {"type": "integer", "minimum": -1},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
}
"""Sampling settings for which HTTP accepts a wider range than the workers."""


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document; routes without a summary are not in it."""
    described = [route for route in routes if route.summary]
    types = list(dict.fromkeys(each for route in described for each in _types(route)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(types, schemas, strict=True))
    of_settings = {name: schema for name, schema in _settings().items() if name != SamplingParams.__name__}
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
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


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sapwood's HTTP API</title>
<meta name="viewport" content="width=device-width">
<style>
body{{font:14px/1.5 system-ui,sans-serif;margin:2em auto;padding:0 1em;max-width:62em;color-scheme:light dark}}
table{{border-collapse:collapse;margin:.3em 0 1em}} td,th{{padding:.2em .9em .2em 0;text-align:left;vertical-align:top;
border-bottom:1px solid #8884}} code{{font-size:13px}} summary{{cursor:pointer;padding:.35em 0;border-top:1px solid #8884}}
.method{{display:inline-block;width:5em;font-weight:600}} h3{{font-size:14px;margin:.6em 0 0}}
details details{{margin-left:1.2em}}
</style></head><body>
<h1>Sapwood's HTTP API</h1>
<p>Version {version}. As a document for programs: <a href="/openapi.json">/openapi.json</a>. Keys, where they are asked for, go
into <code>authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>.</p>
{operations}
</body></html>
"""


def render(document: dict[str, Any]) -> bytes:
    """The page of a document."""
    components = document["components"]["schemas"]
    operations = [
        _operation_html(method, path, operation, components)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return _PAGE.format(version=escape(document["info"]["version"]), operations="\n".join(operations)).encode()


def _operation_html(method: str, path: str, operation: dict[str, Any], components: dict[str, Any]) -> str:
    parts = [
        f'<summary><span class="method">{method.upper()}</span> <code>{escape(path)}</code> {escape(operation["summary"])}'
    ]
    parts.append("</summary>")
    if "requestBody" in operation:
        parts += ["<h3>request</h3>", _table(_schema_in(operation["requestBody"]), components)]
    answers = operation["responses"]["200"]["content"]
    streams = ", or server-sent events where <code>stream</code> is true" if "text/event-stream" in answers else ""
    parts += [f"<h3>answer{streams}</h3>", _table(_schema_in(operation["responses"]["200"]), components)]
    return f"<details>{''.join(parts)}</details>"


def _schema_in(holder: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = holder["content"]["application/json"]["schema"]
    return schema


def _table(schema: dict[str, Any], components: dict[str, Any], around: frozenset[str] = frozenset()) -> str:
    """An object's properties; those that are objects themselves can be unfolded, but not within themselves (``around``)."""
    rows = []
    for owner in _objects(schema, components):
        for name, inner in owner.get("properties", {}).items():
            needed = "required" if name in owner.get("required", ()) else ""
            inside = [item for item in _inner(inner) if item["$ref"] not in around]
            within = "".join(_table(item, components, around | {item["$ref"]}) for item in inside)
            kind = escape(_kind(inner))
            shown = f"<details><summary>{kind}</summary>{within}</details>" if within else kind
            rows.append(f"<tr><td><code>{escape(name)}</code></td><td>{shown}</td><td>{needed}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else "<p>an object</p>"


def _objects(schema: dict[str, Any], components: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that a schema may be, or is all of."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    for several in ("anyOf", "allOf"):
        for part in schema.get(several, ()):
            yield from _objects(part, components)
    if "properties" in schema:
        yield schema


def _inner(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """References to the objects within a property: itself, or its items."""
    for part in (schema, *schema.get("anyOf", ())):
        if "$ref" in part:
            yield part
        elif isinstance(part.get("items"), dict):
            yield from _inner(part["items"])


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name: str = schema["$ref"].rpartition(".")[2].rpartition("/")[2]
        return name
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"] if value is not None)
    if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        return f"array of {_kind(schema['items'])}"
    return str(schema.get("type", "anything"))


class ApiPages:
    """Tells of routes.

    Args:
        described: The routes.
    """

    def __init__(self, described: Sequence[Route]) -> None:
        self._described = described
        self._made: asyncio.Task[tuple[bytes, bytes]] | None = None

    def routes(self) -> list[Route]:
        """The document and the page for people."""
        return [Ask("/openapi.json", self._show_document, public=True), Ask("/docs", self._show_page, public=True)]

    async def _show_document(self, exchange: Exchange) -> None:
        document, _ = await self._pages()
        await exchange.send_body(200, document)

    async def _show_page(self, exchange: Exchange) -> None:
        _, page = await self._pages()
        await exchange.send_page(200, HEADERS, page)

    async def _pages(self) -> tuple[bytes, bytes]:
        """Both, made in a thread: it takes a tenth of a second."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)

    def _make(self) -> tuple[bytes, bytes]:
        document = openapi_document(self._described)
        return msgspec.json.encode(document), render(document)
