"""A router in front of another cluster of ours, asked with OpenAI's client."""

from __future__ import annotations

from typing import Any

import grpc
import openai
import pytest

from sapwood.v1 import router_pb2

from .conftest import ANSWER, ended

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}


async def test_chats_and_completions_go_through_whole_and_streamed(make_own: Any, make_front: Any) -> None:
    async with make_own() as own, make_front(own.url) as front:
        client = front.openai
        assert [model.id async for model in client.models.list()] == ["m"]
        chat = await client.chat.completions.create(**CHAT)
        assert (chat.model, chat.choices[0].message.content) == ("m", ANSWER)
        assert chat.usage is not None and chat.usage.completion_tokens == len(ANSWER) + 1
        for model in ("m", ""):  # an empty name means the only model
            completion = await client.completions.create(model=model, prompt="go:", max_tokens=3)
            assert (completion.model, completion.choices[0].text) == ("m", "abc")
            assert completion.choices[0].finish_reason == "length"
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert {(chunk.model, chunk.id, chunk.usage) for chunk in chunks} == {("m", chunks[0].id, None)}
        assert chunks[-1].choices[0].finish_reason == "stop"
        asked = await client.completions.create(
            model="m", prompt="go:", max_tokens=99, stream=True, stream_options={"include_usage": True}
        )
        *parts, last = [chunk async for chunk in asked]
        assert "".join(chunk.choices[0].text for chunk in parts) == ANSWER
        assert last.choices == [] and last.usage.completion_tokens == len(ANSWER) + 1
        assert ended(front) == {"OK": 5}
        await front.idle()


async def test_tools_ids_and_unknown_parameters_reach_the_backend(make_own: Any, make_front: Any) -> None:
    async with make_own() as own, make_front(own.url) as front:
        own.workers[0].script.tokens = lambda prompt: [letter + 3 for letter in b"<call f>{}</call>"]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        headers = {"x-request-id": "mine"}
        for stream in (False, True):
            answer = await front.http.post(
                "/v1/chat/completions", json={**CHAT, "tools": [tool], "stream": stream}, headers=headers
            )
            assert answer.status_code == 200, answer.text
            assert '"tool_calls"' in answer.text and '"name":"f"' in answer.text
            assert answer.headers["x-request-id"] == "mine"
        assert [call.request_id for call in own.calls()] == ["mine", "mine"]
        with pytest.raises(openai.BadRequestError) as caught:
            await front.openai.chat.completions.create(**CHAT, extra_body={"temperature": "warm"})
        assert caught.value.param == "temperature"
        assert ended(front) == {"OK": 2, "INVALID_ARGUMENT": 1}


async def test_a_session_is_refused_where_a_backend_has_the_model(make_own: Any, make_front: Any) -> None:
    async with make_own() as own, make_front(own.url) as front:
        session = (await front.http.post("/v1/sessions", json={})).json()["id"]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await front.openai.completions.create(
                    model="m", prompt="go:", stream=stream, extra_body={"session": session}
                )
            assert caught.value.param == "session"
        assert not own.calls(), "what would answer without what the session holds was not asked"
        answer = await front.openai.completions.create(
            model="m", prompt="go:", max_tokens=1, extra_body={"session": None}
        )
        assert answer.choices[0].text == "a"


async def test_a_backend_is_listed_drained_and_removed_as_workers_are(
    make_own: Any, make_front: Any, wait_until: Any
) -> None:
    async with make_own() as first, make_own() as second, make_front(first.url) as front:
        url = f"{second.url}#fake"  # by another name: a model of its own
        await front.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=url))
        await wait_until(lambda: "fake" in front.router.registry.context_lengths())
        await front.ready()
        listed = await front.stub.ListWorkers(router_pb2.ListWorkersRequest())
        assert {(worker.address, worker.model, worker.healthy) for worker in listed.workers} == {
            (first.url, "m", True),
            (url, "fake", True),
        }
        fleet = (await front.http.get("/ui/fleet")).json()
        assert {row["address"] for row in fleet["router"]["workers"]} == {first.url, url}
        assert (await front.openai.completions.create(model="fake", prompt="go:", max_tokens=1)).choices[0].text == "a"
        await front.stub.DrainWorker(router_pb2.DrainWorkerRequest(address=url))
        with pytest.raises(openai.InternalServerError) as caught:
            await front.openai.completions.create(model="fake", prompt="go:")
        assert caught.value.status_code == 503
        await front.stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=url))
        with pytest.raises(openai.NotFoundError):
            await front.openai.completions.create(model="fake", prompt="go:")
        for wrong in ("http://", "ftp://host:1x", "host"):
            with pytest.raises(grpc.aio.AioRpcError):
                await front.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=wrong))


async def test_conversations_return_to_the_backend_that_has_their_beginning(make_own: Any, make_front: Any) -> None:
    async with make_own() as first, make_own() as second, make_front(first.url, second.url) as front:
        for own in (first, second):
            own.workers[0].script.tokens = lambda prompt: [68]
        for number in range(4):
            opening = {"role": "user", "content": str(number) * 20_000}
            for length in range(1, 4):
                messages = [opening] * length
                await front.openai.chat.completions.create(model="m", messages=messages)
        counts = [len(own.calls()) for own in (first, second)]
        assert sum(counts) == 12
        assert all(count % 3 == 0 and count for count in counts), "whole conversations, on both"


async def test_workers_models_and_backends_models_stand_side_by_side(make_own: Any, make_cluster: Any) -> None:
    async with (
        make_own() as own,
        make_cluster(workers=1, backends=(f"url={own.url},name=m",), backend_interval=0.5) as front,
    ):
        assert [model.id async for model in front.openai.models.list()] == ["fake", "m"]
        assert (await front.openai.completions.create(model="fake", prompt="hi")).choices[0].text == "hi"
        assert (await front.openai.completions.create(model="m", prompt="go:", max_tokens=99)).choices[0].text == ANSWER
        for path, body in (
            ("/v1/responses", {"model": "m", "input": "hi"}),
            ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": CHAT["messages"]}),
            ("/v1/embeddings", {"model": "m", "input": "hi"}),
            ("/tokenize", {"model": "m", "prompt": "hi"}),
        ):
            answer = await front.http.post(path, json=body)
            assert answer.status_code == 400 and "is a backend's" in answer.text, (path, answer.text)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await front.generate("hi", model="m")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_name_that_workers_serve_goes_to_backends_only_while_no_worker_is_there(
    make_own: Any, make_cluster: Any, wait_until: Any
) -> None:
    async with make_own() as own, make_cluster(workers=1, backends=(f"url={own.url}",), backend_interval=0.5) as front:
        assert [model.id async for model in front.openai.models.list()] == ["fake"]
        assert (await front.openai.completions.create(model="fake", prompt="go:")).choices[0].text == "go:"
        await front.workers[0].kill()
        await wait_until(lambda: front.router.registry.relays("fake"))
        assert (await front.openai.completions.create(model="fake", prompt="go:", max_tokens=99)).choices[
            0
        ].text == ANSWER
