"""Reasoning, then tool calls: the parsers of one output, put together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.events import Event, TextDelta
from sapwood_tokenizer.output.incremental.parser import Parser, ScriptParser
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.reasoning_parser.registry import GPT_OSS, reasoning_family
from sapwood_tokenizer.output.tool_parser.registry import tool_family
from sapwood_tokenizer.output.tool_parser.tools import Tools

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
        self._reasoning: Parser | None = None
        self._tool: Parser | None = None
        if reasoning:
            reasons = reasoning_family(reasoning)
            special_tokens |= reasons.special_tokens
            self._reasoning = ScriptParser(reasons.script(options.reasoning_open), Emitter(None))
        if tool:
            calls = tool_family(tool)
            special_tokens |= calls.special_tokens

            def script(source: Source, out: Emitter) -> Steps[None]:
                return calls.script(source, out, options.tools)

            self._tool = ScriptParser(script, Emitter(partial(calls.make_id, options.id_seed)))
        self._special_tokens = special_tokens

    @property
    def special_tokens(self) -> frozenset[str]:
        """Markers that the text must hold even where special tokens are left out of it."""
        return self._special_tokens

    @property
    def may_reason(self) -> bool:
        """Whether some of the output may be reasoning."""
        return self._may_reason

    def feed(self, text: str) -> list[Event]:
        if self._reasoning:
            return self._parse_answer(self._reasoning.feed(text))
        if self._tool:
            return self._tool.feed(text)
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        events = self._parse_answer(self._reasoning.finish()) if self._reasoning else []
        if self._tool:
            events += self._tool.finish()
        return events

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
