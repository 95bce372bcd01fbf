"""A JSON schema, checked for what the grammar engine would let through or never end.

Formats of dates and times are made strict (``formats``), and two faults are found, each by a walk over the schema, O(its size)
a round:

- A schema that no finite text satisfies (an object that requires itself). Least fixed point: a schema is finite once every
  part it requires is; rounds until nothing changes, at most the length of the longest chain of references.
- ``minProperties`` above the number of required properties where names are free: a grammar cannot tell that a name came
  twice, and JSON parsers keep one of the two.

Everything else that cannot be enforced (``uniqueItems``, ``not``, ``if``, ...) the engine itself refuses by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sapwood_common.grammar.formats import PATTERNS
from sapwood_common.grammar.source import GrammarOptions

# One space, or a new line with an indent: what people and printers write. Left free, a small model fills pages with blanks.
_WHITESPACE = r" |\r?\n[ \t]{0,32}"
_MANY_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


class GrammarError(ValueError):
    """The grammar is malformed, cannot be enforced or needs too much work; the message is for its author."""


def to_engine_schema(text: str, options: GrammarOptions) -> str:
    """The schema as the engine takes it, on one line of JSON, with the options inside.

    Raises:
        GrammarError: It is not JSON, no schema, or one that cannot be satisfied or enforced.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise GrammarError("the schema is nested too deep") from error
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if schema is False:
        raise GrammarError("the schema is false: nothing matches it")
    if not isinstance(schema, dict):
        raise GrammarError("a schema is a JSON object or a boolean")
    try:
        _check_finite(schema)
        if not options.lenient:
            _check_distinct_names(schema)
        tighten_formats(schema)
        settings: dict[str, Any] = {"lenient": options.lenient}
        if options.any_whitespace:
            settings["whitespace_pattern"] = _WHITESPACE
        else:
            settings["whitespace_flexible"] = False
        return json.dumps({**schema, "x-guidance": settings}, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise GrammarError("the schema is nested too deep") from error
    except ValueError as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"the schema holds a number out of range: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _MANY_SCHEMAS:
        parts = schema.get(key)
        if isinstance(parts, list):
            yield from parts
    for key in _MAPPED_SCHEMAS:
        named = schema.get(key)
        if isinstance(named, dict):
            yield from named.values()
    for key in _ONE_SCHEMA:
        part = schema.get(key)
        yield from part if isinstance(part, list) else (part,)


def all_schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Every schema object below ``root`` or referred to, ``root`` first, each once."""
    found, seen = [root], {id(root)}
    for schema in found:  # grows while it is walked
        for part in (*_subschemas(schema), _resolve(schema.get("$ref"), root)):
            if isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return found


def tighten_formats(root: dict[str, Any]) -> None:
    """Writes an expression in place of each format of dates and times."""
    for schema in all_schemas(root):
        pattern = PATTERNS.get(str(schema.get("format")))
        if pattern is None:
            continue
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*_list(schema, "allOf"), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern


def _check_distinct_names(root: dict[str, Any]) -> None:
    for schema in all_schemas(root):
        least = schema.get("minProperties", 0)
        required = schema.get("required", ())
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        free = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
        if isinstance(least, int) and least > max(1, named) and free:
            raise GrammarError(
                f'"minProperties": {least} cannot be enforced where names are free (a name may come twice); require '
                'properties by name, or set "additionalProperties": false'
            )


def _check_finite(root: dict[str, Any]) -> None:
    schemas = all_schemas(root)
    finite: set[int] = set()
    changed = True
    while changed:
        changed = False
        for schema in reversed(schemas):  # parts come after what holds them: one round does it without references
            if id(schema) not in finite and _is_finite(schema, root, finite):
                finite.add(id(schema))
                changed = True
    if id(root) not in finite:
        raise GrammarError("the schema cannot be satisfied: every text that matches it would have no end")


def _is_finite(schema: dict[str, Any], root: dict[str, Any], finite: set[int]) -> bool:
    def done(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    if "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and not done(_resolve(schema["$ref"], root)):
        return False
    if not all(done(part) for part in _list(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _list(schema, key)
        if parts and not any(done(part) for part in parts):
            return False
    types = schema.get("type", ["null"])
    kinds = types if isinstance(types, list) else [types]
    if not set(map(str, kinds)) <= {"object", "array"}:
        return True  # a scalar will do
    return any(_object_ends(schema, done) if kind == "object" else _array_ends(schema, done) for kind in kinds)


def _object_ends(schema: dict[str, Any], done: Any) -> bool:
    properties = schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    rest = schema.get("additionalProperties", True)
    required = schema.get("required")
    needed = [named.get(name, rest) for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return all(done(part) for part in needed)


def _array_ends(schema: dict[str, Any], done: Any) -> bool:
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return True
    first = _list(schema, "prefixItems")
    return all(done(part) for part in first[:least]) and (least <= len(first) or done(schema.get("items", True)))


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _resolve(reference: Any, root: dict[str, Any]) -> Any:
    """What a ``#/...`` pointer names; True (anything) where it cannot be followed: the engine then says why."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name, True)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return True
    return target
