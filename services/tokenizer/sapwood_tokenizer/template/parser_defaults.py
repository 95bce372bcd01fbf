"""Chooses the parsers that fit the model that is served."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_common.errors import ConfigError
from sapwood_text.reasoning_parser import registry as reasoning_registry
from sapwood_text.tool_parser import registry as tool_registry

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class ParserDefaults:
    """Names of parsers; "" where none fits."""

    tool_parser: str
    reasoning_parser: str


def parser_defaults(tool_parser: str, reasoning_parser: str, template: str | None) -> ParserDefaults:
    """The parsers as configured: "auto" asks the chat template, "none" is none.

    Args:
        tool_parser: The value of ``--tool-parser``.
        reasoning_parser: The value of ``--reasoning-parser``.
        template: The model's chat template, if it has one.

    Raises:
        ConfigError: There is no such parser. The message names the flag.
    """
    return ParserDefaults(
        _chosen("--tool-parser", tool_parser, tool_registry.names(), tool_registry.detect_tool_parser(template or "")),
        _chosen(
            "--reasoning-parser",
            reasoning_parser,
            reasoning_registry.NAMES,
            reasoning_registry.detect_reasoning_parser(template or ""),
        ),
    )


def _chosen(flag: str, name: str, names: tuple[str, ...], detected: str) -> str:
    if name == AUTO:
        return detected
    if name == NONE:
        return ""
    if name not in names:
        raise ConfigError(f"{flag}: no parser {name!r}; there are {', '.join((AUTO, NONE, *names))}")
    return name
