"""MiniMax M2: ``<invoke name="f">`` with ``<parameter name="k">v</parameter>``, between ``<minimax:tool_call>`` tags.

Strings are written without quotes and without line breaks around them, other values as JSON.

Source: the template published with the model.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.tool_parser.base import CallMarkers
from sapwood_tokenizer.output.tool_parser.tagged_calls import TaggedForm

MINIMAX_M2 = TaggedForm(
    CallMarkers.of(openers=("<minimax:tool_call>", '<invoke name="'), closers=("</invoke>", "</minimax:tool_call>")),
    call_end="</invoke>",
    parameter='<parameter name="',
    value_ends=Markers("</parameter>"),
    word=re.compile(r'[^"<>]+'),
    name_end='">',
    key_ends={'">': None},
).family("minimax_m2")
