"""Outputs that are broken or cut short: nothing raises, and what is no call is text."""

import pytest

from sapwood_tokenizer.output.output_parser import ParserOptions
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT
from sapwood_tokenizer.output.tool_parser.tools import Tools

LONG = "x" * (NAME_LIMIT + 1)

# (family, output, text, [(tool, arguments)])
EXAMPLES = [
    # Not a call after all: text, markers included.
    ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": ""}', '<tool_call>{"name": ""}', []),
    ("hermes", f'<tool_call>{{"name": "{LONG}"}}', f'<tool_call>{{"name": "{LONG}"}}', []),
    ("hermes", f'<tool_call>{{"{LONG}": 1}}', f'<tool_call>{{"{LONG}": 1}}', []),
    ("hermes", '<tool_call>{"arguments": {"x": 1}}</tool_call>', '<tool_call>{"arguments": {"x": 1}}</tool_call>', []),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ("deepseek", "<｜tool▁calls▁begin｜>what", "<｜tool▁calls▁begin｜>what", []),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g h", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g h", []),
    ("kimi_k2", "<|tool_call_begin|><|tool_call_end|>", "<|tool_call_begin|><|tool_call_end|>", []),
    ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
    ("granite", '<|tool_call|>{"name": "f"}', '<|tool_call|>{"name": "f"}', []),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>[]<|END_ACTION|>", []),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"x', "", [("f", '{"x')]),
    ("qwen3_coder", "<tool_call>\nf()</tool_call>", "<tool_call>\nf()</tool_call>", []),
    ("pythonic", "[now(]", "[now(]", []),
    ("pythonic", "[now", "[now", []),
    ("llama3_json", '{"name": "now", "parameters": 5}', '{"name": "now", "parameters": 5}', []),
    ("gpt_oss", "<|channel|>a < b", "<|channel|>a < b", []),
    # An opener right after one that came to nothing still counts.
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>?<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "<｜tool▁calls▁begin｜>?",
        [("f", "{}")],
    ),
    # Cut by the token limit before the name was known: text. After that: arguments as far as they came.
    ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ("hermes", '<tool_call>{"name": "f"', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b\\')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\ud8', "", [("f", '{"a": \\ud8')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "now", "parameters": {"a": [1, ', "", [("now", '{"a": [1, ')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a"', "", [("f", '{"a"')]),
    ("mistral", "[TOOL_CALLS]f[ARGS]", "", [("f", "")]),
    ("mistral", "[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "", [("f", "{")]),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a', "", [("f", '{"a')]),
    ("pythonic", '[weather(city="Ro', "", [("weather", '{"city": "Ro')]),
    ("pythonic", "[weather(city=[1, (", "", [("weather", '{"city": [1, [')]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro</arg_", "", [("weather", '{"city": "Ro</arg_')]),
    ("glm45", "<tool_call>weather<arg_key>days</arg_key><arg_value>1", "", [("weather", '{"days": 1')]),
    ("glm45", "<tool_call>weather<arg_key>ci", "ci", [("weather", "")]),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\nRo\n", "", [("weather", '{"city": "Ro')]),
    ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"a": ', "", [("f", '{"a": ')]),
    ("gpt_oss", "<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>comm", "Hi", []),
    # Broken after the call began: the rest of it is text, closing markers are not.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> ok', "} ok", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}</tool_call>', "", [("f", '{"a": [1}')]),
    ("hermes", '<tool_call>{"name": "f" oops}</tool_call>', "oops}", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, x}</tool_call>', ", x}", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call></tool_call>', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"n": 1}] x', ', {"n": 1}] x', [("f", "{}")]),
    ("pythonic", "[now(), 5]", ", 5]", [("now", "{}")]),
    ("pythonic", "[weather(city=<b>)]", "<b>)]", [("weather", '{"city": ')]),
    ("pythonic", "[weather(city={[1]: 2})]", "[1]: 2})]", [("weather", '{"city": {')]),
    ("pythonic", "[weather(days=3, 4)]", ", 4)]", [("weather", '{"days": 3')]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>b</tool_call>", "a</arg_key>b", [("f", "")]),
    # A tool that nobody offered: a call where calls are marked.
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "", [("nobody", "{}")]),
    ("llama3_json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), EXAMPLES)
def test_broken_output_comes_out_as_defined_however_it_is_cut(family, output, text, calls, parse_every_way, tools_json):
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=Tools.from_json(tools_json)), output)
    assert parsed.text == text
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls


@pytest.mark.parametrize("bracket", ["[", "(", "{'a': ", "{"])
def test_deep_nesting_needs_no_stack(bracket, parse, tools_json):
    tools = Tools.from_json(tools_json)
    deep = bracket * 20_000
    python = parse(ParserOptions(tool_parser="pythonic", tools=tools), [f"[weather(options={deep}"])
    assert python.tool_calls[0].name == "weather"
    json = parse(ParserOptions(tool_parser="hermes"), [f'<tool_call>{{"name": "f", "arguments": {{{deep}'])
    assert json.tool_calls[0].arguments == "{" + deep
    glm = parse(
        ParserOptions(tool_parser="glm45"),
        [f"<tool_call>f<arg_key>x</arg_key><arg_value>{deep}</arg_value></tool_call>"],
    )
    assert glm.tool_calls[0].arguments.startswith('{"x": "')
