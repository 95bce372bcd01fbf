"""The events that parsers of a model's output report. Nobody changes an event; a frozen class would take three times as long to
make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class TextDelta:
    """More of the answer's text. ``text`` is not empty."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of the reasoning. ``text`` is not empty."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A tool call begins. ``index`` counts the calls of one output from 0."""

    index: int
    name: str
    id: str


@dataclass(slots=True)
class ToolCallArguments:
    """More of the JSON text of the arguments of call ``index``. ``fragment`` is not empty."""

    index: int
    fragment: str


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call: ``arguments`` is JSON text as the model wrote it (not checked; cut short if the output was)."""

    name: str
    id: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """All events of one output, put together."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def merge(events: Iterable[Event]) -> ParsedOutput:
    """Put the events of one output together."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for event in events:
        match event:
            case TextDelta():
                text.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCallStart():
                assert event.index == len(calls), "calls are numbered in order"
                calls.append((event, []))
            case ToolCallArguments():
                calls[event.index][1].append(event.fragment)
    return ParsedOutput(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(ToolCall(start.name, start.id, "".join(parts)) for start, parts in calls),
    )
