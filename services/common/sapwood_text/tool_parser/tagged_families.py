"""The families that ``tagged_calls`` reads, one row each.

Source: the templates published with the models, and for DeepSeek the encoding published with V3.2 and V4.
"""

from __future__ import annotations

from sapwood_text.tool_parser.tagged_calls import TaggedForm

QWEN3_CODER = TaggedForm(
    sections=("<tool_call>",),
    call="<function=",
    parameter="<parameter=",
    value_ends=("parameter",),
    call_end="function",
    section_ends=("tool_call",),
    trims_line=True,
    strays=("<parameter=", "</function>"),
).family("qwen3_coder")
"""Qwen3-Coder: ``<tool_call><function=f><parameter=k>v</parameter></function></tool_call>``, tags on lines of their own.

One line break at each end of a value belongs to the format. The models at times leave ``<tool_call>`` out. Strings are
written without quotes, other values as JSON.
"""

MINIMAX_M2 = TaggedForm(
    sections=("<minimax:tool_call>",),
    call="<invoke name=",
    parameter="<parameter name=",
    value_ends=("parameter",),
    call_end="invoke",
    section_ends=("minimax:tool_call",),
    strays=("<parameter name=", "</invoke>"),
    is_xml=True,
).family("minimax_m2")
"""MiniMax M2: ``<invoke name="f">`` with ``<parameter name="k">v</parameter>``, between ``<minimax:tool_call>`` tags.

Strings are written without quotes and without line breaks around them, other values as JSON.
"""

DEEPSEEK_V32 = TaggedForm(
    sections=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    call="<｜DSML｜invoke name=",
    parameter="<｜DSML｜parameter name=",
    value_ends=("parameter",),
    call_end="invoke",
    section_ends=("function_calls", "tool_calls"),
    prefix="DSML",
    strays=("<｜DSML｜", "</｜DSML｜"),
).family("deepseek_v32", "｜DSML｜")
"""DeepSeek V3.2: ``<｜DSML｜invoke name="f">`` with ``<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>``.

Calls stand between ``<｜DSML｜function_calls>`` tags, in V4 between ``<｜DSML｜tool_calls>`` tags. The model says itself which
values are strings, written without quotes; the others are JSON. Where it does not say so, the tool's schema does.
"""

GLM45 = TaggedForm(
    sections=(),
    call="<tool_call>",
    parameter="<arg_key>",
    value_ends=("arg_value", "arg_key"),
    call_end="tool_call",
    section_ends=(),
    keyed=True,
    strays=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
).family("glm45")
"""GLM 4.5 to 4.7: ``<tool_call>f`` and, for each argument, ``<arg_key>k</arg_key> <arg_value>v</arg_value>``, ``</tool_call>``.

White space between the tags does not matter. Strings are written without quotes, other values as JSON. One of the tags around
a name or a value may be missing.
"""
