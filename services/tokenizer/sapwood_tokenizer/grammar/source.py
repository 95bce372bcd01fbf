"""Combines what a caller wants of an output into one grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_common.grammar.structural_tag import format_of
from sapwood_text.reasoning_parser.registry import GPT_OSS, reasoning_family
from sapwood_tokenizer.grammar.families import FINAL, call_format
from sapwood_tokenizer.grammar.formats import (
    ANYTHING,
    Format,
    either,
    json_value,
    optional,
    pattern,
    repeated,
    sequence,
    tag,
    text,
)
from sapwood_tokenizer.grammar.offered_tool import named, offered_tools


@dataclass(frozen=True, slots=True)
class CallsWanted:
    """Which calls an output may hold; fields as in ``ToolCallGrammar`` of ``tokenizer.proto``."""

    tools: str
    name: str
    required: bool
    parallel: bool
    tool_parser: str


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The facts about a model that decide how it writes.

    Attributes:
        template: Its chat template, "" if it has none.
        special_names: Its special tokens' names.
    """

    template: str
    special_names: frozenset[str]


def output_source(
    answer: GrammarSource | None,
    calls: CallsWanted | None,
    reasoning_parser: str,
    reasoning_open: bool | None,
    model: ModelFormat,
) -> tuple[GrammarSource, str]:
    """The grammar of a whole output, and the parser that finds the calls in it.

    Args:
        answer: What text must match; None, which needs ``calls``: text is free where calls allow any.
        calls: Which calls there may or must be; None: none.
        reasoning_parser: How the model marks reasoning; "": there is none.
        reasoning_open: Whether the output begins inside reasoning.
        model: How the model writes.

    Raises:
        InvalidArgumentError: The tools or the parser are at fault; the field is "tool_calls...", "reasoning_parser" or
            "grammar...".
    """
    parser = ""
    if calls is None:
        assert answer is not None
        if not reasoning_parser:
            return answer, parser
        body = _format_of(answer)
    else:
        body, parser = _with_calls(answer, calls, model)
    in_channel = parser == GPT_OSS  # its formats of calls and answers include the headers
    whole = after_reasoning(body, reasoning_parser, reasoning_open, model.special_names, in_channel=in_channel)
    options = answer.options if answer is not None else GrammarOptions()
    return GrammarSource("structural_tag", json.dumps({"format": whole}, ensure_ascii=False), options), parser


def _with_calls(answer: GrammarSource | None, calls: CallsWanted, model: ModelFormat) -> tuple[Format, str]:
    try:
        tools = offered_tools(calls.tools)
        if calls.name:
            tools = named(tools, calls.name)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.message, field=f"tool_calls.{error.field}") from None
    if not tools:
        raise InvalidArgumentError("no tools are on offer", field="tool_calls.tools")
    written, parser = call_format(calls.tool_parser, model.template, model.special_names)
    if calls.required:
        return written.required(tools, parallel=calls.parallel), parser
    if answer is None:
        return written.offered(tools, parallel=calls.parallel), parser
    return either([written.required(tools, parallel=calls.parallel), written.answer(_format_of(answer))]), parser


def _format_of(source: GrammarSource) -> Format:
    """A grammar as a part of a structural tag.

    Raises:
        InvalidArgumentError: The source is not JSON where it must be.
    """
    match source.kind:
        case "json_schema":
            return json_value(_json(source), field="grammar.json_schema")
        case "regex":
            return pattern(source.text)
        case "ebnf":
            return {"type": "grammar", "grammar": source.text}
        case "structural_tag":
            tag = _json(source)
            try:
                found: Format = format_of(tag if isinstance(tag, dict) else {})
            except GrammarError as error:
                raise InvalidArgumentError(str(error), field="grammar.structural_tag") from None
            return found


def _json(source: GrammarSource) -> Any:
    try:
        return json.loads(source.text)
    except (ValueError, RecursionError) as error:
        field = f"grammar.{source.kind}"
        raise InvalidArgumentError(f"{field} is not JSON: {error}", field=field) from None


_SPACE = r"\s{0,4}"
_ANALYSIS = tag("<|channel|>analysis<|message|>", ANYTHING, "<|end|><|start|>assistant")


def after_reasoning(
    answer: Format, parser: str, reasoning_open: bool | None, special_names: frozenset[str], *, in_channel: bool
) -> Format:
    """The format of an output that may or must hold reasoning before its answer.

    Args:
        answer: The format of what follows the reasoning.
        parser: A name in ``reasoning_parser.registry``, or "".
        reasoning_open: True: the output begins inside reasoning, which it must close. False: there is no reasoning. None: True
            if that is usual for the family; else there may be reasoning.
        special_names: The special tokens' names.
        in_channel: Whether ``answer`` includes gpt-oss's header of its message.

    Raises:
        InvalidArgumentError: There is no such parser, or its marks are special tokens that no grammar can spell. The field
            is "reasoning_parser".
    """
    if not parser:
        return answer
    if parser == GPT_OSS:
        head = [] if in_channel else [text(FINAL)]
        return sequence(repeated([_ANALYSIS], "", least=False), *head, answer)
    family = reasoning_family(parser)
    for mark in (family.opening, family.closing):
        if mark in special_names and not mark.startswith("<"):
            raise InvalidArgumentError(
                f"structured output is not supported after reasoning that ends with {mark}", field="reasoning_parser"
            )
    is_open = reasoning_open
    if is_open is None and family.starts_open:
        is_open = True
    if is_open is False:
        return answer
    rest = sequence(tag("", ANYTHING, family.closing), pattern(_SPACE))
    if is_open:
        return sequence(rest, answer)
    return sequence(optional(sequence(text(family.opening), rest)), answer)
