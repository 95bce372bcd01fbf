"""Requests with as many values as a body may have: the work grows with their number, not with its square.

No test measures time. Comparisons, or what Python calls, are counted instead, for a number of values and for eight times as many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sapwood_router.edges.http.json_body import convert
from sapwood_router.edges.http.left_out import LeftOut, LeftOutLog
from sapwood_router.edges.ollama.generate import _turns
from sapwood_router.edges.ollama.types import OllamaCall, OllamaChatRequest, OllamaFunction, OllamaMessage
from sapwood_router.edges.openai.types import ChatRequest
from sapwood_router.edges.responses import items
from sapwood_router.edges.responses.types import ResponsesRequest, Tool

SMALL, TIMES = 200, 8


def count_calls(work: Callable[[], object]) -> int:
    """Python functions that are entered, generators that are continued and functions of C that are called."""
    calls = 0

    def seen(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("named", ["zz", "last"], ids=["an unknown tool", "the last call"])
def test_results_of_ollamas_tools_find_their_calls_in_constant_time(named: str) -> None:
    def cost(count: int) -> int:
        calls = [OllamaCall(OllamaFunction(Counted(name))) for name in ["first"] * count + ["last"] * count]
        results = [OllamaMessage("tool", "x", tool_name=Counted(named)) for _ in range(count)]
        Counted.compared = 0
        _turns([OllamaMessage("assistant", tool_calls=calls), *results])
        return Counted.compared

    assert cost(TIMES * SMALL) < 2 * TIMES * cost(SMALL)


def test_results_of_ollamas_tools_answer_calls_in_order_whether_named_or_not() -> None:
    names = ("a", "b", "a", "c")
    calls = [{"id": f"{name}{number}", "function": {"name": name}} for number, name in enumerate(names)]
    results = [{"role": "tool", "tool_name": name, "content": "x"} for name in ("a", None, "a", "b", None, None, "c")]
    messages = msgspec.convert(
        {"messages": [{"role": "assistant", "tool_calls": calls}, *results]}, OllamaChatRequest
    ).messages
    assert messages is not None
    answered = [turn.tool_call_id for turn in _turns(messages)[1:]]
    assert answered == ["a0", "b1", "a2", "call_4", "c3", "call_6", "call_7"]


def test_allowed_tools_of_responses_are_looked_up_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_json", lambda tools: "")  # which knows no such names

    def cost(count: int) -> int:
        tools = [Tool(type="function", name=Counted(f"f{number}")) for number in range(count)]
        allowed = [{"type": "function", "name": Counted(f"f{number}")} for number in reversed(range(count))]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
        Counted.compared = 0
        items.tools_of(ResponsesRequest(tools=tools, tool_choice=choice), LeftOut(LeftOutLog()))
        return Counted.compared

    assert cost(TIMES * SMALL) < 2 * TIMES * cost(SMALL)


def test_parameters_that_nobody_knows_are_only_counted_after_the_first_ones() -> None:
    def cost(count: int) -> int:
        body = {"messages": [], **{f"max_tokenz_{number:05}": 1 for number in range(count)}}
        left_out = LeftOut(LeftOutLog())
        calls = count_calls(lambda: convert(body, ChatRequest, {}, left_out=left_out))
        assert left_out.header().endswith(b", %d more" % (count - 16))
        return calls

    few, many = cost(SMALL), cost(TIMES * SMALL)
    assert (many - few) < 20 * (TIMES - 1) * SMALL, "calls for each one beyond the first ones"
