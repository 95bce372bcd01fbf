"""Items as turns: many that are one turn are put together once."""

from __future__ import annotations

import msgspec

from sapwood_router.edges.http.left_out import LeftOut, LeftOutLog
from sapwood_router.edges.responses.items import Conversation
from sapwood_router.edges.responses.types import Item


def test_thousands_of_items_are_one_turn() -> None:
    """Each put behind what came before would take a minute: 130 GB would be copied."""
    said = [{"role": "assistant", "content": f"{number:4}" + "a" * 900} for number in range(16_000)]
    called = [
        {"type": "function_call", "call_id": f"{number}", "name": "f", "arguments": "{}"} for number in range(16_000)
    ]
    conversation = Conversation()
    items = msgspec.convert([{"role": "user", "content": "hi"}, *said, *called], list[Item])
    assert len(list(conversation.take(items, {}, LeftOut(LeftOutLog())))) == len(
        items
    )  # others may continue after each
    _, turn = conversation.turns
    assert turn.content == "\n".join(item["content"] for item in said)
    assert [call.id for call in turn.tool_calls] == [item["call_id"] for item in called]
    assert turn.reasoning is None
    assert conversation.paths == ["input[0]", "input[1]"]
