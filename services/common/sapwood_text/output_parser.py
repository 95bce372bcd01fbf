"""Reasoning, then tool calls: the parsers of one output, put together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sapwood_common.errors import InvalidArgumentError
from sapwood_text.incremental.events import Event, TextDelta
from sapwood_text.incremental.parser import Emitter, Parser, Script, ScriptParser
from sapwood_text.incremental.source import Source, Steps
from sapwood_text.reasoning_parser.base import MAX_PROSE
from sapwood_text.reasoning_parser.registry import GPT_OSS, reasoning_family
from sapwood_text.tool_parser.base import ToolFamily
from sapwood_text.tool_parser.registry import tool_family
from sapwood_text.tool_parser.tools import Tools

_NO_TOOLS = Tools()


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Which parsers an output goes through.

    Attributes:
        tool_parser: A name of ``tool_parser.registry``; "" leaves calls in the text.
        reasoning_parser: A name of ``reasoning_parser.registry``; "" leaves reasoning in the text.
        reasoning_open: Whether the output begins inside the reasoning; None is the family's habit.
        tools: The tools on offer.
        id_seed: The ids of calls that the model does not name are a function of this and the call's index, so an output
            parsed again gets the same ids.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    reasoning_open: bool | None = None
    tools: Tools = _NO_TOOLS
    id_seed: str = ""


class OutputParser:
    """Implements ``Parser`` for one whole output, reasoning and tool calls together.

    gpt-oss writes reasoning and calls in one format: naming it for either parses both.

    Args:
        options: Which parsers.

    Raises:
        InvalidArgumentError: There is no such parser, or gpt_oss is combined with another. The field is "tool_parser" or
            "reasoning_parser".
    """

    def __init__(self, options: ParserOptions) -> None:
        tool = options.tool_parser
        reasoning = options.reasoning_parser
        if GPT_OSS in (tool, reasoning):
            if tool not in ("", GPT_OSS):
                raise InvalidArgumentError(f"reasoning parser {GPT_OSS} does not go with {tool}", field="tool_parser")
            if reasoning not in ("", GPT_OSS):
                raise InvalidArgumentError(
                    f"tool parser {GPT_OSS} does not go with {reasoning}", field="reasoning_parser"
                )
            tool, reasoning = GPT_OSS, ""
        self._may_reason = bool(reasoning) or tool == GPT_OSS
        special_tokens: frozenset[str] = frozenset()
        openings: set[str] = set()
        self._reasoning: Parser | None = None
        self._tool: Parser | None = None
        self._strays: _TextFilter | None = None
        calls = tool_family(tool) if tool else None
        if calls:
            special_tokens |= calls.special_tokens
            openings.update(opener[0] for opener in calls.openers)
            self._tool = _tool_parser(calls, options, Emitter(partial(calls.make_id, options.id_seed)))
        if reasoning:
            reasons = reasoning_family(reasoning)
            special_tokens |= reasons.special_tokens
            openings.update(tag[0] for tag in reasons.answer_tags)
            drafts = _ToolDrafts(calls, options) if calls and calls.openers else None
            self._reasoning = ScriptParser(reasons.script(options.reasoning_open, drafts), Emitter(None))
            self._strays = _TextFilter(reasons.strays())
        self._special_tokens = special_tokens
        self._openings = frozenset(openings.union(mark[0] for mark in special_tokens))

    @property
    def special_tokens(self) -> frozenset[str]:
        """Markers that the text must hold even where special tokens are left out of it."""
        return self._special_tokens

    @property
    def may_reason(self) -> bool:
        """Whether some of the output may be reasoning."""
        return self._may_reason

    @property
    def openings(self) -> frozenset[str]:
        """The first characters of all marks around reasoning: text without them is all reasoning, or none of it is."""
        return self._openings

    def feed(self, text: str) -> list[Event]:
        if self._reasoning and self._strays:
            return self._strays.feed(self._parse_answer(self._reasoning.feed(text)))
        if self._tool:
            return self._tool.feed(text)
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        events = self._parse_answer(self._reasoning.finish()) if self._reasoning else []
        if self._tool:
            events += self._tool.finish()
        return self._strays.feed(events) + self._strays.finish() if self._strays else events

    def _parse_answer(self, events: list[Event]) -> list[Event]:
        """Have the tool parser read the text that the reasoning parser found."""
        if not self._tool:
            return events
        parsed: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                parsed += self._tool.feed(event.text)
            else:
                parsed.append(event)
        return parsed


def _tool_parser(family: ToolFamily, options: ParserOptions, emitter: Emitter) -> Parser:
    def script(source: Source, out: Emitter) -> Steps[None]:
        return family.script(source, out, options.tools)

    return ScriptParser(script, emitter)


class _ToolDrafts:
    """Implements ``DraftedCalls`` with a tool parser."""

    def __init__(self, family: ToolFamily, options: ParserOptions) -> None:
        self._family = family
        self._options = options

    @property
    def openers(self) -> tuple[str, ...]:
        return self._family.openers

    def begin(self) -> _ToolDraft:
        emitter = Emitter(partial(self._family.make_id, ""))
        return _ToolDraft(_tool_parser(self._family, self._options, emitter), emitter)


class _ToolDraft:
    """Implements ``Draft``."""

    def __init__(self, parser: Parser, emitter: Emitter) -> None:
        self._parser = parser
        self._emitter = emitter
        self._prose = 0

    def feed(self, piece: str) -> None:
        self._count(self._parser.feed(piece))

    def is_prose(self) -> bool:
        return self._prose > (MAX_PROSE if self._emitter.calls else 0)

    def is_call(self) -> bool:
        self._count(self._parser.finish())
        return self._emitter.whole_calls > 0 and not self.is_prose()

    def _count(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self._prose += len(event.text) if self._emitter.calls else 1


class _TextFilter:
    """Sends the text of an output through a script.

    Args:
        script: It begins again after a call.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._parser: Parser | None = None

    def feed(self, events: list[Event]) -> list[Event]:
        """The events with the text as the script leaves it."""
        filtered: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._parser = self._parser or ScriptParser(self._script, Emitter(None))
                filtered += self._parser.feed(event.text)
            else:
                filtered += self.finish()
                filtered.append(event)
        return filtered

    def finish(self) -> list[Event]:
        """What was held back."""
        parser, self._parser = self._parser, None
        return parser.finish() if parser else []
