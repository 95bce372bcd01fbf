"""What an output has to be: text that matches a grammar, calls of tools, or either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sapwood_common.contract.json_text import decode
from sapwood_common.grammar.source import GrammarKind


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What text must match. Fields as in ``Grammar`` of ``common.proto``."""

    kind: GrammarKind
    text: str
    any_whitespace: bool = True
    lenient: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls there must be.

    Attributes:
        required: There must be calls, and nothing else.
        name: The only tool that may be called, exactly once; "" for any.
    """

    required: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar as workers take it.

    Attributes:
        compiled: The grammar.
        tool_parser: Reads the calls in its outputs.
        left_out: What its schemas ask for and it does not enforce.
    """

    compiled: bytes
    tool_parser: str
    left_out: tuple[str, ...] = ()


def has_strict_tool(tools: str) -> bool:
    """Whether a JSON array of tools has one whose schema is to be enforced although no call is."""
    if '"strict"' not in tools:
        return False
    try:
        found: Any = decode(tools)
    except (msgspec.DecodeError, RecursionError):
        return False  # the tokenizer service says what is wrong
    return isinstance(found, list) and any(map(_is_strict, found))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True
