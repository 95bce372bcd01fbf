"""Qwen3-Coder: ``<tool_call><function=f><parameter=k>v</parameter></function></tool_call>``, tags on lines of their own.

One line break at each end of a value belongs to the format. The models at times leave ``<tool_call>`` out. Strings are
written without quotes, other values as JSON.

Source: the template published with the model.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.tool_parser.base import CallMarkers
from sapwood_tokenizer.output.tool_parser.tagged_calls import TaggedForm

QWEN3_CODER = TaggedForm(
    CallMarkers.of(openers=("<tool_call>", "<function="), closers=("</function>", "</tool_call>")),
    call_end="</function>",
    parameter="<parameter=",
    value_ends=Markers("</parameter>"),
    word=re.compile(r"[^\s<>]+"),
    name_end=">",
    key_ends={">": None},
    trims_line=True,
).family("qwen3_coder")
