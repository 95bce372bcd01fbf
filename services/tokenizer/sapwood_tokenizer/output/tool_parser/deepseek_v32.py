"""DeepSeek V3.2: ``<｜DSML｜invoke name="f">`` with ``<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>``.

Calls stand between ``<｜DSML｜function_calls>`` and ``</｜DSML｜function_calls>``. The model says itself which values are
strings, written without quotes; the others are JSON.

Source: the encoding published with the model.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.tool_parser.base import CallMarkers
from sapwood_tokenizer.output.tool_parser.tagged_calls import TaggedForm

DEEPSEEK_V32 = TaggedForm(
    CallMarkers.of(
        openers=("<｜DSML｜function_calls>", '<｜DSML｜invoke name="'),
        closers=("</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
    ),
    call_end="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="',
    value_ends=Markers("</｜DSML｜parameter>"),
    word=re.compile(r'[^"<>]+'),
    name_end='">',
    key_ends={'" string="true">': frozenset(["string"]), '" string="false">': frozenset()},
).family("deepseek_v32", "｜DSML｜")
