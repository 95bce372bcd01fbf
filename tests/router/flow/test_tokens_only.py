"""Answers that are token ids alone: they pass the tokenizer by, and everything else holds for them as for text."""

import asyncio
import json
import re
import socket
from functools import partial

import grpc
import pytest

from sapwood.v1 import common_pb2, router_pb2
from sapwood_common import errors
from sapwood_router.request.output import WINDOW, TokenStream
from sapwood_testing.router.fake_tokenizer import encode
from sapwood_testing.router.script import Script

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [2, 7, 90]
ANSWER = list(range(89, 40, -1))
END = 1


def countdown(prompt) -> list[int]:
    """What follows depends on where the tokens before it end."""
    return list(range(prompt[-1] - 1, 40, -1))


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(3) as running:
        for worker in running.workers:
            worker.script.tokens = countdown
        # Nothing of what follows may need it: its calls would fail, and no stream of its would ever end.
        await running.tokenizer.kill()
        yield running


def start(cluster, **fields):
    request = router_pb2.RouterGenerateRequest(
        tokens=common_pb2.TokenIds(ids=PROMPT), detokenize=False, sampling=common_pb2.SamplingParams(**fields)
    )
    return cluster.stub.Generate(request, timeout=60)


async def events_of(cluster, **body) -> list[dict]:
    body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "detokenize": False, **body}
    answer = await cluster.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def ids_of(events, index=0) -> list[int]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert all(choice["text"] == "" for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    return [token for choice in choices for token in choice["token_ids"]]


async def test_a_grpc_stream_has_the_ids_the_usage_and_no_text(cluster) -> None:
    responses = [response async for response in start(cluster, n=2, logprobs=1)]
    assert not any(response.text for response in responses)
    for index in (0, 1):
        own = [response for response in responses if response.index == index]
        assert [token for response in own for token in response.token_ids] == [*ANSWER, END]
        assert [found.logprob for response in own for found in response.logprobs] == [-t / 8 for t in [*ANSWER, END]]
        assert [response.finish_reason for response in own if response.finish_reason] == [1]
        assert (own[-1].usage.prompt_tokens, own[-1].usage.completion_tokens) == (len(PROMPT), len(ANSWER) + 1)
    await cluster.idle()


async def test_an_http_stream_has_them_in_its_chunks(cluster) -> None:
    events = await events_of(cluster, n=2, return_token_ids=True, stream_options={"include_usage": True})
    for index in (0, 1):
        assert ids_of(events, index) == [*ANSWER, END]
        prompts = [c.get("prompt_token_ids") for e in events for c in e["choices"] if c["index"] == index]
        assert prompts == [PROMPT, *[None] * (len(prompts) - 1)]
    assert events[-1]["usage"]["completion_tokens"] == 2 * (len(ANSWER) + 1)
    events = await events_of(cluster)
    assert ids_of(events) == [*ANSWER, END]
    assert not any("prompt_token_ids" in choice for event in events for choice in event["choices"])
    await cluster.idle()


def countdown_from_the_second(script: Script, prompt) -> list[int]:
    """A worker's that fails anybody who comes first, but continues with what another has begun."""
    script.fail_after = 10 if len(prompt) == len(PROMPT) else None
    return countdown(prompt)


@pytest.mark.parametrize("packs", [True, False])
async def test_tokens_that_come_one_by_one_go_on_one_by_one_across_a_loss(make_cluster, packs) -> None:
    async with make_cluster(2) as cluster:
        for worker in cluster.workers:
            worker.packs_tokens = packs
            worker.script = Script(tokens=countdown, chunk=1, delay=0.002, error=errors.UnavailableError("no more"))
            worker.script.tokens = partial(countdown_from_the_second, worker.script)
        events = await events_of(cluster, stream_options={"include_usage": True})
        assert ids_of(events) == [*ANSWER, END]
        assert len(cluster.calls()) == 2
        assert len(events) > 10
        assert events[-1]["usage"]["completion_tokens"] == len(ANSWER) + 1
        metrics = (await cluster.http.get("/metrics")).text
        (gaps,) = re.findall(r'sapwood_router_inter_token_seconds_count\{model="fake"\} (\d+)', metrics)
        assert int(gaps) > 10
        await cluster.idle()


async def test_a_body_has_them_too(cluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "detokenize": False}
    answer = (await cluster.http.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", ANSWER[:5], "length")
    assert "prompt_token_ids" not in choice
    assert answer["usage"]["completion_tokens"] == 5
    answer = (await cluster.http.post("/v1/completions", json={**body, "return_token_ids": True})).json()
    assert answer["choices"][0]["prompt_token_ids"] == PROMPT


async def test_a_stream_goes_on_where_its_worker_was_lost(cluster) -> None:
    gate = asyncio.Event()
    for worker in cluster.workers:
        worker.script.delay = 0.005
        worker.script.gate, worker.script.gate_after = gate, 15  # it does not end before it is lost
    call = start(cluster, seed=3)
    responses = [await call.read()]
    await next(w for w in cluster.workers if any(seen.outcome == "running" for seen in w.calls)).kill()
    gate.set()
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert [token for response in responses for token in response.token_ids] == [*ANSWER, END]
    assert responses[-1].usage.completion_tokens == len(ANSWER) + 1
    assert dict(await call.trailing_metadata())["x-sapwood-resumptions"] == "1"
    first, second = sorted(cluster.calls(), key=lambda seen: seen.request.output_tokens)
    assert list(second.request.token_ids) == PROMPT + ANSWER[: second.request.output_tokens]
    assert first.request.sampling.seed == second.request.sampling.seed == 3


async def test_what_a_worker_refuses_is_the_streams_error(cluster, expect_error) -> None:
    for worker in cluster.workers:
        worker.script.fail_after, worker.script.error = 2, errors.InvalidArgumentError("no", field="sampling.seed")

    async def read() -> None:
        async for _ in start(cluster):
            pass

    assert (await expect_error(read(), INVALID))[1] == "sampling.seed"


async def test_what_needs_the_text_is_refused_by_name(make_cluster, expect_error) -> None:
    async with make_cluster(workers=1) as cluster:
        tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
        chat = router_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", content="hi")])
        for field, request in (
            ("stop", router_pb2.RouterGenerateRequest(text="a", detokenize=False, stop=["x"])),
            ("tools", router_pb2.RouterGenerateRequest(messages=chat, detokenize=False, tools=tools)),
        ):
            assert (await expect_error(cluster.stub.Generate(request).read(), INVALID))[1] == field
        for field, value in (("stop", "x"), ("echo", True)):
            body = {"prompt": "a", "detokenize": False, field: value}
            answer = await cluster.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        # A prompt that is text, a grammar and the texts of probabilities are the tokenizer's matter all the same.
        body = {"prompt": "ab", "detokenize": False, "logprobs": 1, "regex": "ab", "max_tokens": 9}
        (choice,) = (await cluster.http.post("/v1/completions", json=body)).json()["choices"]
        assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"][:2]) == (
            "",
            [*encode("ab")[1:], END],
            ["a", "b"],
        )
        assert cluster.calls()[-1].request.grammar.compiled
        assert not cluster.tokenizer.parsed


async def test_ids_can_come_with_the_text(make_cluster) -> None:
    async with make_cluster(workers=1) as cluster:
        body = {"prompt": "añb", "return_token_ids": True, "max_tokens": 9}
        (choice,) = (await cluster.http.post("/v1/completions", json=body)).json()["choices"]
        ids = [*encode("añb")[1:], END]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("añb", ids, encode("añb"))
        async with cluster.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = [line[6:] async for line in answer.aiter_lines() if line]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert "".join(choice["text"] for choice in choices) == "añb"
        assert [token for choice in choices for token in choice["token_ids"]] == ids


async def test_a_slow_reader_holds_the_worker_back_and_gets_everything(cluster) -> None:
    sent = [4_000_000_000] * 800_000  # more bytes than the sockets take in
    for worker in cluster.workers:
        worker.script.tokens, worker.script.chunk = (lambda prompt: sent), 4096
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.connect(("127.0.0.1", cluster.router.http_port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    body = json.dumps({"prompt": PROMPT, "max_tokens": len(sent) + 1, "stream": True, "detokenize": False}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    parts = [await reader.read(100)]
    (seen,) = cluster.calls()
    before = -1
    while before != seen.sent_tokens:
        before = seen.sent_tokens
        await asyncio.sleep(0.2)
    assert seen.sent_tokens < len(sent)
    while b"[DONE]" not in b"".join(parts[-3:]):
        parts.append(await reader.read(1 << 20))
    pieces = re.findall(rb'"token_ids":(\[[^]]*\])', b"".join(parts))
    assert [token for piece in pieces for token in json.loads(piece)] == [*sent, END]
    writer.close()
    await cluster.idle()


def test_a_token_stream_counts_merges_and_fails_as_told() -> None:
    stream = TokenStream()
    stream.push([5, 6])
    stream.push([7])
    chunk = stream.take()
    assert (chunk.tokens, chunk.ended) == (3, False)
    stream.push([1] * WINDOW)
    assert stream.full
    stream.fail(errors.UnavailableError("gone"))
    stream.fail(errors.InternalError("later"))
    assert not stream.full
    assert stream.take().tokens == 3 + WINDOW
    with pytest.raises(errors.UnavailableError):
        stream.take()
    whole = TokenStream(whole=True)
    whole.push([1] * 2 * WINDOW)
    assert not whole.full and not whole.ready
    whole.push([2], end=True)
    whole.push([3])
    assert whole.take().tokens == 2 * WINDOW + 1


async def test_a_router_without_a_tokenizer_serves_token_ids_and_refuses_text(make_cluster, expect_error) -> None:
    async with make_cluster(1, tokenizer="none") as cluster:
        cluster.workers[0].script.tokens = countdown
        assert cluster.router.problem() is None
        assert (await cluster.http.get("/health")).status_code == 200
        assert ids_of(await events_of(cluster)) == [*ANSWER, END]
        vectors = await cluster.http.post("/v1/embeddings", json={"input": PROMPT})
        assert vectors.status_code == 200, vectors.text
        for path, body in (
            ("/v1/completions", {"prompt": "text", "detokenize": False}),
            ("/v1/completions", {"prompt": PROMPT}),
            ("/v1/completions", {"prompt": PROMPT, "detokenize": False, "regex": "a+"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/embeddings", {"input": "text"}),
            ("/tokenize", {"prompt": "text"}),
        ):
            answer = await cluster.http.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "no tokenizer" in answer.json()["error"]["message"], (path, answer.text)
        request = router_pb2.RouterGenerateRequest(text="hi")

        async def read() -> None:
            async for _ in cluster.stub.Generate(request):
                pass

        assert "no tokenizer" in (await expect_error(read(), INVALID))[0]
        assert not cluster.tokenizer.request_ids
        await cluster.idle()
