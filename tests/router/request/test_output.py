"""Putting pieces of an output together, and dropping what comes again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_router.request.output import Output, OutputBuffer, ToolCallDelta

TEXTS = st.text(max_size=12)
WHOLE = st.builds(lambda text, reasoning, calls: (text, reasoning, calls), TEXTS, TEXTS, st.lists(TEXTS, max_size=3))


def pieces_of(whole, rng) -> list[Output]:
    """A whole output as a tokenizer may cut it: reasoning, text and calls in order, at random places."""
    text, reasoning, calls = whole

    def cut(value: str) -> list[str]:
        found = []
        while value:
            size = rng.randint(1, len(value))
            found.append(value[:size])
            value = value[size:]
        return found

    pieces = [Output(reasoning=piece) for piece in cut(reasoning)]
    pieces += [Output(piece) for piece in cut(text)]
    for index, arguments in enumerate(calls):
        first, *rest = cut(arguments) or [""]
        together = rng.random() < 0.5
        start = ToolCallDelta(index, f"id{index}", f"f{index}", first if together else "")
        pieces.append(Output(tool_calls=[start]))
        pieces += [Output(tool_calls=[ToolCallDelta(index, arguments=p)]) for p in rest if together]
        pieces += [Output(tool_calls=[ToolCallDelta(index, arguments=p)]) for p in [first, *rest] if not together]
    return pieces


def test_pieces_taken_late_are_merged_by_channel_and_call() -> None:
    buffer = OutputBuffer()
    assert buffer.add(Output("a", "r"))
    assert buffer.add(Output("b", tool_calls=[ToolCallDelta(0, "i", "f", "{")]))
    assert buffer.add(Output(tool_calls=[ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "j", "g")]))
    assert buffer.take() == Output("ab", "r", [ToolCallDelta(0, "i", "f", "{}"), ToolCallDelta(1, "j", "g")])
    assert buffer.take() == Output()
    buffer.add(Output(tool_calls=[ToolCallDelta(1, arguments="{}")]))
    assert buffer.take() == Output(tool_calls=[ToolCallDelta(1, arguments="{}")])


def test_what_is_only_repeated_is_not_new() -> None:
    buffer = OutputBuffer()
    piece = Output("text", "why", [ToolCallDelta(0, "i", "f", "{}")])
    assert buffer.add(piece)
    buffer.rewind()
    assert not buffer.add(piece)
    assert buffer.add(Output(tool_calls=[ToolCallDelta(0, arguments=" ")]))
    assert buffer.take() == Output("text", "why", [ToolCallDelta(0, "i", "f", "{} ")])


@settings(max_examples=80, deadline=None)
@given(WHOLE, st.lists(st.integers(0, 20), max_size=4), st.randoms(use_true_random=False))
def test_however_often_it_comes_again_each_channel_comes_once(whole, losses, rng) -> None:
    buffer = OutputBuffer()
    text = reasoning = ""
    started: list[tuple[int, str, str]] = []
    arguments: dict[int, str] = {}
    for loss in [*losses, None]:
        buffer.rewind()
        for piece in pieces_of(whole, rng)[:loss]:
            buffer.add(piece)
            if rng.random() < 0.5:
                continue
            taken = buffer.take()
            text, reasoning = text + taken.text, reasoning + taken.reasoning
            for call in taken.tool_calls:
                if call.id:
                    started.append((call.index, call.id, call.name))
                arguments[call.index] = arguments.get(call.index, "") + call.arguments
    rest = buffer.take()
    text, reasoning = text + rest.text, reasoning + rest.reasoning
    for call in rest.tool_calls:
        if call.id:
            started.append((call.index, call.id, call.name))
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert (text, reasoning) == whole[:2]
    assert started == [(index, f"id{index}", f"f{index}") for index in range(len(whole[2]))]
    assert arguments == dict(enumerate(whole[2]))
