"""Structural tags: free text in which certain beginnings switch to structured parts.

Two spellings are read, both in use by callers of SGLang and vLLM:

- ``{"triggers": [...], "structures": [{"begin", "schema", "end"}]}``: text is free until a trigger appears, then one of the
  structures that begin with it must follow; then text is free again.
- ``{"format": ...}``, where a format is one of ``const_string`` (value), ``json_schema`` (json_schema; lenient if other
  than the whole grammar's; field: what errors of it name), ``regex`` (pattern),
  ``grammar`` (grammar, EBNF), ``any_text``, ``sequence`` and ``or`` (elements), ``tag`` (begin, content, end),
  ``triggered_tags`` (triggers, tags, at_least_one, stop_after_first) and ``tags_with_separator`` (tags, separator,
  at_least_one, stop_after_first).

Each becomes a rule of the engine's Lark syntax. A special token's name inside a literal (``<|python_tag|>``) stands for the
token itself, as no text can spell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.lark import lark_of_ebnf, literal, regex
from sapwood_common.grammar.source import GrammarOptions

SchemaText = Callable[[Any, GrammarOptions, str], str]
"""Writes a parsed schema in the engine's form; the last argument is the schema's field."""

_ANY = "(?s:.*)"
_MOST_DEPTH = 32


def lark_of_structural_tag(
    text: str, options: GrammarOptions, special_names: Sequence[str], schema_text: SchemaText
) -> str:
    """The tag as a Lark grammar whose start rule is ``start``.

    Args:
        text: The structural tag, JSON.
        options: For the JSON schemas in it.
        special_names: Names of the special tokens.
        schema_text: Writes the JSON schemas in it.

    Raises:
        GrammarError: It is malformed; the message says where.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the structural tag is not JSON: {error}") from error
    if not isinstance(tag, dict):
        raise GrammarError("a structural tag is a JSON object")
    writer = _Writer(options, special_names, schema_text)
    start = writer.format(format_of(tag), "format", 0)
    return "\n".join((f"start: {start}", *writer.rules))


def format_of(tag: dict[str, Any]) -> Any:
    """The format that a structural tag means, in whichever spelling.

    Raises:
        GrammarError: It is in neither.
    """
    if "format" in tag:
        return tag["format"]
    if "structures" not in tag or "triggers" not in tag:
        raise GrammarError('a structural tag has "format", or "structures" and "triggers"')
    tags = [
        {
            "begin": item.get("begin"),
            "content": {"type": "json_schema", "json_schema": item.get("schema", True)},
            "end": item.get("end", ""),
        }
        for item in _objects(tag["structures"], "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Writer:
    """Collects rules; each method returns an expression that refers to them."""

    def __init__(self, options: GrammarOptions, special_names: Sequence[str], schema_text: SchemaText) -> None:
        self._options = options
        self._schema_text = schema_text
        names = sorted(special_names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._count = 0
        self.rules: list[str] = []

    def format(self, node: Any, path: str, depth: int) -> str:
        """The expression of a format."""
        if depth > _MOST_DEPTH:
            raise GrammarError(f"{path} is nested too deep")
        if not isinstance(node, dict):
            raise GrammarError(f"{path} must be a JSON object")
        match node.get("type"):
            case "const_string":
                return self._literal(_string(node, "value", path))
            case "json_schema":
                options = self._options
                if "lenient" in node:
                    options = replace(options, lenient=node["lenient"] is True)
                schema = self._schema_text(node.get("json_schema", True), options, str(node.get("field", "")))
                return self._rule(f"%json {schema}")
            case "regex":
                return regex(_string(node, "pattern", path))
            case "grammar":
                return self._nested(lark_of_ebnf(_string(node, "grammar", path)))
            case "any_text":
                return f"/{_ANY}/"
            case "sequence":
                return self._sequence(node, path, depth)
            case "or":
                parts = _objects(node.get("elements"), f"{path}.elements")
                found = (self.format(part, f"{path}.elements[{i}]", depth + 1) for i, part in enumerate(parts))
                return "(" + " | ".join(found) + ")"
            case "tag":
                return self._tag(node, path, depth, skip=0)
            case "triggered_tags":
                return self._triggered(node, path, depth)
            case "tags_with_separator":
                return self._separated(node, path, depth)
            case other:
                raise GrammarError(f"{path}.type is {other!r}, which is not supported")

    def _sequence(self, node: dict[str, Any], path: str, depth: int) -> str:
        parts = _objects(node.get("elements"), f"{path}.elements")
        return " ".join(self.format(part, f"{path}.elements[{i}]", depth + 1) for i, part in enumerate(parts))

    def _tag(self, node: dict[str, Any], path: str, depth: int, skip: int) -> str:
        """A tag without the first ``skip`` characters of its beginning, which its trigger has written."""
        begin = _string(node, "begin", path)[skip:]
        end = node.get("end", "")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(item, str) for item in ends):
            raise GrammarError(f"{path}.end must be a string or a list of strings")
        content = node.get("content")
        free = isinstance(content, dict) and content.get("type") == "any_text"
        special_end = any(self._special is not None and self._special.search(item) for item in ends)
        if free and any(ends) and not special_end:
            closing = "|".join(_escape(item) for item in ends)
            middle = self._rule(f"/{_ANY}({closing})/", lazy=True)  # lazy: it stops at the first end
        else:
            closing = " | ".join(self._literal(item) for item in ends)
            middle = f"{self.format(content, f'{path}.content', depth + 1)} ({closing})"
        return f"{self._literal(begin)} {middle}" if begin else middle

    def _triggered(self, node: dict[str, Any], path: str, depth: int) -> str:
        triggers = node.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise GrammarError(f"{path}.triggers must be a list of strings that are not empty")
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(_objects(node.get("tags"), f"{path}.tags")):
            begin = _string(tag, "begin", f"{path}.tags[{i}]")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"{path}.tags[{i}].begin starts with none of the triggers")
            bodies[trigger].append(self._tag(tag, f"{path}.tags[{i}]", depth + 1, skip=len(trigger)))
        alternatives = [
            f"{self._head(trigger)} ({' | '.join(body)})" for trigger, body in bodies.items() if body
        ]  # a trigger that no tag begins with binds nothing
        if not alternatives:
            raise GrammarError(f"{path}.tags is empty")
        tags = self._rule(" | ".join(alternatives))
        if node.get("stop_after_first"):
            return tags if node.get("at_least_one") else f"({tags} | /{_ANY}/)"
        return f"{tags}{'+' if node.get('at_least_one') else '*'} /{_ANY}/"

    def _head(self, trigger: str) -> str:
        """Free text up to a trigger and the trigger."""
        if self._special is not None and self._special.search(trigger):
            return f"/{_ANY}/ {self._literal(trigger)}"
        return self._rule(f"/{_ANY}{_escape(trigger)}/", lazy=True)

    def _separated(self, node: dict[str, Any], path: str, depth: int) -> str:
        tags = _objects(node.get("tags"), f"{path}.tags")
        if not tags:
            raise GrammarError(f"{path}.tags is empty")
        bodies = [self._tag(tag, f"{path}.tags[{i}]", depth + 1, skip=0) for i, tag in enumerate(tags)]
        one = self._rule(" | ".join(bodies))
        separator = node.get("separator", "")
        if not isinstance(separator, str):
            raise GrammarError(f"{path}.separator must be a string")
        more = "" if node.get("stop_after_first") else f" ({self._literal(separator)} {one})*"
        return f"({one}{more})" if node.get("at_least_one") else f"({one}{more})?"

    def _literal(self, text: str) -> str:
        """A literal; special tokens in it are themselves."""
        if self._special is None:
            return literal(text)
        parts: list[str] = []
        start = 0
        for found in self._special.finditer(text):
            if found.start() > start:
                parts.append(literal(text[start : found.start()]))
            parts.append(found.group() if _is_tag(found.group()) else _refuse_name(found.group()))
            start = found.end()
        if start < len(text) or not parts:
            parts.append(literal(text[start:]))
        return " ".join(parts)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{self._count}"
        self._count += 1
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _nested(self, lark: str) -> str:
        """An inner grammar: its rules are renamed so that no other grammar has the same names."""
        prefix = self._count
        self._count += 1
        names = set(re.findall(r"^([A-Za-z_][\w-]*)\s*:", lark, re.MULTILINE))
        token = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|//[^\n]*|[A-Za-z_][\w-]*')

        def rename(found: re.Match[str]) -> str:
            word = found.group()
            if word not in names:
                return word
            return f"NESTED_{prefix}_{word}" if word.isupper() else f"nested_{prefix}_{word}"

        self.rules.append(token.sub(rename, re.sub(r"^%llguidance.*$", "", lark, flags=re.MULTILINE)))
        return f"nested_{prefix}_start"


def _is_tag(name: str) -> bool:
    return name.startswith("<") and name.endswith(">") and len(name) > 2


def _refuse_name(name: str) -> str:
    raise GrammarError(f"the special token {name!r} cannot be part of a structural tag")


def _escape(text: str) -> str:
    """A literal inside a regular expression of the Lark syntax."""
    return regex(re.escape(text))[1:-1] if text else ""


def _string(node: dict[str, Any], key: str, path: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise GrammarError(f"{path}.{key} must be a string")
    return value


def _objects(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise GrammarError(f"{path} must be a list of JSON objects")
    return value
