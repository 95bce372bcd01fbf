"""Log probabilities of a response's text, as OpenAI's own client reads them: in one piece and in a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_router.edges.openai.logprobs import ChatToken
from sapwood_router.edges.responses.events import ResponseEvents
from sapwood_router.edges.responses.items import ItemMaker
from sapwood_router.edges.responses.logprobs import TextLogprobs
from sapwood_router.edges.telling import Telling
from sapwood_router.request.context import Delta, Finish, FinishReason, TokenLogprobs, Usage
from sapwood_router.request.output import Output, ToolCallDelta
from sapwood_testing.router.fake_tokenizer import encode
from sapwood_text.vocabulary import TokenTable, Vocabulary

WISH = {"model": "fake", "input": "hi", "include": ["message.output_text.logprobs"]}
TOOLS = [{"type": "function", "name": "time", "parameters": {}}]
TEXT = "Köln, see?"


def shown(tokens: list[Any]) -> list[tuple[str, float, list[int], list[tuple[str, float]]]]:
    return [
        (each.token, each.logprob, each.bytes, [(other.token, other.logprob) for other in each.top_logprobs])
        for each in tokens
    ]


def expected(text: str, top: int, place: int) -> list[tuple[str, float, list[int], list[tuple[str, float]]]]:
    """As the fake worker makes them up: a token is a byte, the next ones are its alternatives, and each place's are less likely.

    Args:
        text: Some of an answer.
        top: Alternatives.
        place: Tokens of the answer before it.
    """

    def name(token: int) -> str:
        return bytes([token - 3]).decode(errors="replace")

    return [
        (name(token), -token / 8 - at, [token - 3], [(name(other), -other / 8) for other in range(token, token + top)])
        for at, token in enumerate(encode(text)[1:], place)
    ]


@pytest.mark.parametrize(
    ("answered", "wish"),
    [
        (TEXT, {}),
        (TEXT, {"top_logprobs": 2}),
        (f"<think>Köln, so</think>{TEXT}<call time>{{}}</call>", {"top_logprobs": 1, "tools": TOOLS}),
    ],
)
@pytest.mark.parametrize("delay", [0.0, 0.002])  # all at once, and token by token
async def test_the_tokens_of_the_text_are_told(
    make_cluster: Any, answered: str, wish: dict[str, Any], delay: float
) -> None:
    tokens = expected(TEXT, wish.get("top_logprobs", 0), len(answered.partition(TEXT)[0].encode()))
    async with make_cluster(workers=1) as cluster:
        cluster.answer_with(answered, delay=delay, fading=1.0)
        client = cluster.openai.responses
        whole = await client.create(**WISH, **wish)
        (message,) = [item for item in whole.output if item.type == "message"]
        assert message.content[0].text == TEXT
        assert whole.top_logprobs == wish.get("top_logprobs", 0)
        assert shown(message.content[0].logprobs) == tokens
        assert await client.retrieve(whole.id) == whole
        async with client.stream(**WISH, **wish) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        (part,) = [e.part for e in events if e.type == "response.content_part.done" and e.part.type == "output_text"]
        (kept,) = [item for item in final.output if item.type == "message"]
        for told in ([each for delta in deltas for each in delta.logprobs], done.logprobs):
            assert [(each.token, each.logprob) for each in told] == [each[:2] for each in tokens]
            assert [[(o.token, o.logprob) for o in each.top_logprobs] for each in told] == [each[3] for each in tokens]
        assert shown(part.logprobs) == shown(kept.content[0].logprobs) == tokens
        again = [item.model_dump() for item in final.output if item.type == "message"]  # as clients send it back
        await client.create(model="fake", input=[*again, {"role": "user", "content": "more"}])


@pytest.mark.parametrize("delay", [0.0, 0.002])
async def test_the_tokens_of_calls_between_texts_are_not_told(make_cluster: Any, delay: float) -> None:
    before, call, after = "abc ", '<call time>{"at":"the tail end"}</call>', " tail end"
    tokens = [*expected(before, 0, 0), *expected(after, 0, len(before + call))]
    async with make_cluster(workers=1) as cluster:
        cluster.answer_with(before + call + after, delay=delay, fading=1.0)
        client = cluster.openai.responses
        whole = await client.create(**WISH, tools=TOOLS)
        async with client.stream(**WISH, tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    told = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [(each.token, each.logprob) for each in told] == [each[:2] for each in tokens]
    for response in (whole, final):
        messages = [item for item in response.output if item.type == "message"]
        assert "".join(message.content[0].text for message in messages) == before + after
        assert shown([each for message in messages for each in message.content[0].logprobs]) == tokens


@pytest.mark.parametrize(
    ("outputs", "places"),
    [
        ([(["</think>"], Output()), (["n"], Output("n"))], [1]),
        ([(["</think>", "\n\n", "n"], Output("n"))], [2]),
        ([(["<think>", "n", "</think>", "n"], Output("n", "n"))], [3]),
        ([(["<s>"], Output()), (["n"], Output("n"))], [1]),
        ([(["<s>", "o", "\n\nn", "n"], Output("nn", "o"))], [2, 3]),
        (
            [
                (["a "], Output("a ")),
                (["<call>", '{"q":', ' "x y"}', "</call>"], Output()),
                ([" y"], Output(" y")),
                ([" y"], Output(" y")),
            ],
            [0, 5, 6],
        ),
        ([(["a ", "<call>", '{"q":', ' "x y"}', "</call>", " y"], Output("a  y"))], [0, 5]),
        ([(["</think>", "n", "<call>", "n", "</call>"], Output("n", tool_calls=[ToolCallDelta(0, "1", "n")]))], [1]),
        ([(["a", "<"], Output("a")), (["b"], Output("<b"))], [0, 1, 2]),
        ([(["\xc3"], Output()), (["\xb6"], Output("ö"))], [0, 1]),
        ([(["</think>", "un"], Output("n"))], [1]),
    ],
)
async def test_what_looks_like_the_text_is_not_told(outputs: list[tuple[list[str], Output]], places: list[int]) -> None:
    spelled: dict[int, bytes] = {}
    special: dict[int, str] = {}

    class Tokenizer:
        """Knows every token; each is used once."""

        async def vocabulary(self, *_: object) -> Vocabulary:
            return Vocabulary(TokenTable(spelled.__getitem__), len(spelled), special)

    stint = HeavyWork().stint("tenant")
    context: Any = SimpleNamespace(request_id="one", deadline=0.0)
    tokenizer: Any = Tokenizer()
    told = TextLogprobs(context, Telling(tokenizer, stint))
    found = []
    for tokens, output in outputs:
        ids = [*range(len(spelled), len(spelled) + len(tokens))]
        spelled.update({token: text.encode("latin-1") for token, text in zip(ids, tokens, strict=True)})
        special.update({token: text for token, text in zip(ids, tokens, strict=True) if text == "<s>"})
        delta = Delta(output, ids, logprobs=[TokenLogprobs(-token) for token in ids], text_tokens=len(ids))
        await told.read(delta)
        found += msgspec.json.decode(bytes(told.take()), type=list[ChatToken])
    assert [-each.logprob for each in found] == places


async def test_long_lists_are_written_once_and_sent_an_event_at_a_time(make_cluster: Any) -> None:
    text = "many tokens " * 40  # with their alternatives more than is sent at once
    tokens = expected(text, 20, 0)
    async with make_cluster(workers=1) as cluster:
        cluster.answer_with(text, fading=1.0)
        client = cluster.openai.responses
        async with client.stream(**WISH, top_logprobs=20) as stream:
            events = [event async for event in stream]
        final = events[-1].response
        kept = await client.retrieve(final.id)
        for response in (final, kept):
            assert shown(response.output[0].content[0].logprobs) == tokens
        assert [event.sequence_number for event in events] == [*range(len(events))]


def test_the_end_comes_an_event_at_a_time() -> None:
    """So others continue between them where each has a long list."""

    class Found:
        """Tokens of which one is told with each text."""

        def take(self) -> msgspec.Raw:
            return msgspec.Raw(b'[{"token":"a"}]')

    def ended(_: Finish, items: list[dict[str, Any]]) -> tuple[str, msgspec.Raw]:
        return "completed", msgspec.Raw(msgspec.json.encode({"output": items}))

    found: Any = Found()
    events = ResponseEvents(ItemMaker("secret"), dict, ended, lambda _: {}, found)
    for _ in range(3):
        events.more(Delta(Output("a"), [5]))
    pieces = [*events.end(Finish(FinishReason.STOP, Usage(1, 3, 0)), 0)]
    assert [piece.split(b"\n")[0].rpartition(b".")[2] for piece in pieces] == [b"done", b"done", b"done", b"completed"]
    assert [piece.count(b"event: ") for piece in pieces] == [1] * 4
    assert [piece.count(b'[{"token":"a"},{"token":"a"},{"token":"a"}]') for piece in pieces] == [1] * 4


async def test_none_are_told_unless_asked_for(cluster: Any) -> None:
    cluster.answer_with(TEXT)
    answer = await cluster.openai.responses.create(model="fake", input="hi")
    assert answer.output[0].content[0].logprobs == []
    assert not cluster.calls()[-1].request.sampling.HasField("logprobs")
    for wrong in ({**WISH, "top_logprobs": 21}, {**WISH, "top_logprobs": -1}, {"input": "hi", "top_logprobs": 1}):
        refused = await cluster.http.post("/v1/responses", json=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
