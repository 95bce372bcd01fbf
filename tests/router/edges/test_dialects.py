"""A path that is not there, or takes another method, is told so in the shape of its API's errors."""

import json

import anthropic
import pytest

from sapwood_router.edges.anthropic.messages import IGNORED

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/x/results", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)
async def test_below_messages_errors_have_anthropics_shape(cluster, method, path, status, kind) -> None:
    answer = await cluster.http.request(method, path)
    assert answer.status_code == status
    told = answer.json()
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", kind, answer.headers["request-id"])
    assert path in told["error"]["message"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_what_says_that_it_is_anthropics_is_answered_so(cluster) -> None:
    says = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/skills", "/v1/models/none"):
        answer = await cluster.http.get(path, headers=says)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        answer = await cluster.http.get(path)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.batches.list()
        assert caught.value.body["error"]["type"] == "not_found_error"


async def test_threads_are_refused_with_the_code_that_clients_know(cluster) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}):
        body = {"messages": HI, "max_tokens": 9, "thread": thread}
        answer = await cluster.http.post("/v1/messages", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "thread" not in IGNORED
    answer = await cluster.http.post("/v1/messages", json={"messages": HI, "max_tokens": 9, "thread": None})
    assert answer.status_code == 200
    assert "details" not in (await cluster.http.post("/v1/messages", json={})).json()["error"]


async def test_the_tool_runner_of_anthropics_client_goes_on_without_threads(cluster) -> None:
    ran = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        ran.append(city)
        return "sunny"

    calls = iter(['<call weather>{"city": "Rome"}</call>', "It is sunny."])
    for worker in cluster.workers:
        from sapwood_testing.router.fake_tokenizer import encode

        worker.script.tokens = lambda prompt: encode(next(calls))[1:]
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(model="fake", max_tokens=99, messages=HI, tools=[weather])
        last = await runner.until_done()
    assert ran == ["Rome"]
    assert last.content[0].text == "It is sunny."
    roles = [message.role for message in cluster.tokenizer.chats[-1].messages]
    assert roles == ["user", "assistant", "tool"], json.dumps(roles)
