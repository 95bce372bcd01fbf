"""What belongs to a response that is kept: its input, its end before time; and what is counted or written in short."""

import asyncio

import openai
import pytest

from sapwood.v1 import common_pb2

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hello"}


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(workers=1) as running:
        yield running


async def test_the_items_of_an_input_are_listed_by_the_client(cluster) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "x"}
    assistant = {"role": "assistant", "content": "hey"}
    first = await cluster.openai.responses.create(model="fake", input=[USER, assistant, call, output])
    page = await cluster.openai.responses.input_items.list(first.id, order="asc")
    assert [item.type for item in page.data] == ["message", "message", "function_call", "function_call_output"]
    assert (page.data[0].content[0].type, page.data[0].content[0].text) == ("input_text", "hello")
    assert page.data[1].content[0].type == "output_text"
    pages = await cluster.openai.responses.input_items.list(first.id, limit=3)
    assert [item.id async for item in pages] == [item.id for item in page.data[::-1]]
    second = await cluster.openai.responses.create(model="fake", input="hi")
    (item,) = (await cluster.openai.responses.input_items.list(second.id)).data
    assert (item.role, item.content[0].text) == ("user", "hi")
    for query, param in (({"limit": 0}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order")):
        answer = await cluster.http.get(f"{RESPONSES}/{first.id}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = await cluster.http.get(f"{RESPONSES}/{first.id}/input_items", params={"after": "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "after")
    for path in ("none/input_items", f"{first.id}/other"):
        assert (await cluster.http.get(f"{RESPONSES}/{path}")).status_code == 404


async def test_a_response_tells_the_sampling_that_the_models_files_ask_for(cluster, wait_until) -> None:
    (worker,) = cluster.workers
    await worker.kill()
    worker.sampling_defaults = common_pb2.SamplingParams(temperature=0.7, top_p=0.95)
    await worker.start()
    await wait_until(lambda: cluster.router.registry.sampling_defaults("fake"))
    for given, told in (
        ({}, (0.7, 0.95)),
        ({"temperature": 1, "top_p": 0.5}, (1, 0.5)),
        ({"top_p": 1.0}, (0.7, 1)),
    ):
        answer = await cluster.openai.responses.create(model="fake", input="hello", **given)
        assert (answer.temperature, answer.top_p) == told
        async with cluster.openai.responses.stream(model="fake", input="hello", **given) as stream:
            async for event in stream:
                if event.type in ("response.created", "response.completed"):
                    assert (event.response.temperature, event.response.top_p) == told


async def until(cluster, response_id: str, status: str):
    async with asyncio.timeout(60):
        while (found := await cluster.openai.responses.retrieve(response_id)).status != status:
            await asyncio.sleep(0.01)
    return found


async def test_a_response_in_the_background_is_made_and_kept(cluster) -> None:
    begun = await cluster.openai.responses.create(model="fake", input="hello", background=True)
    assert (begun.status, begun.background, begun.output, begun.model) == ("queued", True, [], "fake")
    done = await until(cluster, begun.id, "completed")
    assert (done.output_text, done.background) == ("<user>hello<assistant>", True)
    more = await cluster.openai.responses.create(model="fake", input="x", previous_response_id=begun.id)
    assert cluster.tokenizer.chats[-1].messages[0].content == "hello"
    assert more.status == "completed"
    assert (await cluster.openai.responses.cancel(begun.id)).status == "completed", "it has ended"
    await cluster.idle()


async def test_a_response_in_the_background_is_cancelled(cluster, wait_until) -> None:
    gate = asyncio.Event()
    cluster.workers[0].script.gate, cluster.workers[0].script.gate_after = gate, 3
    begun = await cluster.openai.responses.create(model="fake", input="hello", background=True)
    await wait_until(lambda: [call.sent_tokens for call in cluster.calls()] == [3])
    await asyncio.sleep(0.05)
    answer = await cluster.http.post(RESPONSES, json={"input": "x", "previous_response_id": begun.id})
    assert (answer.status_code, "in progress" in answer.text) == (400, True)
    cancelled = await cluster.openai.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "<us")
    assert (await cluster.openai.responses.retrieve(begun.id)).status == "cancelled"
    await wait_until(lambda: cluster.calls()[0].outcome == "cancelled")
    gate.clear()
    at_once = await cluster.openai.responses.create(model="fake", input="hello", background=True)
    assert (await cluster.openai.responses.cancel(at_once.id)).status == "cancelled"
    deleted = await cluster.openai.responses.create(model="fake", input="hello", background=True)
    await cluster.openai.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        await cluster.openai.responses.retrieve(deleted.id)
    await cluster.idle()


async def test_a_response_that_its_client_waits_for_cannot_be_cancelled(cluster) -> None:
    done = await cluster.openai.responses.create(model="fake", input="hello")
    with pytest.raises(openai.BadRequestError):
        await cluster.openai.responses.cancel(done.id)
    with pytest.raises(openai.NotFoundError):
        await cluster.openai.responses.cancel("resp_none")
    for wrong in ({"stream": True}, {"store": False}):
        answer = await cluster.http.post(RESPONSES, json={"input": "x", "background": True, **wrong})
        assert answer.status_code == 400
    assert (await cluster.http.post(f"{RESPONSES}/{done.id}", json={})).status_code == 404


async def test_a_failure_in_the_background_is_kept(cluster) -> None:
    begun = await cluster.openai.responses.create(model="fake", input="x" * 100_001, background=True)
    failed = await until(cluster, begun.id, "failed")
    assert failed.error.code == "context_length_exceeded"


async def test_the_tokens_of_an_input_are_counted(cluster) -> None:
    counted = await cluster.openai.responses.input_tokens.count(
        model="fake", input=[USER, {"role": "assistant", "content": "a"}], instructions="Be kind."
    )
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        len("_<system>Be kind.<user>hello<assistant>a<assistant>") - len("_") + 1,
    )
    assert not cluster.calls()
    first = await cluster.openai.responses.create(model="fake", input="hello")
    longer = await cluster.openai.responses.input_tokens.count(model="fake", input="x", previous_response_id=first.id)
    assert longer.input_tokens > counted.input_tokens
    answer = await cluster.http.post(f"{RESPONSES}/input_tokens", json={"input": [{"role": "robot", "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].role")
    for path in ("", "/input_tokens", "/compact"):
        answer = await cluster.http.post(f"{RESPONSES}{path}", json={})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


async def test_a_conversation_is_written_in_short_and_gone_on_from(cluster) -> None:
    cluster.answer_with("They said hello.")
    history = [USER, {"role": "assistant", "content": "hey"}, {"role": "user", "content": "more"}]
    short = await cluster.openai.responses.compact(model="fake", input=history, instructions="S")
    assert short.object == "response.compaction"
    assert [item.type for item in short.output] == ["message", "message", "compaction"]
    assert short.usage.output_tokens > 0
    turns = [(message.role, message.content) for message in cluster.tokenizer.chats[-1].messages]
    assert turns[:4] == [("system", "S"), ("user", "hello"), ("assistant", "hey"), ("user", "more")]
    assert turns[4][0] == "user"
    going_on = [item.model_dump(exclude_none=True) for item in short.output] + [{"role": "user", "content": "Well?"}]
    await cluster.openai.responses.create(model="fake", input=going_on)
    ((role, content),) = [(message.role, message.content) for message in cluster.tokenizer.chats[-1].messages]
    assert role == "user"
    for part in ("hello", "more", "They said hello.", "Well?"):
        assert part in content
    foreign = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA=="}
    answer = await cluster.http.post(RESPONSES, json={"input": [foreign, USER]})
    assert (answer.status_code, answer.headers["x-sapwood-ignored"]) == (200, "input=compaction")
    answer = await cluster.http.post(f"{RESPONSES}/compact", json={"model": "fake"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
