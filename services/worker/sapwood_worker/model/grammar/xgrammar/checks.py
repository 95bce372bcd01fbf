"""What xgrammar lets through that a grammar forbids: refused by name, as it would only log a warning, or ignore it.

Found by generating at random from the schemas of ``tests/fixtures/json_schemas`` and validating what came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sapwood_common.grammar.json_schema import GrammarError, all_schemas, relax, tighten_formats
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.grammar.structural_tag import format_of

_SAYS_NOTHING = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$defs", "definitions")
)
_NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    "boolean": frozenset(),
    "null": frozenset(),
}
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_BESIDE = {"enum": {"type"}, "const": {"type"}}
_COUNT_AT_GROUPS_END = re.compile(r"\}\)[?*+{]")
"""The library makes ``(a[0-9]{1,3})?`` to ``(a?[0-9]{1,3})?`` inside a string of JSON."""
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_OF_MANY = re.compile(r'(?<!\\)\.|\\[DWSsntrfv\\]|\\[xu0]|"')
_ESCAPED_IN_JSON = ['"', "\\", *map(chr, range(32))]
_TEXTS = ("begin", "end", "value", "separator")


def checked_schema(text: str, *, lenient: bool, step: int = 0) -> str:
    """The schema, a JSON text, with formats of dates and times and lengths of strings as expressions.

    Args:
        text: The schema.
        lenient: Whether what cannot be enforced is to be ignored.
        step: How much is left out of a lenient schema, as ``json_schema.relax`` says.

    Raises:
        GrammarError: Something in it would not be enforced; its keyword is named.
    """
    root = json.loads(text)
    if not isinstance(root, dict):
        return text
    if lenient and step:
        root, _ = relax(root, step, lambda pattern: "any expression may be at fault")
    tighten_formats(root)
    if not lenient:
        for schema in all_schemas(root):
            _check(schema)
    for schema in all_schemas(root):
        _bound_by_pattern(schema)
    return json.dumps(root, ensure_ascii=False)


def _check(schema: dict[str, Any]) -> None:
    keys = {
        key for key in schema if key not in _SAYS_NOTHING and not key.startswith(("$schema", "$id", "$comment", "x-"))
    }
    for whole in _WHOLE:
        if whole in keys:
            _refuse(keys - {whole} - _BESIDE.get(whole, set()), f"beside {whole}")
            if whole == "allOf" and len(schema["allOf"]) > 1:
                raise _not_enforced("allOf of several schemas")
            return
    named = schema.get("type", _implied(keys))
    types = named if isinstance(named, list) else [named]
    allowed = frozenset[str]().union(*(_OF_TYPE.get(str(each), frozenset()) for each in types))
    _refuse(keys - allowed - {"type"}, f"in a schema of type {named}" if named else "without a type")
    if "pattern" in keys and keys & {"minLength", "maxLength"}:
        raise _not_enforced("minLength and maxLength beside pattern")
    _check_pattern(str(schema.get("pattern", "")))
    undeclared = set(schema.get("required", ())) - set(schema.get("properties", ()))
    if undeclared:
        raise _not_enforced(f"required {sorted(undeclared)[0]!r}, which is none of the properties")


def _check_pattern(pattern: str) -> None:
    """Raises GrammarError unless the library keeps to the pattern and to JSON, where some characters must be escaped."""
    if _COUNT_AT_GROUPS_END.search(pattern):
        raise _not_enforced("a pattern that repeats a group which ends with a counted repetition")
    classes = [re.compile(each) for each in _CLASS.findall(pattern)]
    if _OF_MANY.search(_CLASS.sub("", pattern)) or any(
        each.match(text) for each in classes for text in _ESCAPED_IN_JSON
    ):
        raise _not_enforced("a pattern that matches quotes, backslashes or control characters, which JSON escapes")


def _bound_by_pattern(schema: dict[str, Any]) -> None:
    """Writes the bounds of a string's length as an expression: the library's own lets control characters through."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    if "pattern" not in schema and (least or most is not None):
        bounds = f"{int(least or 0)},{'' if most is None else int(most)}"
        schema["pattern"] = rf'^[^"\\\x00-\x1f]{{{bounds}}}$'
        schema.pop("minLength", None)
        schema.pop("maxLength", None)


def _implied(keys: set[str]) -> str | None:
    """The type that the library assumes for a schema without a type."""
    if "properties" in keys or "additionalProperties" in keys:
        return "object"
    return "array" if keys & {"items", "prefixItems"} else None


def _refuse(keys: set[str], where: str) -> None:
    if keys:
        raise _not_enforced(f"{sorted(keys)[0]} {where}")


def _not_enforced(what: str) -> GrammarError:
    return GrammarError(f"the grammar backend xgrammar does not enforce {what}")


def checked_tag(source: GrammarSource, special_names: Sequence[str], step: int = 0) -> str:
    """A structural tag as the library reads it, JSON; ``step`` as for :func:`checked_schema`.

    Raises:
        GrammarError: Something in it would not be enforced.
    """
    node = format_of(json.loads(source.text))
    return json.dumps({"type": "structural_tag", "format": _checked_node(node, source, special_names, step)})


def _checked_node(node: Any, source: GrammarSource, special_names: Sequence[str], step: int) -> Any:
    if isinstance(node, list):
        return [_checked_node(each, source, special_names, step) for each in node]
    if not isinstance(node, dict):
        return node
    for text in (*(node.get(key) for key in _TEXTS), *node.get("triggers", ())):
        special = next((name for name in special_names if isinstance(text, str) and name in text), None)
        if special is not None:
            raise GrammarError(
                f"the grammar backend xgrammar cannot have the special token {special!r} in a structural tag"
            )
    result = {
        key: _checked_node(value, source, special_names, step) for key, value in node.items() if key != "json_schema"
    }
    if "json_schema" in node:
        lenient = node.get("lenient", source.options.lenient) is True
        result["json_schema"] = json.loads(checked_schema(json.dumps(node["json_schema"]), lenient=lenient, step=step))
        result.pop("lenient", None)
        result.pop("field", None)
    return result
