import re
from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_text.output_parser import ParserOptions
from sapwood_text.reasoning_parser.registry import NAMES as REASONING_NAMES
from sapwood_text.tool_parser.registry import NAMES, SIGNS, detect_tool_parser
from sapwood_text.tool_parser.tools import Tools
from sapwood_tokenizer.template.parser_defaults import parser_defaults


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ('{% for tool in tools %} <tool_call>\n{"name": <function-name>} </tool_call>', "hermes"),
        ("tools <tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("tools <tool_call>{name}\n<arg_key>k</arg_key>", "glm45"),
        ("tools [TOOL_CALLS] [", "mistral"),
        ("tools respond with <|tool_call|> followed by a JSON list of tools", "granite"),
        ("tools <|START_THINKING|> <|START_ACTION|>[", "cohere"),
        ("tools <｜tool▁calls▁begin｜>", "deepseek"),
        ("message['tool_calls'] <｜tool▁calls▁begin｜>", "deepseek"),
        ("tools ｜DSML｜ function_calls", "deepseek_v32"),
        ("tools {%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax_m2"),
        ("tools <|tool_calls_section_begin|>", "kimi_k2"),
        ("{% if tools %}<|im_system|>tool_declare<|im_middle|>", "kimi_k2"),
        ("tools <|start|>assistant<|channel|>", "gpt_oss"),
        ('tools <|start_header_id|> {"name": function name, "parameters": {}}', "llama3_json"),
        ("tools <|python_start|>", "pythonic"),
        ("tools of an unknown kind", ""),
        ("<tool_call> but no t-o-o-l-s", ""),
    ],
)
def test_a_chat_template_tells_its_family(template, family):
    assert detect_tool_parser(template) == family


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "tools"),
        ("{}", "tools"),
        ("[1]", "tools"),
        ("[" * 100_000, "tools"),
        ('[{"function": 5}]', "tools[0].function"),
        ('[{"function": {"name": "f"}}, {"type": "function"}]', "tools[1].function.name"),
        ('[{"function": {"name": ""}}]', "tools[0].function.name"),
    ],
)
def test_tools_in_another_form_are_refused_with_the_field(text, field):
    with pytest.raises(InvalidArgumentError) as caught:
        Tools.from_json(text)
    assert caught.value.field == field


def test_no_tools_and_tools_without_schema_are_fine():
    assert len(Tools.from_json("")) == 0
    tools = Tools.from_json(
        '[{"name": "f"}, {"function": {"name": "g", "parameters": {"properties": {"x": {"$ref": "#"}}}}}]'
    )
    assert "f" in tools and "g" in tools and "h" not in tools
    assert tools.types("g", "x") == tools.types("h", "y") == frozenset()


def test_a_schema_that_holds_itself_too_deep_says_nothing():
    schema: dict = {}
    inner = schema
    for _ in range(50):
        inner["anyOf"] = [{}]
        inner = inner["anyOf"][0]
    inner["type"] = "string"
    assert (
        Tools.from_objects([{"name": "f", "parameters": {"properties": {"x": schema}}}]).types("f", "x") == frozenset()
    )


def test_every_parser_is_documented():
    page = (Path(__file__).resolve().parents[3] / "docs" / "parsers.md").read_text(encoding="utf-8")
    missing = [name for name in (*NAMES, *REASONING_NAMES) if f"`{name}`" not in page]
    assert missing == []


def test_a_package_can_bring_a_family(plugin, parse_every_way):
    plugin(
        "sapwood.tool_parsers",
        "arrows",
        """
        from sapwood_text.tool_parser.base import CallMarkers, ToolFamily, marked_calls
        from sapwood_text.tool_parser.call_object import parse_call_object

        MARKERS = CallMarkers.of(openers=("-->",), closers=("<--",))

        def script(source, out, tools):
            def attempt():
                yield from source.whitespace()
                return (yield from parse_call_object(source, out))

            yield from marked_calls(source, out, MARKERS, attempt)

        FAMILY = ToolFamily("arrows", script, frozenset(MARKERS.all.literals))
        """,
        "FAMILY",
    )
    assert parser_defaults("arrows", "none", None).tool_parser == "arrows"
    parsed = parse_every_way(ParserOptions(tool_parser="arrows"), 'Look: --> {"name": "f", "arguments": {"x": 1}} <--')
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", '{"x": 1}')]
    with pytest.raises(ConfigError, match="--tool-parser"):
        parser_defaults("bows", "none", None)


@pytest.mark.parametrize(
    ("family", "parser"),
    [("llama3", "llama3_json"), ("qwen3", "hermes"), ("mistral", "mistral"), ("deepseek", "deepseek"), ("gemma3", "")],
)
def test_the_templates_of_families_are_told_apart(family: str, parser: str) -> None:
    template = (Path(__file__).parents[2] / "tokenizer" / "template" / "templates" / f"{family}.jinja").read_text()
    assert detect_tool_parser(template) == parser


def test_the_documentation_says_what_tells_them() -> None:
    text = (Path(__file__).parents[3] / "docs" / "parsers.md").read_text()
    table = text[text.index("| a template with |") :].partition("\n\n")[0].splitlines()[2:]
    rows = [re.findall(r"`([^`]+)`", row.replace("\\|", "|")) for row in table]
    assert [(name, tuple(signs)) for *signs, name in rows] == [*SIGNS]
