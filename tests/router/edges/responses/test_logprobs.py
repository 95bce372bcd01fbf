"""Log probabilities of a response's text, as OpenAI's own client reads them: in one piece and in a stream."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_testing.router.fake_tokenizer import encode

WISH = {"model": "fake", "input": "hi", "include": ["message.output_text.logprobs"]}
TOOLS = [{"type": "function", "name": "time", "parameters": {}}]
TEXT = "Köln, see?"


def shown(tokens: list[Any]) -> list[tuple[str, float, list[int], list[tuple[str, float]]]]:
    return [
        (each.token, each.logprob, each.bytes, [(other.token, other.logprob) for other in each.top_logprobs])
        for each in tokens
    ]


def expected(text: str, top: int) -> list[tuple[str, float, list[int], list[tuple[str, float]]]]:
    """As the fake worker makes them up: a token is a byte, and the next ones are its alternatives."""

    def name(token: int) -> str:
        return bytes([token - 3]).decode(errors="replace")

    return [
        (name(token), -token / 8, [token - 3], [(name(other), -other / 8) for other in range(token, token + top)])
        for token in encode(text)[1:]
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
    tokens = expected(TEXT, wish.get("top_logprobs", 0))
    async with make_cluster(workers=1) as cluster:
        cluster.answer_with(answered, delay=delay)
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


async def test_none_are_told_unless_asked_for(cluster: Any) -> None:
    cluster.answer_with(TEXT)
    answer = await cluster.openai.responses.create(model="fake", input="hi")
    assert answer.output[0].content[0].logprobs == []
    assert not cluster.calls()[-1].request.sampling.HasField("logprobs")
    for wrong in ({**WISH, "top_logprobs": 21}, {**WISH, "top_logprobs": -1}, {"input": "hi", "top_logprobs": 1}):
        refused = await cluster.http.post("/v1/responses", json=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
