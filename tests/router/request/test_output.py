"""Putting pieces of an output together."""

from sapwood_router.request.output import Output, OutputBuffer, ToolCallDelta
from sapwood_text.incremental.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


def test_pieces_taken_late_are_merged_by_channel_and_call() -> None:
    buffer = OutputBuffer()
    buffer.add(Output("a", "r"))
    buffer.add(Output("b", tool_calls=[ToolCallDelta(0, "i", "f", "{")]))
    buffer.add(Output(tool_calls=[ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "j", "g")]))
    assert buffer.take() == Output("ab", "r", [ToolCallDelta(0, "i", "f", "{}"), ToolCallDelta(1, "j", "g")])
    assert buffer.take() == Output()
    buffer.add(Output(tool_calls=[ToolCallDelta(1, arguments="{}")]))
    assert buffer.take() == Output(tool_calls=[ToolCallDelta(1, arguments="{}")])


def test_events_are_merged_by_channel_and_call() -> None:
    buffer = OutputBuffer()
    assert not buffer.add_events([])
    assert buffer.add_events([ReasoningDelta("r"), TextDelta("a"), ToolCallStart(0, "f", "i")])
    assert buffer.add_events([ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), ToolCallStart(1, "g", "j")])
    assert buffer.add_events([TextDelta("b")])
    assert buffer.take() == Output("ab", "r", [ToolCallDelta(0, "i", "f", "{}"), ToolCallDelta(1, "j", "g")])
    assert buffer.add_events([ToolCallArguments(1, "[]")])
    assert buffer.take() == Output(tool_calls=[ToolCallDelta(1, arguments="[]")])
