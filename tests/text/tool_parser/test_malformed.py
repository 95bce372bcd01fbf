"""Outputs that are broken or cut short: nothing raises, arguments are JSON, and no marker is text."""

import json

import pytest

from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.base import NAME_LIMIT
from sapwood_text.tool_parser.tools import Tools

LONG = "x" * (NAME_LIMIT + 1)

# (family, output, text, [(tool, arguments)])
EXAMPLES = [
    # Text about markers stays as it is.
    ("hermes", "the <tool_call> and </tool_call> tags", "the <tool_call> and </tool_call> tags", []),
    ("hermes", "between `<tool_call>` and `</tool_call>`.", "between `<tool_call>` and `</tool_call>`.", []),
    ("minimax_m2", '<parameter name="a">1</parameter>\n</bean>', '<parameter name="a">1</parameter>\n</bean>', []),
    ("gemma4", "a `<|tool_call>` opens one", "a `<|tool_call>` opens one", []),
    # What opens like a call and is none loses its markers.
    ("hermes", "<tool_call>no json</tool_call>", "no json", []),
    ("glm45", "<tool_call>two words</tool_call>", "two words", []),
    ("qwen3_coder", "<tool_call>\nf()</tool_call>", "\nf()", []),
    ("hermes", "<tool_call>{} is empty</tool_call>", "{} is empty", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '{"name": 5}', []),
    ("hermes", '<tool_call>{"name": ""}', '{"name": ""}', []),
    ("hermes", f'<tool_call>{{"name": "{LONG}"}}', f'{{"name": "{LONG}"}}', []),
    ("hermes", f'<tool_call>{{"{LONG}": 1}}', f'{{"{LONG}": 1}}', []),
    ("hermes", '<tool_call>{"arguments": {"x": 1}} so</tool_call>', '{"arguments": {"x": 1}} so', []),
    ("mistral", "[TOOL_CALLS] none at all", "none at all", []),
    ("mistral", "[TOOL_CALLS][1, 2]", "[1, 2]", []),
    ("deepseek", "<｜tool▁calls▁begin｜>what now", "what now", []),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g h", "fg h", []),
    ("deepseek", "<｜tool▁sep｜> is a tag", " is a tag", []),
    ("kimi_k2", "<|tool_call_begin|><|tool_call_end|>", "", []),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>", "", []),
    ("pythonic", "[now(]", "[now(]", []),
    ("pythonic", "[now", "[now", []),
    ("llama3_json", '{"name": "now", "parameters": 5}', '{"name": "now", "parameters": 5}', []),
    ("llama3_json", "<|python_tag|>print(1)", "print(1)", []),
    ("gpt_oss", "<|channel|>a < b", "a < b", []),
    # An opener right after one that came to nothing still counts.
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("deepseek", "<｜tool▁calls▁begin｜>?<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "", [("f", "{}")]),
    # Cut by the token limit before the name was known: dropped. After that the arguments are closed.
    ("hermes", '<tool_call>{"name": "wea', "", []),
    ("hermes", '<tool_call>{"name": "f"', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\ud8', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b', "", [("f", '{"a": "b"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x", "b": tr', "", [("f", '{"a": "x"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [{"b": -12.', "", [("f", '{"a": [{"b": -12}]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d', "", [("f", '{"a": "\\ufffd"}')]),
    ("llama3_json", '{"name": "now", "parameters": {"a": [1, ', "", [("now", '{"a": [1]}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a"', "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[ARGS]", "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f", "", []),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "", [("f", "{}")]),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a', "", [("f", "{}")]),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"x', "", [("f", "{}")]),
    ("pythonic", '[weather(city="Ro', "", [("weather", '{"city": "Ro"}')]),
    ("pythonic", "[weather(city=[1, (", "", [("weather", '{"city": [1, []]}')]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro</arg_", "", [("weather", '{"city": "Ro"}')]),
    ("glm45", "<tool_call>weather<arg_key>days</arg_key><arg_value>1", "", [("weather", '{"days": 1}')]),
    ("glm45", "<tool_call>weather<arg_key>tags</arg_key><arg_value>[1, {", "", [("weather", '{"tags": [1, {}]}')]),
    ("glm45", "<tool_call>weather<arg_key>ci", "", [("weather", "{}")]),
    ("glm45", "<tool_call>wea", "", []),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\nRo\n", "", [("weather", '{"city": "Ro"}')]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x<|', "", [("f", '{"a":"x<|"}')]),
    ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"a": ', "", [("f", "{}")]),
    ("gpt_oss", "<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>comm", "Hi", []),
    # Broken after the call began: words are text; brackets that are left over, and closing markers, are not.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> ok', "ok", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}</tool_call>', "", [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"name": "f" oops}</tool_call>', "oops}", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, x}</tool_call>', ", x}", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call></tool_call>', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"n": 1}] x', "x", [("f", "{}")]),
    ("pythonic", "[now(), 5]", ", 5]", [("now", "{}")]),
    ("pythonic", "[weather(city={[1]: 2})]", "", [("weather", '{"city": {}}')]),
    ("pythonic", "[weather(days=3, 4)]", "", [("weather", '{"days": 3}')]),
    ("pythonic", "[weather(days=3, now()]", "", [("weather", '{"days": 3}'), ("now", "{}")]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>b</tool_call>", "", [("f", '{"a": "b"}')]),
    # JSON that is nearly right.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\tz"}}', "", [("f", '{"a": "x\\ny\\tz"}')]),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': True, 'b': None}}", "", [("f", '{"a": true, "b": null}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1 "b": 2}}', "", [("f", '{"a": 1, "b": 2}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "C:\\dir"}}', "", [("f", '{"a": "C:\\\\dir"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}', "", [("f", '{"a": "NaN"}')]),
    # A broken call costs no more than itself.
    (
        "pythonic",
        "[weather(city='it\\\n[weather(city='a \"b\" c', days=1)]",
        "",
        [("weather", '{"city": "it"}'), ("weather", '{"city": "a \\"b\\" c", "days": 1}')],
    ),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n`q`<｜tool▁call▁end｜>", "`q`", [("f", "{}")]),
    ("qwen3_coder", "<tool_cal>\n<functio>\n</function>\nso", "<tool_cal>\n<functio>\n\nso", []),
    ("deepseek", "<｜tool▁call▁begin｜>f{}\n`\n`<｜tool▁call▁end｜>", "", [("f", "{}")]),
    ("deepseek", "<｜tool▁call▁begin｜>f x\n`\n`<｜tool▁call▁end｜>", "f x\n`\n`", []),
    ("pythonic", "[weather(city='a\\\n[b]')]", "", [("weather", '{"city": "a[b]"}')]),
    (
        "pythonic",
        "<|python_start|>[weather(city='a<|python_start|>[weather(city='], x')]",
        "",
        [("weather", '{"city": "a"}'), ("weather", '{"city": "], x"}')],
    ),
    (
        "pythonic",
        """[weather(city="it's\n[weather(city='a\\\\b', note="], x")]""",
        "",
        [("weather", '{"city": "it\'s"}'), ("weather", '{"city": "a\\\\b", "note": "], x"}')],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>b<|tool_call>call:f{n:1,a:<|"|>}, c<|"|>}<tool_call|>',
        "",
        [("f", '{"a":"b"}'), ("f", '{"n":1,"a":"}, c"}')],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>b<|tool_call>call:f{a:<|"|>}, c<|"|>}<tool_call|>',
        "",
        [("f", '{"a":"b"}'), ("f", '{"a":"}, c"}')],
    ),
    (
        "llama3_json",
        '{"name": "now"}; {"name" "now"}; {"name": "now", "parameters": {}}',
        '; {"name" "now"}',
        [("now", "{}"), ("now", "{}")],
    ),
    (
        "minimax_m2",
        '<invoke name="now">\n<invoke name="now">\n</invoke>',
        "",
        [("now", "{}")],
    ),
    ("minimax_m2", '<parameter name="a">1</parameter>\n</invoke>\n<invoke name="now"></invoke>', "", [("now", "{}")]),
    ("minimax_m2", '<invoke name="now"></invoke>\n<parameter name="a"', "", [("now", "{}")]),
    ("minimax_m2", 'XML: <parameter name="a"', 'XML: <parameter name="a"', []),
    ("minimax_m2", '<minimax:tool_call>\n<invoke na\nme="f"></invoke>', 'me="f">', []),
    # A tool that nobody offered: a call where calls are marked.
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "", [("nobody", "{}")]),
    ("llama3_json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), EXAMPLES)
def test_broken_output_comes_out_as_defined_however_it_is_cut(family, output, text, calls, parse_every_way, tools_json):
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=Tools.from_json(tools_json)), output)
    assert parsed.text == text
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.tool_calls)


@pytest.mark.parametrize("bracket", ["[", "(", "{'a': ", "{"])
def test_deep_nesting_needs_no_stack(bracket, parse, tools_json):
    tools = Tools.from_json(tools_json)
    deep = bracket * 20_000
    python = parse(ParserOptions(tool_parser="pythonic", tools=tools), [f"[weather(options={deep}"])
    assert python.tool_calls[0].name == "weather"
    hermes = parse(ParserOptions(tool_parser="hermes"), [f'<tool_call>{{"name": "f", "arguments": {{"a": [{deep}'])
    arguments = hermes.tool_calls[0].arguments
    assert arguments.count("[") == arguments.count("]") and arguments.count("{") == arguments.count("}")
    glm = parse(
        ParserOptions(tool_parser="glm45"),
        [f"<tool_call>f<arg_key>x</arg_key><arg_value>{deep}</arg_value></tool_call>"],
    )
    assert glm.tool_calls[0].arguments.startswith('{"x": "')
