"""Any output, made up or broken at random: cuts do not matter, nothing raises, arguments come back."""

import itertools
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood_text.incremental.events import merge
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.reasoning_parser.registry import NAMES as REASONING
from sapwood_text.tool_parser.registry import NAMES
from sapwood_text.tool_parser.tools import Tools

TOOLS = Tools.from_objects(
    [{"function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}]
)
FRAGMENTS = [
    *sorted(set().union(*(OutputParser(ParserOptions(tool_parser=name)).special_tokens for name in NAMES))),
    *("<think>", "</think>", "◁think▷", "◁/think▷", "[THINK]", "[/THINK]"),
    *(
        '{"name": "f"',
        ', "arguments": {"s": "x"}',
        ', "parameters": {',
        "}",
        "]",
        "[",
        "(",
        ")",
        "f",
        "f(",
        "s=",
        "'",
        '"',
        "\\",
    ),
    *(
        "\n",
        " ",
        ";",
        ",",
        ":",
        "<",
        "</",
        "function",
        "functions.f:0",
        "```json\n",
        "```",
        "=",
        ">",
        '" string="true">',
    ),
    *("to=functions.f", "analysis", "final", "commentary", "\\u00e9", "\\ud83d", "\\ude00", "None", "1", "text", "é😀"),
]
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=25).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text("abcdefgh_", min_size=1, max_size=8)
RELAXED = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def pieces_of(text, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def parse(options, pieces):
    parser = OutputParser(options)
    events = []
    for piece in pieces:
        events += parser.feed(piece)
    return merge(events + parser.finish())


@pytest.mark.parametrize("family", NAMES)
@given(
    output=OUTPUTS, cuts=CUTS, reasoning=st.sampled_from(["", *REASONING]), is_open=st.sampled_from([None, True, False])
)
@RELAXED
def test_cuts_never_matter(family, output, cuts, reasoning, is_open):
    if "gpt_oss" in (family, reasoning):
        reasoning = ""
    options = ParserOptions(family, reasoning, is_open, TOOLS)
    whole = parse(options, [output])
    assert parse(options, pieces_of(output, cuts)) == whole
    assert parse(options, list(output)) == whole


@pytest.mark.parametrize("family", NAMES)
@given(text=st.text())
@RELAXED
def test_text_without_markers_passes_unchanged(family, text):
    text = text.replace("<", "(").replace("[", "(").replace("{", "(").replace("to=", "")
    assert parse(ParserOptions(family), list(text)).text == text


def render(family, name, arguments):
    """One call in the format of ``family``."""
    text = json.dumps(arguments)
    match family:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>\n'
        case "llama3_json":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {text}}}'
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
        case "granite":
            return f'<|tool_call|>[{{"name": "{name}", "arguments": {text}}}]'
        case "cohere":
            return (
                f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {text}}}]<|END_ACTION|>'
            )
        case "deepseek":
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>\n"
        case "kimi_k2":
            return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        case "gpt_oss":
            return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
        case "pythonic":
            return f"<|python_start|>[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]<|python_end|>"
    raise AssertionError(family)


@pytest.mark.parametrize(
    "family", ["hermes", "llama3_json", "mistral", "granite", "cohere", "deepseek", "kimi_k2", "gpt_oss", "pythonic"]
)
@given(calls=st.lists(st.dictionaries(KEYS, JSON, max_size=4), min_size=1, max_size=3), cuts=CUTS)
@RELAXED
def test_any_arguments_come_back(family, calls, cuts):
    output = "".join(render(family, f"tool_{index}", arguments) for index, arguments in enumerate(calls))
    parsed = parse(ParserOptions(family), pieces_of(output, cuts))
    assert [call.name for call in parsed.tool_calls] == [f"tool_{index}" for index in range(len(calls))]
    assert [json.loads(call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.text == ""


TAGGED = {
    "glm45": ("<tool_call>f\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>", "</arg_value>"),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
        "</parameter>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
        "</parameter>",
    ),
    "deepseek_v32": (
        '<｜DSML｜invoke name="f">\n',
        '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>",
        "</｜DSML｜parameter>",
    ),
}


@pytest.mark.parametrize("family", sorted(TAGGED))
@given(values=st.dictionaries(KEYS, st.text() | OUTPUTS, max_size=4), cuts=CUTS)
@RELAXED
def test_any_string_arguments_of_tagged_families_come_back(family, values, cuts):
    opening, argument, closing, end = TAGGED[family]
    words = {word[:3] for word in re.findall(r"<([^\W\d_]\w*|｜DSML)", opening + argument + closing)}
    tags = re.compile(f"</?({'|'.join(sorted(words))})", re.IGNORECASE)

    def harmless(value: str) -> str:
        """Without tags of the family's own, also misspelt ones: they may end the value (``test_damaged_tags.py``)."""
        value = value.replace(end[:3], "").removeprefix("<arg_value>")
        return value.replace("<", "(") if tags.search(value) else value

    values = {key: harmless(value) for key, value in values.items()}
    tools = Tools.from_objects(
        [{"function": {"name": "f", "parameters": {"properties": {key: {"type": "string"} for key in values}}}}]
    )
    output = opening + "".join(argument.format(key, value) for key, value in values.items()) + closing
    parsed = parse(ParserOptions(family, tools=tools), pieces_of(output, cuts))
    assert json.loads(parsed.tool_calls[0].arguments) == values
    assert parsed.text == ""
