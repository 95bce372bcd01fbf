"""How each family of models writes calls: the counterpart of ``tool_parser``, where the formats are described."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sapwood_tokenizer.grammar.formats import (
    ANYTHING,
    Format,
    either,
    pattern,
    repeated,
    sequence,
    tag,
    text,
    triggered,
)
from sapwood_tokenizer.grammar.offered_tool import OfferedTool
from sapwood_tokenizer.grammar.tagged_arguments import arguments_of, keywords, tagged

MakeTags = Callable[[Sequence[OfferedTool], bool], list[Format]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    Attributes:
        tags: Makes the alternatives for a call from (tools, parallel).
        trigger: The literal that begins each call where text may stand before it; "" where calls are not marked.
        not_call: Where calls are not marked: a regular expression for text that cannot be taken for a call.
        answer_head: What the model writes before an answer that is not a call.
        separator: Stands between two calls.
        markers: Literals that must be text, or special tokens whose names a grammar can spell: ``<...>``.
        many: Whether several calls may follow each other.
    """

    tags: MakeTags
    trigger: str = ""
    not_call: str = ""
    answer_head: str = ""
    separator: str = ""
    markers: tuple[str, ...] = ()
    many: bool = True

    def required(self, tools: Sequence[OfferedTool], *, parallel: bool) -> Format:
        """The format of outputs that must be calls."""
        single = not (parallel and self.many)
        return repeated(self.tags(tools, parallel), self.separator, least=True, single=single)

    def offered(self, tools: Sequence[OfferedTool], *, parallel: bool) -> Format:
        """The format of outputs that may hold text and calls."""
        tags = self.tags(tools, parallel)
        if self.trigger:
            return triggered(self.trigger, tags, single=not (parallel and self.many))
        free = pattern(self.not_call) if self.not_call else ANYTHING
        return either([self.required(tools, parallel=parallel), self.answer(free)])

    def answer(self, content: Format) -> Format:
        """The format of an answer that is not a call."""
        return sequence(text(self.answer_head), content) if self.answer_head else content


def _object(name_key: str, arguments_key: str, tool: OfferedTool, before: str = "", after: str = "") -> Format:
    begin = f'{before}{{"{name_key}": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments_key}": '
    return _json_call(begin, tool, "}" + after)


def _json_call(begin: str, tool: OfferedTool, end: str = "") -> Format:
    """A call whose arguments are JSON."""
    return tag(begin, tool.arguments, end)


def _section(begin: str, calls: Sequence[Format], end: str, parallel: bool, separator: str = "") -> Format:
    """Calls in a bracket of their own: one, or several where they may be parallel."""
    return tag(begin, repeated(calls, separator, least=True, single=not parallel), end)


def _hermes(tools: Sequence[OfferedTool], _parallel: bool) -> list[Format]:
    return [_object("name", "arguments", tool, "<tool_call>\n", "\n</tool_call>") for tool in tools]


def _llama(tools: Sequence[OfferedTool], _parallel: bool) -> list[Format]:
    return [_object("name", "parameters", tool) for tool in tools]


def _mistral(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [_object("name", "arguments", tool) for tool in tools]
    return [_section("[TOOL_CALLS][", calls, "]", parallel, ", ")]


def _granite(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [_object("name", "arguments", tool) for tool in tools]
    return [_section("<|tool_call|>[", calls, "]", parallel, ", ")]


def _cohere(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [
        tag(
            '    {"tool_call_id": "',
            sequence(
                pattern("[0-9]{1,4}"),
                text(f'", "tool_name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": '),
                tool.arguments,
            ),
            "}",
        )
        for tool in tools
    ]
    return [_section("<|START_ACTION|>[\n", calls, "]<|END_ACTION|>", parallel, ",\n")]


def _deepseek_v3(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [
        _json_call(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool.name}\n```json\n", tool, "\n```<｜tool▁call▁end｜>"
        )
        for tool in tools
    ]
    return [_section("<｜tool▁calls▁begin｜>", calls, "<｜tool▁calls▁end｜>", parallel, "\n")]


def _deepseek_v31(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [
        _json_call(f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>", tool, "<｜tool▁call▁end｜>") for tool in tools
    ]
    return [_section("<｜tool▁calls▁begin｜>", calls, "<｜tool▁calls▁end｜>", parallel)]


def _deepseek_v32(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = []
    for tool in tools:
        arguments = tagged(
            arguments_of(tool),
            lambda argument: (
                f'<｜DSML｜parameter name="{argument.name}" string="{"false" if argument.is_string is False else "true"}">'
            ),
            "</｜DSML｜parameter>\n",
        )
        calls.append(tag(f'<｜DSML｜invoke name="{tool.name}">\n', arguments, "</｜DSML｜invoke>\n"))
    return [_section("<｜DSML｜function_calls>\n", calls, "</｜DSML｜function_calls>", parallel)]


def _minimax_m2(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [
        tag(
            f'<invoke name="{tool.name}">\n',
            tagged(arguments_of(tool), lambda argument: f'<parameter name="{argument.name}">', "</parameter>\n"),
            "</invoke>\n",
        )
        for tool in tools
    ]
    return [_section("<minimax:tool_call>\n", calls, "</minimax:tool_call>", parallel)]


def _kimi_k2(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [
        tag(
            f"<|tool_call_begin|>functions.{tool.name}:",
            sequence(pattern("[0-9]{1,4}"), text("<|tool_call_argument_begin|>"), tool.arguments),
            "<|tool_call_end|>",
        )
        for tool in tools
    ]
    return [_section("<|tool_calls_section_begin|>", calls, "<|tool_calls_section_end|>", parallel)]


def _glm45(tools: Sequence[OfferedTool], _parallel: bool) -> list[Format]:
    return [
        tag(
            f"<tool_call>{tool.name}\n",
            tagged(
                arguments_of(tool),
                lambda argument: f"<arg_key>{argument.name}</arg_key>\n<arg_value>",
                "</arg_value>\n",
            ),
            "</tool_call>",
        )
        for tool in tools
    ]


def _qwen3_coder(tools: Sequence[OfferedTool], _parallel: bool) -> list[Format]:
    return [
        tag(
            f"<tool_call>\n<function={tool.name}>\n",
            tagged(
                arguments_of(tool),
                lambda argument: f"<parameter={argument.name}>\n",
                "\n</parameter>\n",
            ),
            "</function>\n</tool_call>",
        )
        for tool in tools
    ]


def _pythonic(tools: Sequence[OfferedTool], parallel: bool) -> list[Format]:
    calls = [tag(f"{tool.name}(", keywords(arguments_of(tool)), ")") for tool in tools]
    return [_section("[", calls, "]", parallel, ", ")]


def _gemma4(tools: Sequence[OfferedTool], _parallel: bool) -> list[Format]:
    return [
        tag(
            f"<|tool_call>call:{tool.name}{{",
            keywords(arguments_of(tool), equals=":", separator=",", quote='<|"|>'),
            "}<tool_call|>",
        )
        for tool in tools
    ]


def _gpt_oss(tools: Sequence[OfferedTool], _parallel: bool) -> list[Format]:
    # The model ends a call with <|call|>, one of its end tokens: where nothing may follow, generation ends.
    return [
        _json_call(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>", tool)
        for tool in tools
    ]


FINAL = "<|channel|>final<|message|>"
"""The header of gpt-oss's answers."""

GENERIC = CallFormat(_llama, not_call=r"([^{\s](?s:.*))?", separator="; ")
"""Calls as JSON objects, which ``llama3_json`` reads."""
GENERIC_PARSER = "llama3_json"

_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_V3 = CallFormat(_deepseek_v3, trigger=_DEEPSEEK_MARKERS[0], markers=_DEEPSEEK_MARKERS, many=False)
_FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(_hermes, trigger="<tool_call>", separator="\n", markers=("<tool_call>", "</tool_call>")),
        "llama3_json": GENERIC,
        "mistral": CallFormat(_mistral, trigger="[TOOL_CALLS]", markers=("[TOOL_CALLS]",), many=False),
        "granite": CallFormat(_granite, trigger="<|tool_call|>", markers=("<|tool_call|>",), many=False),
        "cohere": CallFormat(
            _cohere, trigger="<|START_ACTION|>", markers=("<|START_ACTION|>", "<|END_ACTION|>"), many=False
        ),
        "deepseek": CallFormat(_deepseek_v31, trigger=_DEEPSEEK_MARKERS[0], markers=_DEEPSEEK_MARKERS, many=False),
        "deepseek_v32": CallFormat(
            _deepseek_v32, trigger="<｜DSML｜function_calls>", markers=("｜DSML｜",), many=False
        ),
        "minimax_m2": CallFormat(_minimax_m2, trigger="<minimax:tool_call>", many=False),
        "kimi_k2": CallFormat(_kimi_k2, trigger="<|tool_calls_section_begin|>", many=False),
        "glm45": CallFormat(_glm45, trigger="<tool_call>", separator="\n"),
        "qwen3_coder": CallFormat(_qwen3_coder, trigger="<tool_call>", separator="\n"),
        "pythonic": CallFormat(_pythonic, not_call=r"([^\[\s](?s:.*))?", many=False),
        "gemma4": CallFormat(_gemma4, trigger="<|tool_call>", markers=("<|tool_call>", "<tool_call|>", '<|"|>')),
        "gpt_oss": CallFormat(_gpt_oss, answer_head=FINAL, many=False),
    }
)


def call_format(tool_parser: str, template: str, special_names: frozenset[str]) -> tuple[CallFormat, str]:
    """How calls are written that a parser reads, and that parser.

    A format with a special token whose name no grammar can spell (Mistral's ``[TOOL_CALLS]``) and the empty name get JSON
    objects, ``{"name": "f", "parameters": {...}}``, and the parser that reads those.

    Args:
        tool_parser: A name in ``tool_parser.registry``, or "".
        template: The model's chat template, which tells DeepSeek's two forms apart.
        special_names: The special tokens' names.
    """
    found = _FORMATS.get(tool_parser)
    if tool_parser == "deepseek" and "```json" in template:
        found = _DEEPSEEK_V3
    if found is None or any(not name.startswith("<") and name in special_names for name in found.markers):
        return GENERIC, GENERIC_PARSER
    return found, tool_parser
