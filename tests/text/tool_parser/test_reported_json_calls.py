"""Calls in JSON as people's models have written them: ids, arguments and objects in other forms than the format's own."""

import json

import pytest

from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.tools import Tools


def tool(name, *required, **properties):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"function": {"name": name, "parameters": {**schema, "required": list(required)}}}


TOOLS = Tools.from_objects(
    [
        tool("run", "command", command="string", timeout="integer"),
        tool("weather", "city", city="string", unit="string"),
        tool("read_file", "path", path="string"),
        tool("read_file_1", "path", "line", path="string", line="integer"),
    ]
)


def kimi(call_id, arguments):
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("call_id", "arguments", "name", "whole_id"),
    [
        ("functions.run:5", '{"command": "ls"}', "run", "functions.run:5"),
        ("functionsrun5", '{"command": "ls"}', "run", "functions.run:5"),
        ("functions.run5", '{"command": "ls"}', "run", "functions.run:5"),
        ("functions_weather_1", '{"city": "Rome"}', "weather", "functions.weather:1"),
        ("functions_read_file_3", '{"path": "a"}', "read_file", "functions.read_file:3"),
        ("functions.read_file_1:3", '{"path": "a", "line": 1}', "read_file_1", "functions.read_file_1:3"),
        ("run:0", '{"command": "ls"}', "run", "functions.run:0"),
        ("weather", '{"city": "Rome"}', "weather", "functions.weather:0"),
        ("3", '{"city": "Rome"}', "weather", "functions.weather:3"),
        ("0 ", '{"command": "ls", "timeout": 1}', "run", "functions.run:0"),
        ("call00003", '{"city": "Rome"}', "weather", "functions.weather:3"),
        ("call_abc123", '{"name": "run", "command": "ls"}', "run", "functions.run:123"),
        ("functions.other:2", "{}", "other", "functions.other:2"),
        ("functions_other_2", "{}", "other", "functions.other:2"),
    ],
)
def test_kimis_ids_are_read_with_the_tools_on_offer(call_id, arguments, name, whole_id, parse_every_way):
    parsed = parse_every_way(ParserOptions(tool_parser="kimi_k2", tools=TOOLS), kimi(call_id, arguments))
    (call,) = parsed.tool_calls
    assert (call.name, call.id, parsed.text) == (name, whole_id, "")
    assert json.loads(call.arguments) == {key: value for key, value in json.loads(arguments).items() if key != "name"}


@pytest.mark.parametrize(
    ("call_id", "name"), [("functions_read_file_3", "read_file"), ("functionsrun5", "run"), ("a.b:1", "a.b")]
)
def test_kimis_ids_are_read_without_tools(call_id, name, parse_every_way):
    assert parse_every_way(ParserOptions(tool_parser="kimi_k2"), kimi(call_id, "{}")).tool_calls[0].name == name


def test_a_number_alone_names_the_only_tool_there_is(parse_every_way):
    tools = Tools.from_objects([tool("run", command="string")])
    assert (
        parse_every_way(ParserOptions(tool_parser="kimi_k2", tools=tools), kimi("7", '{"x": 1}')).tool_calls[0].name
        == "run"
    )


def test_kimis_section_may_be_in_the_singular(parse_every_way):
    output = f"A<|tool_call_section_begin|>{kimi('functions.run:0', '{}')}<|tool_call_section_end|>"
    parsed = parse_every_way(ParserOptions(tool_parser="kimi_k2", reasoning_parser="kimi_k2", tools=TOOLS), output)
    assert (parsed.text, [call.name for call in parsed.tool_calls]) == ("A", ["run"])


# (family, output, text, [(tool, decoded arguments)])
EXAMPLES = [
    # Llama: a call on each line, and parameters in a string.
    (
        "llama3_json",
        '{"name": "run", "parameters": {"command": "ls"}}\n{"name": "weather", "parameters": {"city": "Rome"}}\n\nDone.',
        "Done.",
        [("run", {"command": "ls"}), ("weather", {"city": "Rome"})],
    ),
    (
        "llama3_json",
        '{"name": "run", "parameters": "{\\"command\\": \\"ls\\"}"}',
        "",
        [("run", {"command": "ls"})],
    ),
    (
        "llama3_json",
        '<|python_tag|>[{"name": "run", "parameters": {"command": "ls"}}, {"name": "any", "parameters": {}}]<|eom_id|>',
        "",
        [("run", {"command": "ls"}), ("any", {})],
    ),
    (
        "llama3_json",
        '{"name": "run", "parameters": {"command": "ls\n{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [("run", {"command": "ls"}), ("weather", {"city": "Rome"})],
    ),
    ("llama3_json", '{"name": "run", "parameters": "ls"}', '{"name": "run", "parameters": "ls"}', []),
    # OpenAI's own form of a call.
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call> So',
        "So",
        [("f", {"a": 1})],
    ),
    (
        "granite",
        '<|tool_call|>[{"function": {"name": "f", "arguments": "{}"}}, {"function": "g", "arguments": {"a": 1}}]',
        "",
        [("f", {}), ("g", {"a": 1})],
    ),
    # Nothing is an empty object.
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "null"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>', "", [("f", {})]),
    ("kimi_k2", kimi("functions.f:0", ""), "", [("f", {})]),
    ("kimi_k2", kimi("functions.f:0", "null"), "", [("f", {})]),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", "", [("f", {})]),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜>",
        "",
        [("f", {})],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]""', "", [("f", {})]),
    ("mistral", "[TOOL_CALLS]f[ARGS][TOOL_CALLS]g[ARGS]{}", "", [("f", {}), ("g", {})]),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>null<|call|>", "", [("f", {})]),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": ""}]<|END_ACTION|>', "", [("f", {})]),
    # Arguments encoded twice, or more often.
    *(
        (family, output.replace("ARGUMENTS", json.dumps(json.dumps({"a": 'é\n"q"'}))), "", [("f", {"a": 'é\n"q"'})])
        for family, output in (
            ("kimi_k2", kimi("functions.f:0", "ARGUMENTS")),
            ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>ARGUMENTS<|call|>"),
            ("mistral", "[TOOL_CALLS]f[ARGS]ARGUMENTS"),
            ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"),
            ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"),
            ("hermes", '<tool_call>{"arguments": ARGUMENTS, "name": "f"}</tool_call>'),
            ("llama3_json", '<|python_tag|>{"name": "f", "parameters": ARGUMENTS}'),
        )
    ),
    ("kimi_k2", kimi("functions.f:0", json.dumps(json.dumps(json.dumps({"a": 1})))), "", [("f", {"a": 1})]),
    # Cohere: one action as an object, and the tags around an answer.
    ("cohere", '<|START_ACTION|>{"tool_name": "f", "parameters": {"a": 1}}<|END_ACTION|>', "", [("f", {"a": 1})]),
    ("cohere", "<|START_RESPONSE|>Hi there<|END_RESPONSE|>", "Hi there", []),
    # gpt-oss without a part of its header.
    ("gpt_oss", '<|channel|>commentary to=functions.f <|constrain|>json{"a": 1}<|call|>', "", [("f", {"a": 1})]),
    ("gpt_oss", '<|channel|>commentary to=functions.f <|mesage|>{"a": 1}<|call|>', "", [("f", {"a": 1})]),
    (
        "gpt_oss",
        '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|channel|>final<|message|>Hi<|return|>',
        "Hi",
        [("f", {"a": 1})],
    ),
    # Gemma 4.
    (
        "gemma4",
        'Hm.<|tool_call>call:f{k:<|"|>v "x" {<|"|>,n:-3,b:true,o:{a:<|"|>1<|"|>},l:[1,<|"|>z<|"|>],e:{}}<tool_call|>'
        "<|tool_call>call:my.g-1{}<tool_call|>",
        "Hm.",
        [("f", {"k": 'v "x" {', "n": -3, "b": True, "o": {"a": "1"}, "l": [1, "z"], "e": {}}), ("my.g-1", {})],
    ),
    ("gemma4", '<|tool_call>call:f{q:weather in Tokyo<|"|>}<tool_call|>', "", [("f", {"q": "weather in Tokyo"})]),
    ("gemma4", '<|tool_call>call:f{q:Paris, France<|"|>,n:5}<tool_call|>', "", [("f", {"q": "Paris, France", "n": 5})]),
    (
        "gemma4",
        '<|tool_call>call:f{code:<|"|>sql(<|"|><|"|><|"|> x <|"|><|"|><|"|>).df()<|"|>,r:[<|"|>d<|"|>]}<tool_call|>',
        "",
        [("f", {"code": 'sql(""" x """).df()', "r": ["d"]})],
    ),
    ("gemma4", '<|tool_call>call:f(a=<|"|>x<|"|>, b=2)<tool_call|> ok', "ok", [("f", {"a": "x", "b": 2})]),
    ("gemma4", "<|tool_call>:f{}<tool_call|>", "", [("f", {})]),
    (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>x<tool_call|><|tool_call>call:g{b:1}<tool_call|>',
        "",
        [("f", {"a": "x"}), ("g", {"b": 1})],
    ),
    ("gemma4", '<|tool_call>call:f{"a": "b, c"}<tool_call|>', "", [("f", {"a": "b, c"})]),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), EXAMPLES)
def test_calls_in_other_forms_are_found(family, output, text, calls, parse_every_way):
    tools = TOOLS if family == "llama3_json" else Tools()
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=tools), output)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls
    assert parsed.text == text
