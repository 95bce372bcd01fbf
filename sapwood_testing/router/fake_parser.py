"""Tool calls and reasoning in a format of the fake tokenizer's own: ``<think>…</think>`` and ``<call NAME>ARGUMENTS</call>``.

All text so far is parsed again for each piece, which takes quadratic time: enough for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_text.incremental.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from sapwood_text.output_parser import ParserOptions

TOOL_PARSER, REASONING_PARSER = "fake_calls", "fake_thoughts"
_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _CALL_END = "<call ", "</call>"


@dataclass(slots=True)
class _Parsed:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    began: bool = False


class FakeParser:
    """Parses one output as its options say; a ``StreamParser``."""

    def __init__(self, options: ParserOptions) -> None:
        self._options = options
        self._written = ""
        self._told = _Parsed()

    @property
    def special_tokens(self) -> frozenset[str]:
        return frozenset()

    @property
    def may_reason(self) -> bool:
        return bool(self._options.reasoning_parser)

    @property
    def openings(self) -> frozenset[str]:
        return frozenset(map(chr, range(128)))  # each token by itself: the marks' count as none

    def feed(self, text: str) -> list[Event]:
        if not self._options.tool_parser and not self._options.reasoning_parser:
            return [TextDelta(text)] if text else []
        self._written += text
        return self._new(self._parse(self._written, ended=False))

    def finish(self) -> list[Event]:
        if not self._options.tool_parser and not self._options.reasoning_parser:
            return []
        return self._new(self._parse(self._written, ended=True))

    def _new(self, parsed: _Parsed) -> list[Event]:
        before_this, self._told = self._told, parsed
        events: list[Event] = []
        if parsed.began and not before_this.began:
            events.append(TextDelta(""))  # the tokens of the mark are no reasoning
        if len(parsed.text) > len(before_this.text):
            events.append(TextDelta(parsed.text[len(before_this.text) :]))
        if len(parsed.reasoning) > len(before_this.reasoning):
            events.append(ReasoningDelta(parsed.reasoning[len(before_this.reasoning) :]))
        for index, (name, arguments) in enumerate(parsed.calls):
            before = ""
            if index >= len(before_this.calls):
                events.append(ToolCallStart(index, name, f"call-{self._options.id_seed}-{index}"))
            else:
                before = before_this.calls[index][1]
            if len(arguments) > len(before):
                events.append(ToolCallArguments(index, arguments[len(before) :]))
        return events

    def _parse(self, written: str, *, ended: bool) -> _Parsed:
        parsed, rest = _Parsed(), written
        if self._options.reasoning_parser:
            if self._options.reasoning_open:
                rest = _OPEN + rest
            elif not ended and _OPEN.startswith(rest):
                parsed.began = rest == _OPEN
                return parsed
            if rest.startswith(_OPEN):
                parsed.began = not self._options.reasoning_open
                parsed.reasoning, rest = _until(_CLOSE, rest.removeprefix(_OPEN), ended)
        if not self._options.tool_parser:
            parsed.text = rest
            return parsed
        while rest:
            text, rest = _until(_CALL, rest, ended)
            parsed.text += text
            name, closed, after = rest.partition(">")
            if not closed:
                break
            arguments, rest = _until(_CALL_END, after, ended)
            parsed.calls.append((name, arguments))
        return parsed


def _until(marker: str, text: str, ended: bool) -> tuple[str, str]:
    """What is certain to stand before a marker, and what follows it."""
    before, found, after = text.partition(marker)
    if found or ended:
        return before, after
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return text[:-size], ""
    return text, ""
