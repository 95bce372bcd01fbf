"""``/docs``: the OpenAPI document as a page that needs no script and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

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
        _operation(method, path, operation, components)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return _PAGE.format(version=escape(document["info"]["version"]), operations="\n".join(operations)).encode()


def _operation(method: str, path: str, operation: dict[str, Any], components: dict[str, Any]) -> str:
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
