"""Backends that refuse, answer garbage, fall silent or die: each request ends with exactly one status."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import openai
import pytest

from sapwood_common.tenants.api_keys import hash_key
from sapwood_router.flow.relay import progress
from sapwood_router.transport.backend import client as backend_client
from sapwood_testing.router.hostile_backend import (
    Answer,
    HostileBackend,
    chat_chunk,
    events,
    hang,
    raw,
    reply,
    text_chunk,
)

from .conftest import ANSWER, ended

ASK: dict[str, Any] = {"model": "m", "prompt": "go:", "max_tokens": 20}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
HTTP_OK = b"HTTP/1.1 200 OK\r\n"


async def told(front: Any, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    answer = await front.http.post(path, json=body)
    return answer.status_code, answer.json().get("error", {})


def error_event(answer: httpx.Response) -> dict[str, Any]:
    """The error that ends a stream; it has no mark of an end."""
    last = [line for line in answer.text.splitlines() if line][-1]
    found: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return found


REFUSALS: list[tuple[Answer, int, str]] = [
    (reply(400, {"error": {"message": "no such thing", "param": "top_p"}}), 400, "no such thing"),
    (reply(422, {"detail": "unfit"}), 400, "unfit"),
    (reply(413, "<html>"), 400, "413"),
    (reply(404, {"error": {"message": "no model"}}), 404, "no model"),
    (reply(401, {"error": {"message": "bad key"}}), 503, "answered 401: bad key"),
    (reply(429, {"object": "error", "message": "slow down"}, retry_after="7"), 429, "slow down"),
    (reply(500, {"error": {"message": "oops"}}), 500, "oops"),
    (reply(502, "gateway"), 503, "answered 502"),
    (reply(302, "", location="http://127.0.0.1:1/"), 503, "answered 302"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_place_in_the_one_table(hostile: HostileBackend, make_front: Any, stream: bool) -> None:
    async with make_front(hostile.url) as front:
        (member,) = front.router.registry.all()
        for hostile.answer, status, said in REFUSALS:
            member.breaker.reset()
            found, error = await told(front, {**ASK, "stream": stream})
            assert (found, said in error["message"]) == (status, True), error
            assert error["param"] == ("top_p" if said == "no such thing" else None)
        assert sum(ended(front).values()) == len(REFUSALS)


async def test_how_long_to_wait_is_passed_on(hostile: HostileBackend, make_front: Any) -> None:
    hostile.answer = reply(429, {}, retry_after="7")
    async with make_front(hostile.url) as front:
        answer = await front.http.post("/v1/completions", json=ASK)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


WHOLE_GARBAGE = {
    "no HTTP": raw(b"\x00\xff garbage\r\n\r\n"),
    "nothing": raw(b""),
    "half a head": raw(b"HTTP/1.1 200"),
    "no JSON": reply(200, "{"),
    "no object": reply(200, [1]),
    "no choices": reply(200, {"id": "x"}),
    "wrong choices": reply(200, {"choices": [1]}),
    "cut off": raw(HTTP_OK + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"),
    "not UTF-8": raw(HTTP_OK + b"content-type: application/json\r\ncontent-length: 1\r\n\r\n\xff"),
    "deeply nested": reply(200, "[" * 100_000),
    "bad chunks": raw(HTTP_OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
}
STREAM_GARBAGE = {
    "no HTTP": raw(b"\x00\xff garbage\r\n\r\n"),
    "no events": reply(200, {"choices": []}),
    "no event": events(),
    "no JSON": events("{", done=True),
    "the end alone": events(done=True),
    "a usage alone": events({"choices": [], "usage": {"completion_tokens": 1}}, done=True),
    "no object": events([1], done=True),
    "no choices": events({"id": "x"}, done=True),
    "wrong choices": events({"choices": ["x"]}, done=True),
    "wrong delta": events({"choices": [{"index": 0, "delta": 7}]}, done=True),
    **{
        f"a call at {index!r}": events(
            {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": index}]}}]}, done=True
        )
        for index in (4_000_000_000, -1, 1024, "1", 0.5, [])
    },
    "calls that are no list": events({"choices": [{"index": 0, "delta": {"tool_calls": 7}}]}, done=True),
    "a call that is none": events({"choices": [{"index": 0, "delta": {"tool_calls": [7]}}]}, done=True),
    "an error": events({"error": {"message": "oops", "code": 500}}),
    "one without a shape": events({"error": "oops"}),
    "not UTF-8": raw(HTTP_OK + b"content-type: text/event-stream\r\n\r\ndata: \xff\n\n"),
    "an endless event": raw(HTTP_OK + b"content-type: text/event-stream\r\n\r\ndata: " + b"x" * 100_000),
    "only an opening": events(chat_chunk(role="assistant", content="")),
}


@pytest.mark.parametrize(
    ("garbage", "stream"), [(WHOLE_GARBAGE, False), (STREAM_GARBAGE, True)], ids=["whole", "stream"]
)
async def test_garbage_is_one_error(
    hostile: HostileBackend,
    make_front: Any,
    monkeypatch: pytest.MonkeyPatch,
    garbage: dict[str, Answer],
    stream: bool,
) -> None:
    monkeypatch.setattr(backend_client, "_MOST_EVENT_BYTES", 10_000)
    async with make_front(hostile.url) as front:
        (member,) = front.router.registry.all()
        for name, hostile.answer in garbage.items():
            member.breaker.reset()
            status, error = await told(front, {**ASK, "stream": stream})
            assert status in (500, 503) and error["message"], (name, error)
        assert len(hostile.received) == len(garbage) == sum(ended(front).values())
        await front.idle()


@pytest.mark.parametrize(
    ("garbage", "stream"), [(WHOLE_GARBAGE, False), (STREAM_GARBAGE, True)], ids=["whole", "stream"]
)
async def test_garbage_does_no_harm_beside_another_backend(
    hostile: HostileBackend,
    make_own: Any,
    make_front: Any,
    monkeypatch: pytest.MonkeyPatch,
    garbage: dict[str, Answer],
    stream: bool,
) -> None:
    monkeypatch.setattr(backend_client, "_MOST_EVENT_BYTES", 10_000)
    settings = {"policy": "round_robin", "retry_budget": 10.0}
    async with make_own() as own, make_front(hostile.url, own.url, **settings) as front:
        for name, hostile.answer in garbage.items():
            for member in front.router.registry.all():
                member.breaker.reset()
            hostile.received.clear()
            while not hostile.received:  # anybody who's turn it is
                found = await front.http.post("/v1/completions", json={**ASK, "stream": stream})
                assert found.status_code == 200 and "error" not in found.text, (name, found.text)
        assert set(ended(front)) == {"OK"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_text_that_breaks_off_goes_on_elsewhere(
    hostile: HostileBackend, make_own: Any, make_front: Any, path: str, wait_until: Any
) -> None:
    if path == "/v1/completions":
        hostile.answer = events(text_chunk("ab"), text_chunk("c", usage={"completion_tokens": 1}))
        body: dict[str, Any] = {**ASK, "max_tokens": 10}
    else:
        hostile.answer = events(chat_chunk(role="assistant"), chat_chunk(content="ab"), chat_chunk(content="c"))
        body = {**CHAT, "max_completion_tokens": 10}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with make_own() as own, make_front(hostile.url, own.url, policy="round_robin") as front:
        while not hostile.received:
            own.workers[0].calls.clear()
            answer = await front.http.post(path, json=body)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        *chunks, usage = [json.loads(line) for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
        assert "".join(texts) == ANSWER[:11]  # two chunks count as two tokens, and eight were left
        assert len({chunk["id"] for chunk in chunks}) == 1, "the client sees one answer"
        assert sum("role" in choice.get("delta", {}) for choice in choices) == ("chat" in path)
        assert choices[-1]["finish_reason"] == "length"
        assert chunks[-1]["x-sapwood-resumptions"] == 1
        assert usage["usage"]["completion_tokens"] == 10
        assert len(own.calls()) == 1 and own.calls()[0].request.sampling.max_tokens == 8
        assert set(ended(front)) == {"OK"}


@pytest.mark.parametrize(
    ("more", "chunks"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, [chat_chunk(content="abc")]),
        ({"response_format": {"type": "json_object"}}, [chat_chunk(content="abc")]),
        ({"n": 2}, [chat_chunk(content="abc")]),
        ({"logprobs": True}, [chat_chunk(content="abc")]),
        ({"messages": [{"role": "assistant", "content": "I"}]}, [chat_chunk(content="abc")]),
        ({}, [chat_chunk(reasoning_content="hm")]),
        ({}, [chat_chunk(tool_calls=[{"index": 0}])]),
    ],
)
async def test_what_is_more_than_a_text_ends_with_an_error_event(
    hostile: HostileBackend, make_own: Any, make_front: Any, more: dict[str, Any], chunks: list[Any]
) -> None:
    hostile.answer = events(*chunks)
    async with make_own() as own, make_front(hostile.url, own.url, policy="round_robin") as front:
        while not hostile.received:
            answer = await front.http.post("/v1/chat/completions", json={**CHAT, **more, "stream": True})
        assert answer.status_code == 200
        assert "broke off" in error_event(answer)["message"]
        assert "[DONE]" not in answer.text and "UNAVAILABLE" in ended(front)


async def test_what_was_at_its_end_when_it_broke_off_is_whole(hostile: HostileBackend, make_front: Any) -> None:
    async with make_front(hostile.url) as front:
        for last in (text_chunk("c", finish_reason="length"), text_chunk("c")):
            hostile.answer = events(text_chunk("a"), text_chunk("b"), last)
            chunks = [
                chunk async for chunk in await front.openai.completions.create(**ASK | {"max_tokens": 3}, stream=True)
            ]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
            assert chunks[-1].choices[0].finish_reason == "length"
        assert ended(front) == {"OK": 2}


async def test_the_usage_is_told_where_openai_tells_it(hostile: HostileBackend, make_front: Any) -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    filtered = {"choices": [], "prompt_filter_results": []}
    hostile.answer = events(
        filtered, text_chunk("a"), text_chunk("", finish_reason="stop") | {"usage": usage}, done=True
    )
    async with make_front(hostile.url) as front:
        options = {"stream_options": {"include_usage": True}}
        *chunks, last = [c async for c in await front.openai.completions.create(**ASK, **options, stream=True)]
        assert (last.choices, last.usage.model_dump(exclude_unset=True)) == ([], usage)
        assert not any(chunk.usage for chunk in chunks)
        chunks = [chunk async for chunk in await front.openai.completions.create(**ASK, stream=True)]
        assert all(chunk.choices or "prompt_filter_results" in chunk.model_extra for chunk in chunks)
        assert hostile.received[-1].body["stream_options"]["include_usage"], "for the router's own counts"
        metrics = (await front.http.get("/metrics")).text
        assert 'sapwood_router_cached_tokens_total{model="m"} 8.0' in metrics


async def test_a_stream_that_falls_silent_is_broken_off(hostile: HostileBackend, make_front: Any) -> None:
    hold = asyncio.Event()
    hostile.answer = events(text_chunk("abc"), hold=hold)
    async with make_front(hostile.url, backend_silence=0.1) as front:
        answer = await front.http.post("/v1/completions", json={**ASK, "stream": True})
        assert "fell silent" in error_event(answer)["message"]
        assert ended(front) == {"UNAVAILABLE": 1}
    hold.set()


async def test_the_deadline_ends_what_hangs(hostile: HostileBackend, make_front: Any) -> None:
    async with make_front(hostile.url) as front:
        for stream in (False, True):
            answer = await front.http.post(
                "/v1/completions", json={**ASK, "stream": stream}, headers={"x-request-timeout": "0.1"}
            )
            assert answer.status_code == 504
        assert ended(front) == {"DEADLINE_EXCEEDED": 2}
        async with asyncio.timeout(60):
            for request in hostile.received:
                await request.closed.wait()


async def test_what_a_lost_backend_has_not_begun_goes_elsewhere(
    hostile: HostileBackend, make_own: Any, make_front: Any
) -> None:
    async with make_own() as own, make_front(hostile.url, own.url, policy="round_robin", backend_interval=0.5) as front:
        asked = []
        while not hostile.received:
            asked.append(asyncio.create_task(front.http.post("/v1/completions", json=ASK)))
            await asyncio.sleep(0.01)
        hostile.models = hang  # as a stopped process does
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        listed = {worker.address: worker for worker in front.router.registry.all()}
        assert not listed[hostile.url].available
        hostile.models = HostileBackend().models
        await front.ready()


async def test_a_client_that_leaves_takes_its_request_along(
    hostile: HostileBackend, make_front: Any, wait_until: Any
) -> None:
    hostile.answer = events(text_chunk("abc"), hold=asyncio.Event())
    async with make_front(hostile.url) as front:
        async with front.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        async with asyncio.timeout(60):
            await hostile.received[0].closed.wait()
        await front.idle()
        await wait_until(lambda: ended(front) == {"CANCELLED": 1})


async def test_a_backend_that_fails_is_left_alone_until_a_probe_is_answered(
    hostile: HostileBackend, make_front: Any, wait_until: Any
) -> None:
    hostile.answer = reply(500, {})
    async with make_front(hostile.url, breaker_failures=2, breaker_open_seconds=0.2) as front:
        for _ in range(2):
            await told(front, ASK)
        breaker = front.router.registry.all()[0].breaker
        status, error = await told(front, ASK)
        assert (status, len(hostile.received)) == (503, 2) or breaker.admits(), error
        hostile.answer = reply(200, {"choices": [{"index": 0, "text": "well", "finish_reason": "stop"}]})
        await wait_until(breaker.admits)
        assert (await front.openai.completions.create(**ASK)).choices[0].text == "well"
        assert breaker.state.value == "closed"


async def test_the_key_is_sent_to_its_backend_and_the_clients_is_not(
    hostile: HostileBackend, make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENDOR_KEY", "secret")
    hostile.answer = reply(200, {"choices": []})
    spec = f"url={hostile.url}/api,model=theirs,name=m,api-key-env=VENDOR_KEY"
    hostile.models = reply(404, {})
    async with make_cluster(workers=0, backends=(spec,), backend_interval=0.5) as front:
        await front.http.post("/v1/completions", json=ASK, headers={"authorization": "Bearer client"})
        (request,) = hostile.received
        assert (request.path, request.headers["authorization"]) == ("/api/completions", "Bearer secret")
        assert request.body["model"] == "theirs"
        listing = (await front.http.get("/ui/fleet")).text + repr(front.router.registry.all()[0].backend.spec)
        assert "secret" not in listing


async def test_several_models_want_one_to_be_named(hostile: HostileBackend, make_cluster: Any, wait_until: Any) -> None:
    hostile.models = reply(200, {"data": [{"id": "one"}, {"id": "two"}]})
    async with make_cluster(workers=1) as front:
        await front.http.get("/health")
        front.router._fleet.register(hostile.url, None)
        (found,) = [worker for worker in front.router.registry.all() if worker.address == hostile.url]
        await wait_until(lambda: "lists 2 models (one, two)" in (found.problem or ""))
        front.router._fleet.register(f"{hostile.url}#two", None)
        await wait_until(lambda: "two" in front.router.registry.models())
        with pytest.raises(openai.NotFoundError):
            await front.openai.completions.create(model="one", prompt="x")


def endless(*chunks: Any) -> Answer:
    """Streams the chunks again and again until nobody reads."""

    async def answer(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(HTTP_OK + b"content-type: text/event-stream\r\n\r\n")
        sent = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)
        while not request.closed.is_set():
            writer.write(sent)
            await writer.drain()

    return answer


@pytest.mark.parametrize(
    "chunk",
    [chat_chunk(role="assistant"), {"choices": []}, {"choices": [], "filler": "x" * 100_000}],
    ids=["openings", "nothing", "large ones"],
)
async def test_a_backend_that_never_says_anything_is_given_up(
    hostile: HostileBackend, make_front: Any, chunk: Any
) -> None:
    hostile.answer = endless(chunk)
    async with make_front(hostile.url) as front:
        answer = await front.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (answer.status_code, "says nothing" in answer.text) == (500, True), answer.text
        assert ended(front) == {"INTERNAL": 1}


async def test_the_text_that_another_backend_could_continue_is_bounded(
    hostile: HostileBackend, make_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    take = progress.Progress.take

    def counted(self: progress.Progress, chunk: Any) -> Any:
        found = take(self, chunk)
        kept.append(len(self.text))
        return found

    monkeypatch.setattr(progress.Progress, "take", counted)
    monkeypatch.setattr(progress, "_MOST_TEXT", 10_000)
    hostile.answer = endless(chat_chunk(content="x" * 1000))
    async with make_front(hostile.url) as front:
        read = 0
        async with front.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            async for piece in answer.aiter_bytes():
                read += len(piece)
                if read > 100_000:
                    break
        await front.idle()
        assert max(kept) <= 10_000 and kept[-1] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [10**9, 10**30, 10**400, -5, True, 1.5, "7"], ids=lambda value: str(value)[:5])
async def test_counts_that_cannot_be_are_no_usage(
    hostile: HostileBackend, make_cluster: Any, tmp_path: Any, stream: bool, count: Any
) -> None:
    usage = {
        "prompt_tokens": count,
        "completion_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": {"cached_tokens": count},
    }
    choice = {"index": 0, "text": "well", "finish_reason": "stop"}
    if stream:
        hostile.answer = events({"choices": [choice]}, {"choices": [], "usage": usage}, done=True)
    else:
        hostile.answer = reply(200, {"choices": [choice], "usage": usage})
    keys = tmp_path / "keys"
    keys.write_text(f"alice {hash_key('k')} tokens=100000\n")
    headers = {"authorization": "Bearer k"}
    async with make_cluster(workers=0, backends=(f"url={hostile.url}",), api_keys=keys) as front:
        for _ in range(3):  # an overdrawn key would be refused
            answer = await front.http.post("/v1/completions", json={**ASK, "stream": stream}, headers=headers)
            assert (answer.status_code, "well" in answer.text) == (200, True), answer.text
        assert ended(front) == {"OK": 3}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x-unknown"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_compressed_unasked_is_refused(
    hostile: HostileBackend, make_front: Any, coding: str, stream: bool
) -> None:
    kind = "text/event-stream" if stream else "application/json"
    content = gzip.compress(b'data: {"choices": []}\n\n' * 1000)
    head = f"content-type: {kind}\r\ncontent-encoding: {coding}\r\ncontent-length: {len(content)}\r\n\r\n"
    hostile.answer = raw(HTTP_OK + head.encode() + content)
    async with make_front(hostile.url) as front:
        status, error = await told(front, {**ASK, "stream": stream})
        assert status == 500 and f"in {coding}" in error["message"], error


@pytest.mark.parametrize(
    "name", ["x" * 1_000_000, "a\nb", "a\x1b[31mb", "", "\u202eb", "a b\r\nx-evil: 1"], ids=lambda name: repr(name)[:12]
)
async def test_a_backend_whose_model_has_no_name_for_clients_is_down_and_says_why(
    hostile: HostileBackend, make_cluster: Any, wait_until: Any, name: str
) -> None:
    hostile.models = reply(200, {"data": [{"id": name}]})
    async with make_cluster(workers=1) as front:
        front.router._fleet.register(hostile.url, None)
        (found,) = [worker for worker in front.router.registry.all() if worker.address == hostile.url]
        await wait_until(lambda: "name" in (found.problem or ""))
        assert not found.available and len(found.problem) < 500, found.problem
        assert list(front.router.registry.models()) == ["fake"]
