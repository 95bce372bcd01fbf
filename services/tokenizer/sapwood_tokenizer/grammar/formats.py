"""The structural-tag formats (``sapwood_common.grammar.structural_tag``) that output grammars are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Format = dict[str, Any]


def text(value: str) -> Format:
    """Exactly this."""
    return {"type": "const_string", "value": value}


def json_value(schema: Any, lenient: bool | None = None, field: str = "") -> Format:
    """JSON that a schema admits; ``lenient`` if other than the whole grammar's; ``field`` is what errors of it name."""
    value: Format = {"type": "json_schema", "json_schema": schema}
    if lenient is not None:
        value["lenient"] = lenient
    if field:
        value["field"] = field
    return value


def pattern(expression: str) -> Format:
    """Text that a regular expression matches."""
    return {"type": "regex", "pattern": expression}


ANYTHING: Format = {"type": "any_text"}
"""Any text; in a tag, up to its end."""


def sequence(*parts: Format) -> Format:
    """One after the other."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(parts: Sequence[Format]) -> Format:
    """One of them."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Format) -> Format:
    """A part or nothing."""
    return {"type": "or", "elements": [part, text("")]}


def tag(begin: str, content: Format, end: str = "") -> Format:
    """Content between two literals."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def repeated(tags: Sequence[Format], separator: str, *, least: bool, single: bool = False) -> Format:
    """Tags with a separator between them: at least one if ``least``, at most one if ``single``."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": least,
        "stop_after_first": single,
    }


def triggered(trigger: str, tags: Sequence[Format], *, single: bool) -> Format:
    """Free text in which ``trigger`` begins one of the tags; ends after the first if ``single``."""
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), "stop_after_first": single}
