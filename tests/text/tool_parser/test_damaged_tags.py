"""Calls between tags that are not written as they should be, as models write them, and what is made of them."""

import json

import pytest

from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.tools import Tools

TOOLS = Tools.from_objects(
    [
        {"function": {"name": "write", "parameters": {"properties": {"path": {"type": "string"}, "content": {}}}}},
        {
            "function": {
                "name": "run",
                "parameters": {"properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}},
            }
        },
    ]
)
XML = '<a>\n<parameter name="x">1</parameter>\n</a>'
MORE_XML = '<a>\n<parameter name="x">1</parameter>\n<parameter name="y">2</parameter>\n</a>'
OWN_CALL = {
    "qwen3_coder": "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="run">\n<parameter name="command">ls</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "glm45": "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="command" string="true">ls'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}
FORMS = {
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n<parameter=path>\nf\n</parameter>\n<parameter=content>\n{}\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">f</parameter>\n'
        '<parameter name="content">{}</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "glm45": (
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>f</arg_value>\n<arg_key>content</arg_key>\n"
        "<arg_value>{}</arg_value>\n</tool_call>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="path" string="true">f'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="content" string="true">{}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
}


def calls_of(parsed):
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@pytest.mark.parametrize("tools", [TOOLS, Tools()], ids=["tools known", "tools unknown"])
@pytest.mark.parametrize(
    "value",
    [
        XML,
        MORE_XML,
        "ends with </parameter>.",
        "a </parameter> b </function> c </invoke> d </tool_call> e </arg_value> f",
        "an example:\n{own}\nand on",
    ],
)
@pytest.mark.parametrize("family", sorted(FORMS))
def test_a_value_may_hold_tags(family, value, tools, parse_every_way):
    value = value.replace("{own}", OWN_CALL[family])
    output = FORMS[family].format(value) + "\n" + OWN_CALL[family]
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=tools), output)
    assert calls_of(parsed) == [("write", {"path": "f", "content": value}), ("run", {"command": "ls"})]
    assert parsed.text == ""


@pytest.mark.parametrize("family", sorted(FORMS))
def test_an_opening_tag_of_no_parameter_of_the_tool_is_part_of_a_value(family, parse_every_way):
    value = '<parameter=x> or <parameter name="x"> and <arg_key>x</arg_key> alone'
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=TOOLS), FORMS[family].format(value))
    assert calls_of(parsed) == [("write", {"path": "f", "content": value})]


# (family, output, text, [(tool, decoded arguments)])
EXAMPLES = [
    # A broken element behind a good one.
    (
        "qwen3_coder",
        "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n<parameter=\necho x\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("run", {"command": "ls"})],
    ),
    (
        "qwen3_coder",
        "<function=run><parameter=command>ls</parameter><parameter=ids: [1, 2]\n</parameter></function>",
        "",
        [("run", {"command": "ls"})],
    ),
    ("qwen3_coder", "<function=run><parameter=command>ls</parameter><parameter=no", "", [("run", {"command": "ls"})]),
    # The end tag forgotten.
    (
        "qwen3_coder",
        "<tool_call>\n<function=run>\n<parameter=command>\nls\n<parameter=timeout>\n5\n</parameter>\n</function>\n</tool_call>",
        "",
        [("run", {"command": "ls", "timeout": 5})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=run>\n<parameter=timeout>\n5\n</function>\n</tool_call>\nDone.",
        "Done.",
        [("run", {"timeout": 5})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=run>\n<parameter=command>\nls\n</tool_call>\n" + OWN_CALL["qwen3_coder"],
        "",
        [("run", {"command": "ls"}), ("run", {"command": "ls"})],
    ),
    (
        "minimax_m2",
        '<invoke name="run"><parameter name="command">ls<parameter name="timeout">5</parameter></invoke>',
        "",
        [("run", {"command": "ls", "timeout": 5})],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="run"><｜DSML｜parameter name="command" string="true">ls<｜DSML｜parameter name="timeout" '
        'string="false">5</｜DSML｜parameter></｜DSML｜invoke>',
        "",
        [("run", {"command": "ls", "timeout": 5})],
    ),
    (
        "glm45",
        "<tool_call>run<arg_key>command</arg_key><arg_value>ls<arg_key>timeout</arg_key><arg_value>5</tool_call>",
        "",
        [("run", {"command": "ls", "timeout": 5})],
    ),
    # Misspelt and doubled tags.
    *(
        (
            "qwen3_coder",
            f"<function=run><parameter=command>ls{tag}<parameter=timeout>5{tag}</function>",
            "",
            [("run", {"command": "ls", "timeout": 5})],
        )
        for tag in ("</parameter/>", "</parameter1>", "</paramter>", "</parameter></parameter>", "</parameter >")
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<functon=run>\n<paramter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        "",
        [("run", {"command": "ls"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><tool_call><function=run\n<parameter=timeout>5</parameter>",
        "",
        [("run", {"timeout": 5})],
    ),
    (
        "qwen3_coder",
        '<tool_call><function name="run"><parameter name="timeout">5</parameter></function></tool_call>',
        "",
        [("run", {"timeout": 5})],
    ),
    (
        "qwen3_coder",
        '<tool_call>{"name": "run", "arguments": {"timeout": 5}}</tool_call>',
        "",
        [("run", {"timeout": 5})],
    ),
    (
        "qwen3_coder",
        "So:\n<tool_call>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>\n"
        + OWN_CALL["qwen3_coder"],
        "So:",
        [("run", {"command": "ls"})],
    ),
    # DSML without its marks.
    (
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n<parameter name="timeout">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "",
        [("run", {"timeout": 5})],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="run">\n<parameter name="command">5</parameter>\n</｜DSML｜invoke>\nSo',
        "So",
        [("run", {"command": "5"})],
    ),
    # GLM's pairs of tags with one of them missing or too many.
    (
        "glm45",
        "<tool_call>run<arg_key>command</arg_key>ls -la</arg_value></tool_call>",
        "",
        [("run", {"command": "ls -la"})],
    ),
    (
        "glm45",
        "<tool_call>run</arg_value>\n<arg_key>timeout</arg_key><arg_value>5</arg_value></tool_call>",
        "",
        [("run", {"timeout": 5})],
    ),
    (
        "glm45",
        "<tool_call>run<arg_key><arg_key>command</arg_key></arg_key><arg_value>ls</arg_value></arg_value></tool_call>",
        "",
        [("run", {"command": "ls"})],
    ),
    ("glm45", "<tool_call>runcommand</arg_key><arg_value>ls</arg_value></tool_call>", "", [("run", {"command": "ls"})]),
    (
        "glm45",
        "<tool_call>run command</arg_key><arg_value>ls</arg_value></tool_call>",
        "",
        [("run", {"command": "ls"})],
    ),
    (
        "glm45",
        "<tool_call>run<tool_call>command</arg_key><arg_value>ls</arg_value></tool_call>",
        "",
        [("run", {"command": "ls"})],
    ),
    ("glm45", "<tool_call>run<arg_key>command<arg_value>ls</arg_key></tool_call>", "", [("run", {"command": "ls"})]),
]


@pytest.mark.parametrize(("family", "output", "text", "calls"), EXAMPLES)
def test_damaged_tags_cost_as_little_as_can_be(family, output, text, calls, parse_every_way):
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=TOOLS), output)
    assert calls_of(parsed) == calls
    assert parsed.text == text


@pytest.mark.parametrize("family", sorted(FORMS))
def test_a_parameter_that_the_tool_does_not_have_is_kept(family, parse_every_way):
    output = FORMS[family].replace("path", "mode").format("v")
    parsed = parse_every_way(ParserOptions(tool_parser=family, tools=TOOLS), output)
    assert calls_of(parsed) == [("write", {"mode": "f", "content": "v"})]
