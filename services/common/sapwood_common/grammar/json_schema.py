"""A JSON schema, checked for what the grammar engine would let through or never end.

Formats of dates and times are made strict, exclusive bounds of numbers are written so that the engine keeps them
(``_keep_exclusive``), and two faults are found, each in time O(size of the schema):

- A schema that no finite text satisfies (an object that requires itself). Least fixed point of an and-or graph: a schema is
  finite once every part it requires is; each node counts the parts that it still waits for (``_check_finite``).
- ``minProperties`` above the number of required properties where names are free: a grammar cannot tell that a name came
  twice, and JSON parsers keep one of the two.

Everything else that cannot be enforced (``uniqueItems``, ``not``, ``if``, ...) the engine itself refuses by name.

A lenient schema never fails for what cannot be enforced. ``relax`` leaves out what the engine refuses, in steps: first only the
keywords that are malformed or fail alone, in the end all but the type.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard
from urllib.parse import unquote

from sapwood_common.grammar.source import GrammarOptions

# One space, or a new line with an indent: what people and printers write. Left free, a small model fills pages with blanks.
_WHITESPACE = r" |\r?\n[ \t]{0,32}"
_MANY_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPPED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_ONE_SCHEMA = frozenset(
    {"items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems"}
    | {"not", "if", "then", "else", "contains", "propertyNames"}
)
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_EXPRESSIONS = ("pattern", "patternProperties", "propertyNames", "format")
_BESIDES = ("not", "if", "then", "else", "contains", "dependentSchemas", "dependentRequired", "uniqueItems", "allOf")
_PLAIN = frozenset(
    {*_MANY_SCHEMAS, "properties", "$defs", "definitions", "items", "additionalProperties", "type", "enum"}
)
_PLAIN |= {"const", "required", "$ref"}
_LARGEST_COUNT = 1_000_000
_LARGEST_NUMBER = 1e15
_NEXT_TO = 1e-9
"""How far from an exclusive whole bound the engine's own bound is put, where it would not keep the whole one."""
STEPS = 4
"""How many steps of ``relax`` there are."""


class GrammarError(ValueError):
    """The grammar is malformed, cannot be enforced or needs too much work; the message is for its author.

    Args:
        message: What is wrong.
        field: The part of the request at fault, if it is known.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def to_engine_schema(text: str, options: GrammarOptions) -> str:
    """The schema as the engine takes it, on one line of JSON, with the options inside.

    Raises:
        GrammarError: It is not JSON, no schema, or one that cannot be satisfied or enforced.
    """
    return engine_schema(parse_schema(text), options)


def parse_schema(text: str) -> Any:
    """The value of a JSON text. Raises GrammarError if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise GrammarError("the schema is nested too deep") from error
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error


def engine_schema(schema: Any, options: GrammarOptions) -> str:
    """As :func:`to_engine_schema`, of a parsed schema, which is changed."""
    if schema is True:
        schema = {}
    if schema is False:
        raise GrammarError("the schema is false: nothing matches it")
    if not isinstance(schema, dict):
        raise GrammarError("a schema is a JSON object or a boolean")
    try:
        schemas = all_schemas(schema)
        _check_finite(schema, schemas)
        if not options.lenient:
            _check_distinct_names(schemas)
        _keep_exclusive(schemas)
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


def relax(root: Any, step: int, check_pattern: Callable[[str], str]) -> tuple[Any, list[str]]:
    """A schema without the keywords that cannot be enforced, and the names of these keywords. Changes ``root``.

    Args:
        root: A parsed schema.
        step: 1: what is malformed, and expressions and bounds that fail alone. 2: all expressions and bounds. 3: all but types,
            values, properties and items. 4: all but the type.
        check_pattern: Says what is wrong with a regular expression; "" if nothing.
    """
    if not isinstance(root, dict):
        return root, []
    left_out: dict[str, None] = {}
    checked: dict[str, str] = {}

    def wrong(pattern: Any) -> str:
        if not isinstance(pattern, str):
            return "not a string"
        if pattern not in checked:
            checked[pattern] = check_pattern(pattern)
        return checked[pattern]

    if step >= STEPS:
        kinds = root.get("type", "object" if "properties" in root else None)
        return ({} if kinds is None else {"type": kinds}), ["all but the type"]
    for schema in all_schemas(root):
        for key in [key for key, value in schema.items() if _fails(key, value, step, wrong, root)]:
            shown = f'"{key}": {json.dumps(schema[key])[:60]}' if key == "pattern" else f'"{key}"'
            left_out[shown] = None
            del schema[key]
        _mend(schema, left_out)
    return root, list(left_out)


def _fails(key: str, value: Any, step: int, wrong: Callable[[Any], str], root: dict[str, Any]) -> bool:
    """Whether a keyword is left out."""
    if step >= 3 and key not in _PLAIN and not key.startswith("x-"):
        return True
    if step >= 2 and key in (*_EXPRESSIONS, *_BESIDES, *_NUMBERS, *_COUNTS):
        return True
    match key:
        case "pattern":
            return bool(wrong(value))
        case "patternProperties":
            return not isinstance(value, dict) or any(map(wrong, value))
        case "multipleOf":
            return not _is_number(value) or not 1e-6 <= value <= 1e6
        case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(value, bool):
            return False
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return not _is_number(value) or abs(value) > _LARGEST_NUMBER
        case "minProperties" | "maxProperties":
            return True  # kept, the engine refuses it where names are free
        case "format" | "$schema" | "$id":
            return not isinstance(value, str)
        case "$ref":
            return not isinstance(value, str) or not value.startswith("#") or _resolve(value, root, None) is None
        case "enum" | "anyOf" | "oneOf" | "allOf":
            return not isinstance(value, list) or not value
        case "required" | "prefixItems":
            return not isinstance(value, list)
        case "properties" | "$defs" | "definitions" | "dependentSchemas":
            return not isinstance(value, dict)
    return key in _COUNTS and (not _is_number(value) or not 0 <= value <= _LARGEST_COUNT or value % 1 != 0)


def _mend(schema: dict[str, Any], left_out: dict[str, None]) -> None:
    """Takes out of a schema's lists and maps what does not belong there."""
    kinds = schema.get("type")
    if kinds is not None:
        known = ["null" if kind is None else kind for kind in (kinds if isinstance(kinds, list) else [kinds])]
        known = [kind for kind in known if isinstance(kind, str) and kind in _TYPES]
        if not known:
            left_out[f'"type": {json.dumps(kinds)[:60]}'] = None
            del schema["type"]
        else:
            schema["type"] = known if isinstance(kinds, list) else known[0]
    for key in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):
        if key in schema:
            schema[key] = {name: part if isinstance(part, dict | bool) else {} for name, part in schema[key].items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in schema:
            schema[key] = [part if isinstance(part, dict | bool) else {} for part in schema[key]]
    for key in _ONE_SCHEMA:
        if key in schema and not isinstance(schema[key], dict | bool | list):
            left_out[f'"{key}"'] = None
            del schema[key]
    if "required" in schema:
        schema["required"] = [name for name in schema["required"] if isinstance(name, str)]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _keep_exclusive(schemas: list[dict[str, Any]]) -> None:
    """Writes exclusive bounds that the engine would not keep as bounds next to them.

    The engine lets a number be an exclusive whole bound if another bound is less than 1 away (0 for ``0 < x < 0.5``). Bounds of
    several schemas may apply to one number (``allOf``, ``$ref``), so all bounds of the document count as each other's.
    Draft 4's ``"exclusiveMinimum": true`` becomes the number.
    """
    for schema in schemas:
        for key, other in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(schema.get(key), bool):
                exclusive = schema.pop(key)
                if exclusive and other in schema:
                    schema[key] = schema.pop(other)
    bounds = sorted({schema[key] for schema in schemas for key in _NUMBERS[:4] if _is_number(schema.get(key))})
    for schema in schemas:
        for key, step in (("exclusiveMinimum", _NEXT_TO), ("exclusiveMaximum", -_NEXT_TO)):
            bound = schema.get(key)
            if not _is_number(bound) or bound % 1 != 0 or abs(bound) > _LARGEST_NUMBER:
                continue
            at = bisect.bisect_left(bounds, bound)
            near = [other for other in bounds[max(0, at - 1) : at + 2] if 0 < abs(other - bound) < 1]
            if near:
                schema[key] = bound + step


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if isinstance(value, list):
            if key in _MANY_SCHEMAS or key in _ONE_SCHEMA:
                yield from value
        elif isinstance(value, dict):
            if key in _MAPPED_SCHEMAS:
                yield from value.values()
            elif key in _ONE_SCHEMA:
                yield value


def all_schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Every schema object below ``root`` or referred to, ``root`` first, each once."""
    found, seen = [root], {id(root)}
    for schema in found:  # grows while it is walked
        parts = [*_subschemas(schema)]
        if "$ref" in schema:
            parts.append(_resolve(schema["$ref"], root, True))
        for part in parts:
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


def _check_distinct_names(schemas: list[dict[str, Any]]) -> None:
    for schema in schemas:
        least = schema.get("minProperties", 0)
        required = schema.get("required", ())
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        free = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
        if isinstance(least, int) and least > max(1, named) and free:
            raise GrammarError(
                f'"minProperties": {least} cannot be enforced where names are free (a name may come twice); require '
                'properties by name, or set "additionalProperties": false'
            )


class _Conditions:
    """An and-or graph. A node is done when it waits for nothing more; ``all`` of or ``any`` of other nodes."""

    def __init__(self, count: int) -> None:
        self.missing = [0] * count
        """What each node still waits for."""
        self._users: list[list[int]] = [[] for _ in range(count)]

    def needs_all(self, node: int, parts: list[int]) -> None:
        """The node waits for each of the parts, too."""
        self.missing[node] += len(parts)
        for part in parts:
            self._users[part].append(node)

    def needs_any(self, node: int, choices: list[list[int]]) -> None:
        """The node waits for one of the choices, too: for all parts of one."""
        if not all(choices):
            return  # one waits for nothing
        either = self._add(1)
        self.needs_all(node, [either])
        for parts in choices:
            one = parts[0]
            if len(parts) > 1:
                one = self._add(0)
                self.needs_all(one, parts)
            self._users[one].append(either)

    def solve(self) -> list[bool]:
        """Which nodes are done in the end. O(nodes and parts)."""
        done = [missing == 0 for missing in self.missing]
        ready = [node for node, is_done in enumerate(done) if is_done]
        for node in ready:  # grows while it is walked
            for user in self._users[node]:
                self.missing[user] -= 1
                if self.missing[user] <= 0 and not done[user]:
                    done[user] = True
                    ready.append(user)
        return done

    def _add(self, missing: int) -> int:
        self.missing.append(missing)
        self._users.append([])
        return len(self.missing) - 1


def _check_finite(root: dict[str, Any], schemas: list[dict[str, Any]]) -> None:
    numbers = {id(schema): number for number, schema in enumerate(schemas)}
    graph = _Conditions(len(schemas))

    def nodes(parts: list[Any]) -> list[int]:
        """The nodes of those that may be endless: schemas, not booleans."""
        return [numbers[id(part)] for part in parts if isinstance(part, dict)]

    for node, schema in enumerate(schemas):
        if "enum" in schema or "const" in schema:
            continue
        if "$ref" in schema:
            graph.needs_all(node, nodes([_resolve(schema["$ref"], root, True)]))
        graph.needs_all(node, nodes(_list(schema, "allOf")))
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema, key):
                graph.needs_any(node, [nodes([part]) for part in parts])
        types = schema.get("type", ["null"])
        kinds = [str(kind) for kind in (types if isinstance(types, list) else [types])]
        if kinds and set(kinds) <= {"object", "array"}:  # else a scalar will do
            parts_of = {"object": _needed_of_object, "array": _needed_of_array}
            graph.needs_any(node, [nodes(parts_of[kind](schema)) for kind in dict.fromkeys(kinds)])
    if not graph.solve()[0]:
        raise GrammarError("the schema cannot be satisfied: every text that matches it would have no end")


def _needed_of_object(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the properties that an object must have."""
    properties = schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    rest = schema.get("additionalProperties", True)
    required = schema.get("required")
    names = dict.fromkeys(name for name in required if isinstance(name, str)) if isinstance(required, list) else {}
    return [named.get(name, rest) for name in names]


def _needed_of_array(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the items that an array must have."""
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return []
    first = _list(schema, "prefixItems")
    return first[:least] + ([schema.get("items", True)] if least > len(first) else [])


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _resolve(reference: Any, root: dict[str, Any], otherwise: Any) -> Any:
    """The schema at a ``#/...`` pointer; ``otherwise`` if it cannot be followed; the engine then reports the reason."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return otherwise
    target: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name, otherwise)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return otherwise
    return target


# Expressions for the formats of dates and times, stricter than the engine's own, which admits leap seconds and February 29ths
# that never were, and the year 0 (RFC 3339; Gregorian calendar).
_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_YEAR = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](|\.[0-9]{{1,9}})(Z|[+-]{_CLOCK})"

PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""A regular expression for the whole text of each format."""
