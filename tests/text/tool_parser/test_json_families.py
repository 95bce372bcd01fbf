"""Hand-written outputs of the families whose arguments are JSON, and what they mean, however they are cut."""

import pytest

from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.tools import Tools

NESTED = '{"a": {"b": [1, {"c": "}]"}]}, "d": "\\u00e9\\ud83d\\ude00 \\"q\\" \\\\"}'
MARKED = '{"city": "</tool_call> <tool_call> [TOOL_CALLS] <｜tool▁call▁end｜> <|tool_call_end|> <|call|> ;"}'

# (family, output, text, [(tool, arguments)])
EXAMPLES = [
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "",
        [("weather", '{"city": "Rome"}')],
    ),
    (
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\n',
        "Let me look.",
        [("weather", '{"city": "Rome"}'), ("now", "{}")],
    ),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {NESTED}}}</tool_call>', "", [("f", NESTED)]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {MARKED}}}</tool_call>', "", [("f", MARKED)]),
    ("hermes", '<tool_call> {"arguments" : {"x" : 1} , "name" : "f"} </tool_call> done', "done", [("f", '{"x" : 1}')]),
    ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b', "a\nb", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\u00fc\\"}"}</tool_call>',
        "",
        [("f", '{"x": "ü"}')],
    ),
    (
        "hermes",
        '<tool_call>{"type": "function", "name": "f", "id": [1], "arguments": {}}</tool_call>',
        "",
        [("f", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>', "", [("café", "{}")]),
    ("hermes", "No call here, 1 < 2 <tool", "No call here, 1 < 2 <tool", []),
    ("hermes", "  spaced \n\n", "  spaced \n\n", []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [("weather", '{"city": "Rome"}')]),
    ("llama3_json", '\n {"type": "function", "name": "now", "parameters": {}}\n', "", [("now", "{}")]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "weather", "parameters": {"city": ";"}}; {"name": "other", "parameters": {}} ;{"name": "now"}',
        "",
        [("weather", '{"city": ";"}'), ("other", "{}"), ("now", "{}")],
    ),
    (
        "llama3_json",
        'I look it up:\n{"name": "weather", "parameters": {"city": "Rome"}}\nThere.',
        "I look it up:\nThere.",
        [("weather", '{"city": "Rome"}')],
    ),
    ("llama3_json", f'{{"name": "weather", "parameters": {NESTED}}}', "", [("weather", NESTED)]),
    ("llama3_json", f'{{"name": "weather", "parameters": {MARKED}}}', "", [("weather", MARKED)]),
    ("llama3_json", '{"parameters": {"x": 1}, "name": "weather"}', "", [("weather", '{"x": 1}')]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", 'so {"name": "now", "parameters": {}}', 'so {"name": "now", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
    (
        "mistral",
        'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}, "id": "VvvODy9mT"},\n {"arguments": {}, "name": "g"}]',
        "Hm.",
        [("f", '{"x": [1]}'), ("g", "{}")],
    ),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {MARKED}}}] then', "then", [("f", MARKED)]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{NESTED}[TOOL_CALLS]g[ARGS] {{}}", "", [("f", NESTED), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("mistral", "see [1] and [TOOL", "see [1] and [TOOL", []),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
    (
        "granite",
        'Hm. <tool_call> [{"arguments": {}, "name": "f"},\n {"name": "g", "arguments": {"y": []}}] So.',
        "Hm.\nSo.",
        [("f", "{}"), ("g", '{"y": []}')],
    ),
    ("granite", f'<|tool_call|>[{{"name": "f", "arguments": {MARKED}}}] <|/tool_call|>then', "then", [("f", MARKED)]),
    ("granite", "see [1] and <|tool_call", "see [1] and <|tool_call", []),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    ("cohere", f'a<|START_ACTION|>[{{"tool_name": "f", "parameters": {NESTED}}}]\n', "a", [("f", NESTED)]),
    (
        "deepseek",
        'Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        [("weather", '{"city": "Rome"}'), ("now", "{}")],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{NESTED}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>g<｜tool▁sep｜>{MARKED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>after",
        "after",
        [("f", NESTED), ("g", MARKED)],
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>',
        "",
        [("function", '{"x": 1}')],
    ),
    (
        "kimi_k2",
        'Looking.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Looking.",
        [("weather", '{"city": "Rome"}'), ("now", "{}")],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.a.b:12<|tool_call_argument_begin|>\n"
        f"{NESTED}\n<|tool_call_end|>\n<|tool_call_begin|>plain<|tool_call_argument_begin|>{MARKED}<|tool_call_end|>\n"
        "<|tool_calls_section_end|> bye",
        "bye",
        [("a.b", NESTED), ("plain", MARKED)],
    ),
    (
        "gpt_oss",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + MARKED + "<|call|>",
        "",
        [("weather", MARKED)],
    ),
    ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|><|call|>", "", [("now", "{}")]),
    (
        "gpt_oss",
        "<|start|>assistant<|channel|>commentary<|message|>Plan: two calls.<|end|>"
        f"<|start|>assistant to=functions.f<|channel|>commentary<|constrain|>json<|message|> {NESTED} <|end|>"
        "<|start|>assistant<|channel|>analysis to=python<|message|>print(1)<|call|>",
        "Plan: two calls.",
        [("f", NESTED), ("python", '"print(1)"')],
    ),
    ("gpt_oss", "<|channel|>final<|message|>It is\n\n1 < 2.<|return|>", "It is\n\n1 < 2.", []),
    ("gpt_oss", "to be or not", "to be or not", []),
    ("gpt_oss", " to=", " to=", []),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), EXAMPLES)
def test_calls_and_text_are_found_however_the_output_is_cut(family, output, text, calls, parse_every_way, tools_json):
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=Tools.from_json(tools_json)), output)
    assert parsed.text == text
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.reasoning == ""


def test_without_a_tool_list_an_unmarked_call_may_name_any_tool(parse_every_way):
    options = ParserOptions(tool_parser="llama3_json")
    assert parse_every_way(options, '{"name": "any", "parameters": {}}').tool_calls[0].name == "any"
    assert parse_every_way(options, '{"name": "any"}').text == '{"name": "any"}'


def test_ids_the_model_gives_are_kept(parse_every_way):
    kimi = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert parse_every_way(ParserOptions(tool_parser="kimi_k2"), kimi).tool_calls[0].id == "functions.f:3"
    mistral = "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}"
    assert parse_every_way(ParserOptions(tool_parser="mistral"), mistral).tool_calls[0].id == "abcdef123"


def test_other_ids_are_a_function_of_seed_and_index(parse):
    two = "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}"
    first = parse(ParserOptions(tool_parser="mistral", id_seed="a"), [two]).tool_calls
    assert first == parse(ParserOptions(tool_parser="mistral", id_seed="a"), [two]).tool_calls
    other = parse(ParserOptions(tool_parser="mistral", id_seed="b"), [two]).tool_calls
    ids = [call.id for call in (*first, *other)]
    assert len(set(ids)) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
