"""Hand-written outputs of the families whose arguments are turned into JSON, and what they mean, however they are cut."""

import json

import pytest

from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.tools import Tools

# (family, output, text, [(tool, decoded arguments)])
EXAMPLES = [
    ("pythonic", '[weather(city="Rome", days=3)]', "", [("weather", {"city": "Rome", "days": 3})]),
    (
        "pythonic",
        "[weather(city='R\\'ome \"x\" \\n\\u00e9', tags=[1, -2.5e3, (True, None,), {}, {'a': False, 1: []},],), now( ) ]",
        "",
        [
            ("weather", {"city": 'R\'ome "x" \né', "tags": [1, -2500.0, [True, None], {}, {"a": False, "1": []}]}),
            ("now", {}),
        ],
    ),
    (
        "pythonic",
        '<|python_start|>[other(x="[now()]", y=")")]<|python_end|>',
        "",
        [("other", {"x": "[now()]", "y": ")"})],
    ),
    ("pythonic", "I will.\n[now()]\nDone <|python_end|>", "I will.\nDone ", [("now", {})]),
    (
        "pythonic",
        '[weather(city="""a"b\n""", note="\\ud83d\\ude00\\U0001F600\\q")]',
        "",
        [("weather", {"city": 'a"b\n', "note": "😀😀\\q"})],
    ),
    (
        "pythonic",
        "[weather(days=1_000, options=0x10, tags=yes, note=007)]",
        "",
        [("weather", {"days": 1000, "options": 16, "tags": "yes", "note": "007"})],
    ),
    ("pythonic", "[other(x=1)]", "[other(x=1)]", []),
    ("pythonic", "[weather] (a list)\n[1, 2]\n- x", "[weather] (a list)\n[1, 2]\n- x", []),
    ("pythonic", '[weather("Rome")]', '[weather("Rome")]', []),
    (
        "glm45",
        '\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New "York"\n</arg_value>\n<arg_key>days</arg_key>\n'
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        [("weather", {"city": 'New "York"\n', "days": 3}), ("now", {})],
    ),
    (
        "glm45",
        "Well <tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value>"
        '<arg_key>tags</arg_key><arg_value>[1, {"a": "</tool_call>"}]'
        "</arg_value></tool_call> so",
        "Well\nso",
        [("weather", {"city": "12", "tags": [1, {"a": "</tool_call>"}]})],
    ),
    (
        "glm45",
        "<tool_call>weather<arg_key>note</arg_key><arg_value>None</arg_value><arg_key>days</arg_key><arg_value>a few</arg_value>"
        "<arg_key>options</arg_key><arg_value>true</arg_value><arg_key>unknown</arg_key><arg_value>text <b>bold</b></arg_value>"
        "<arg_key>tags</arg_key><arg_value></arg_value></tool_call>",
        "",
        [("weather", {"note": None, "days": "a few", "options": True, "unknown": "text <b>bold</b>", "tags": ""})],
    ),
    (
        "glm45",
        "<tool_call>weather<arg_key>note</arg_key><arg_value>12</arg_value></tool_call>",
        "",
        [("weather", {"note": "12"})],
    ),
    ("glm45", '<tool_call>f<arg_key>x</arg_key><arg_value>"q"</arg_value></tool_call>', "", [("f", {"x": "q"})]),
    ("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>NaN</arg_value></tool_call>", "", [("f", {"x": "NaN"})]),
    ("glm45", "the <tool_call> tag", "the <tool_call> tag", []),
    (
        "qwen3_coder",
        "Now.\n<tool_call>\n<function=weather>\n<parameter=city>\n  two\nlines\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Now.",
        [("weather", {"city": "  two\nlines\n", "days": 3}), ("now", {})],
    ),
    (
        "qwen3_coder",
        '<function=weather><parameter=city>if a < b:\n\treturn "</function>"</parameter>'
        '<parameter=options>{"k": [1]}</parameter></function></tool_call>end',
        "end",
        [("weather", {"city": 'if a < b:\n\treturn "</function>"', "options": {"k": [1]}})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", {"city": ""})],
    ),
    ("qwen3_coder", "<tool_call> or <function=> alone", "<tool_call> or <function=> alone", []),
    (
        "minimax_m2",
        'Fine.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">1 < "2"\n</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="tags">[1, "</invoke>"]</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "Fine.",
        [("weather", {"city": '1 < "2"\n', "days": 3, "tags": [1, "</invoke>"]}), ("now", {})],
    ),
    ("minimax_m2", 'an <invoke name="> alone', 'an <invoke name="> alone', []),
    (
        "deepseek_v32",
        'Fine.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">1 < "2"\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">[1, "a"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Fine.",
        [("weather", {"city": '1 < "2"\n', "tags": [1, "a"]}), ("now", {})],
    ),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), EXAMPLES)
def test_calls_and_text_are_found_however_the_output_is_cut(family, output, text, calls, parse_every_way, tools_json):
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=Tools.from_json(tools_json)), output)
    assert parsed.text == text
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "true", "true"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{broken", "{broken"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"enum": ["a", "b"]}, "5", "5"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "x"}, "7", "7"),
        ({"oneOf": [{"type": "string"}, {}]}, "7", 7),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, '["a"]', ["a"]),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        (True, "[1]", [1]),
    ],
)
def test_the_schema_decides_what_an_untyped_value_is(schema, value, expected, parse_every_way):
    tools = Tools.from_objects([{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}])
    output = f"<tool_call>f<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>"
    (call,) = parse_every_way(ParserOptions(tool_parser="glm45", tools=tools), output).tool_calls
    assert json.loads(call.arguments) == {"x": expected}
