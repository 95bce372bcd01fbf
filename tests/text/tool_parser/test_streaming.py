"""What is certain is released at once, and what is held back is bounded."""

import pytest

from sapwood_text.incremental.events import TextDelta, ToolCallArguments, ToolCallStart, merge
from sapwood_text.incremental.source import Markers, Source
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.tool_parser.registry import NAMES
from sapwood_text.tool_parser.tools import Tools

ARGUMENTS = '{"city": "a \\"b\\" {c}", "list": [1, {"x": null}], "end": true}'

# (family, what comes before the arguments, what comes after them)
JSON_FAMILIES = [
    ("hermes", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
    ("llama3_json", '{"name": "f", "parameters": ', "}"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": ', "}]"),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": ', "}]<|END_ACTION|>"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
]


@pytest.mark.parametrize(("family", "before", "after"), JSON_FAMILIES)
def test_string_arguments_are_released_character_by_character(family, before, after):
    parser = OutputParser(ParserOptions(tool_parser=family))
    events = parser.feed(before + '{"city": ')
    for end in range(len(ARGUMENTS) - len('{"city": ') + 1):
        read = '{"city": ' + ARGUMENTS[len('{"city": ') :][:end]
        so_far = merge(events).tool_calls[0].arguments
        # A key is released with the beginning of its value, an escape whole, a word when it ends.
        assert read.startswith(so_far)
        if read.startswith('{"city": "') and read[-1] not in "\\" and not read.startswith('{"city": "a \\"b\\" {c}",'):
            assert so_far == read
        events += parser.feed(ARGUMENTS[len('{"city": ') :][end : end + 1])
    events += parser.feed(after) + parser.finish()
    assert merge(events).tool_calls[0].arguments == ARGUMENTS
    assert merge(events).text == ""


def test_a_call_starts_as_soon_as_its_name_is_known():
    parser = OutputParser(ParserOptions(tool_parser="hermes"))
    assert parser.feed('Hi <tool_call>{"name": "f') == [TextDelta("Hi")]
    (start,) = parser.feed('"')
    assert isinstance(start, ToolCallStart) and (start.index, start.name) == (0, "f")


def test_string_arguments_of_tagged_families_are_streamed():
    tools = Tools.from_objects([{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}])
    parser = OutputParser(ParserOptions(tool_parser="glm45", tools=tools))
    parser.feed("<tool_call>f<arg_key>x</arg_key><arg_value>")
    assert parser.feed("123 ") == [ToolCallArguments(0, '{"x": "123 ')]
    assert parser.feed("</arg_va") == []
    assert parser.feed("X>") == [ToolCallArguments(0, "</arg_vaX>")]
    assert parser.feed("</arg_value>") == []
    assert parser.feed("</tool_call>") == [ToolCallArguments(0, '"}')]


@pytest.mark.parametrize("family", NAMES)
def test_plain_text_is_released_at_once(family):
    parser = OutputParser(ParserOptions(tool_parser=family))
    for word in ("Plain", " text,", " in", " pieces"):
        assert parser.feed(word) == [TextDelta(word)]
    assert parser.finish() == []


@pytest.mark.parametrize("family", NAMES)
def test_text_that_might_begin_a_marker_waits(family):
    for marker in sorted(OutputParser(ParserOptions(tool_parser=family)).special_tokens):
        parser = OutputParser(ParserOptions(tool_parser=family))
        released = merge(parser.feed("a" + marker[:-1])).text
        rest = merge(parser.feed("!") + parser.finish()).text
        assert released + rest == "a" + marker[:-1] + "!"


def test_white_space_before_a_possible_call_waits_but_only_so_much():
    parser = OutputParser(ParserOptions(tool_parser="hermes"))
    assert parser.feed("a \n") == [TextDelta("a")]
    assert parser.feed("b") == [TextDelta(" \nb")]
    released = merge(parser.feed("\n" * 1000)).text
    assert len(released) == 1000 - 256
    assert merge(parser.feed('<tool_call>{"name": "f"}')).text == ""


def test_nothing_is_reported_twice_for_an_empty_piece():
    parser = OutputParser(ParserOptions(tool_parser="hermes", reasoning_parser="qwen3"))
    assert parser.feed("") == []
    assert OutputParser(ParserOptions()).feed("") == []


def test_without_parsers_text_passes_unchanged():
    parser = OutputParser(ParserOptions())
    assert parser.feed(" <tool_call> <think> ") == [TextDelta(" <tool_call> <think> ")]
    assert parser.finish() == []
    assert parser.special_tokens == frozenset()


def test_markers_hold_back_only_what_may_be_their_beginning():
    markers = Markers("<tool_call>", "[TOOL")
    assert markers.held("abc<tool", 0) == 5
    assert markers.held("abc<tool", 4) == 0
    assert markers.held("abc<tool_call!", 0) == 0
    assert markers.held("<[", 0) == 1


def test_the_source_tells_a_waiting_reader_the_end():
    source = Source()
    steps = source.peek(3)
    next(steps)
    source.feed("ab")
    next(steps)
    source.close()
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == "ab"
