"""A prompt that is too long is refused in words and with codes that agents look for, or its oldest turns are left out."""

import re

import anthropic
import openai
import pytest

from sapwood_common.errors import PromptTooLongError
from sapwood_testing.router.fake_worker import FakeWorker

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LONG = "x" * 100_000
"""As many tokens as the fake worker's context."""
LARGE = "x" * 400_000
"""So long that the tokenizer counts its tokens for the router."""
WORDS = [  # what the sources of agents match, in our own spelling of their expressions
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",  # Claude Code
    r"maximum context length is \d+ tokens",  # opencode, pi, cline: OpenRouter's and vLLM's words
    r"reduce the length of the messages",  # Groq's
    r"context length",
]


def bodies(text: str) -> dict[str, dict]:
    said = [{"role": "user", "content": text}]
    return {
        CHAT: {"messages": said},
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
        MESSAGES: {"messages": said, "max_tokens": 9},
        "/generate": {"text": text},
        "/v1/embeddings": {"input": text},
    }


@pytest.mark.parametrize("path", bodies(""))
@pytest.mark.parametrize("text", [LONG, LARGE], ids=["long", "large"])
async def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_know(cluster, path, text) -> None:
    answer = await cluster.http.post(path, json=bodies(text)[path])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    for words in WORDS:
        assert re.search(words, error["message"]), words
    if not path.startswith("/v1/messages"):
        assert error["code"] == "context_length_exceeded"


async def test_the_clients_of_openai_and_anthropic_tell_it(cluster) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await cluster.openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": LONG}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": LONG}])
    assert refused.value.body["error"]["message"].startswith("prompt is too long: 1000")


@pytest.mark.parametrize("text", [LONG, LARGE], ids=["long", "large"])
async def test_a_streamed_response_to_a_prompt_that_is_too_long_fails_in_the_stream(cluster, text) -> None:
    stream = await cluster.openai.responses.create(model="fake", input=text, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
    assert re.search(WORDS[0], failed.error.message)
    chat = {"messages": [{"role": "user", "content": text}], "stream": True}
    assert (await cluster.http.post(CHAT, json=chat)).status_code == 400  # of other APIs it is a status
    refused = await cluster.http.post(RESPONSES, json={"input": "x", "stream": True, "temperature": -1})
    assert refused.status_code == 400


async def test_grpc_names_the_text_of_a_prompt_that_is_too_long(cluster) -> None:
    import grpc

    from sapwood_common.status import from_rpc_error

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(LONG)
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (PromptTooLongError, "text")


@pytest.fixture
async def small(make_cluster, monkeypatch):
    made = FakeWorker.__init__
    monkeypatch.setattr(FakeWorker, "__init__", lambda self: made(self, context_length=200))
    async with make_cluster(workers=1) as cluster:
        yield cluster


def shown(cluster) -> list[tuple[str, str]]:
    """The turns that the worker was given, by role; what the tokenizer was asked for last may not have fitted."""
    text = bytes(token - 3 for token in cluster.calls()[-1].request.token_ids if token >= 3).decode()
    return re.findall(r"<(\w+)>([^<]*)", text.removesuffix("<assistant>"))


def turn(role: str, letter: str, size: int = 20) -> dict:
    return {"role": role, "content": letter * size}


HISTORY = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d"), turn("user", "e")]


async def ask(cluster, **body):
    answer = await cluster.http.post(RESPONSES, json={"max_output_tokens": 20, "truncation": "auto", **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    assert len(cluster.calls()[-1].request.token_ids) <= 180
    return shown(cluster)


async def test_truncation_auto_leaves_out_as_few_of_the_oldest_turns_as_will_do(small) -> None:
    for size in (1, 20, 30, 40, 60, 100, 150):
        history = [{**each, "content": each["content"][0] * size} for each in HISTORY]
        left = await ask(small, input=history, instructions="S")
        said = [(each["role"], each["content"]) for each in history]
        assert left[0] == ("system", "S")
        assert left[1:] in [said[at:] for at in (0, 2, 4)]
        if len(left) < 1 + len(said):  # with two turns more it would not fit
            more = [("system", "S"), *said[-len(left) - 1 :], ("assistant", "")]
            assert len("".join(f"<{role}>{text}" for role, text in more)) + 1 > 180
    assert len(left) == 2


async def test_truncation_auto_keeps_the_question_and_drops_calls_with_their_results(small) -> None:
    calls = [
        {"type": "function_call", "call_id": str(n), "name": "f", "arguments": "{}"}
        if kind == "call"
        else {"type": "function_call_output", "call_id": str(n), "output": f"{n}" * 40}
        for n in range(5)
        for kind in ("call", "result")
    ]
    await ask(small, input=[turn("user", "a"), turn("assistant", "b"), turn("user", "q"), *calls])
    left = shown(small)
    assert left[0] == ("user", "q" * 20)
    assert [role for role, _ in left[1:]] == ["assistant", "tool"] * (len(left) // 2)
    assert left[-1] == ("tool", "4" * 40)
    assert len(left) == 5


async def test_truncation_auto_of_a_kept_conversation(small) -> None:
    previous = None
    for letter in "abcdefghij":
        body = {"input": letter * 40, "previous_response_id": previous, "truncation": "auto", "max_output_tokens": 20}
        answer = await small.http.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
    assert shown(small)[-1] == ("user", "j" * 40)
    assert 1 < len(shown(small)) < 19


async def test_one_turn_that_is_too_long_is_refused_all_the_same(small) -> None:
    for truncation, text in (("auto", "x" * 300), ("disabled", "x" * 300), (None, "x" * 300)):
        answer = await small.http.post(RESPONSES, json={"input": text, "truncation": truncation})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.json()["error"]["param"] == "input"
    answer = await small.http.post(RESPONSES, json={"input": "x", "truncation": "some"})
    assert answer.json()["error"]["param"] == "truncation"
