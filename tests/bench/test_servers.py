"""Loads on a real router, over HTTP and gRPC, and on servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import trustme

from sapwood.bench.arrivals import constant
from sapwood.bench.benchmark import Benchmark, Level, Plan, Result
from sapwood.bench.data.conversation import Ask, Conversation
from sapwood.bench.data.lengths import Lengths
from sapwood.bench.data.source import Source
from sapwood.bench.data.trace import TraceRow
from sapwood.bench.load import Load
from sapwood.bench.measures import measure
from sapwood.bench.targets.open_target import Where, open_target
from sapwood.bench.targets.openai_http import parse_url
from sapwood.bench.targets.record import Record
from sapwood.bench.targets.target import Sampling, TargetError
from sapwood_common.errors import InternalError
from sapwood_testing.router.fake_tokenizer import encode

SHORT = Source(inputs=Lengths(20, 40), outputs=Lengths(4, 8))


def where(served: Any, kind: str, **fields: Any) -> Where:
    return Where(served.url, **fields) if kind == "http" else Where(None, served.grpc, **fields)


async def bench(where: Where, source: Source = SHORT, *levels: Level, **fields: Any) -> Result:
    fields = {"requests": 12, "warm_up": 2, **fields}
    return await Benchmark(Plan(where, source, levels or (Level("concurrency", 3),), **fields)).run()


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_every_request_is_answered_and_counted_by_the_servers_usage(served: Any, kind: str, api: Any) -> None:
    result = await bench(where(served, kind, api=api), SHORT, Level("concurrency", 3), Level("rate", 200.0))
    calls = [call for worker in served.workers for call in worker.calls]
    assert len(calls) == 2 + 2 + 12 + 12  # what finds the tokens of a word, warm-up, the two loads
    assert result.model == "fake"
    for found, seen in zip(result.levels, (calls, calls), strict=True):
        measures = found.measures
        assert (measures.requests, measures.succeeded, measures.failures) == (12, 12, {})
        tokens = [record.completion_tokens for record in found.run.records]
        assert measures.output_tokens == sum(token or 0 for token in tokens)
        assert all(4 <= (token or 0) <= 8 for token in tokens)
        assert {record.prompt_tokens for record in found.run.records} <= {len(call.request.token_ids) for call in seen}
        assert measures.ttft is not None and measures.itl is not None and measures.tpot is not None
        assert measures.ttft.count == measures.tpot.count == 12
        assert measures.ttft.max <= measures.e2e.max  # type: ignore[union-attr]
    assert not any(record.pieces for found in result.levels for record in found.run.records), "texts are not kept"
    closed, opened = result.levels
    assert closed.measures.dispatch_lag is None
    assert opened.measures.dispatch_lag is not None
    prompts = {tuple(call.request.token_ids) for call in calls}
    assert len(prompts) == len(calls), "no load finds another's prompts cached"


async def test_words_are_counted_in_the_servers_tokens(served: Any) -> None:
    result = await bench(where(served, "http"), Source(inputs=Lengths(300, 300), outputs=Lengths(2, 2)))
    assert result.tokens_a_word is not None and result.tokens_a_word > 3  # a token a byte
    lengths = [record.prompt_tokens or 0 for record in result.levels[0].run.records]
    assert 240 <= sum(lengths) / len(lengths) <= 360


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_token_ids_have_exactly_the_length_asked_for(served: Any, kind: str) -> None:
    source = Source(inputs=Lengths(33, 33), outputs=Lengths(3, 3), token_ids=(70, 90))
    result = await bench(where(served, kind), source)
    assert {record.prompt_tokens for record in result.levels[0].run.records} == {33}


@pytest.mark.parametrize(("kind", "api"), [("http", "chat"), ("http", "completions"), ("grpc", "chat")])
async def test_a_conversations_turns_hold_what_was_said_before(served: Any, kind: str, api: Any) -> None:
    source = Source("multi-turn", inputs=Lengths(20, 20), outputs=Lengths(5, 5), turns=Lengths(3, 3))
    result = await bench(where(served, kind, api=api), source, Level("concurrency", 1), requests=6)
    lengths = [record.prompt_tokens or 0 for record in result.levels[0].run.records]
    for conversation in (lengths[:3], lengths[3:]):
        assert conversation[0] < conversation[1] < conversation[2]
    found = result.levels[0].measures
    assert found.succeeded == 6


async def test_grammars_reach_the_server_and_answers_are_looked_at(served: Any) -> None:
    for kind, answer, invalid in (("http", "[1]", 0), ("grpc", "[1", 3)):  # the fake workers keep to no grammar
        for worker in served.workers:
            worker.script.tokens = lambda prompt, answer=answer: encode(answer)[1:]
        source = Source("json-schema", outputs=Lengths(4, 4))
        result = await bench(where(served, kind), source, warm_up=0, requests=3)
        assert result.levels[0].measures.invalid_json == invalid
    grammars = [call.request.grammar for worker in served.workers for call in worker.calls]
    assert sum(bool(grammar.compiled) for grammar in grammars) == 6


async def test_a_trace_is_played(served: Any) -> None:
    rows = tuple(TraceRow(number / 100, 40 + number, 3, (1, number)) for number in range(8))
    source = Source(trace=rows, block_tokens=16, token_ids=(50, 99))
    result = await bench(where(served, "grpc"), source, Level("trace", 2.0), requests=None)
    found = result.levels[0]
    assert [record.prompt_tokens for record in found.run.records] == [40 + number for number in range(8)]
    assert (found.measures.cached_tokens or 0) > 0


class Held:
    """A target that answers when it is told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked: list[Ask] = []

    async def connect(self) -> str:
        return "held"

    async def ask(self, ask: Ask, record: Record) -> None:
        record.sent = record.due
        self.asked.append(ask)
        await self.open.wait()
        record.arrivals.append(record.sent)
        record.ended = record.sent

    async def close(self) -> None:
        """Nothing is open."""


def prompts() -> Any:
    return repeat(Conversation((Ask("a", 1),)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_open_loop_never_waits_for_answers_and_a_closed_one_does() -> None:
    for kind, under_way in (("open", 30), ("closed", 4)):
        target = Held()
        load = Load(target, prompts(), "completions", requests=30)
        running = asyncio.create_task(load.open(constant(1000.0)) if kind == "open" else load.closed(4))
        await until(lambda target=target, under_way=under_way: len(target.asked) == under_way)  # type: ignore[misc]
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(target.asked) == under_way
        target.open.set()
        run = await running
        assert len(run.records) == len(run.ended) == 30
        if kind == "open":
            assert [round(record.due - run.began, 6) for record in run.records] == list(islice(constant(1000.0), 30))


async def test_a_load_that_is_stopped_notes_what_was_under_way() -> None:
    target = Held()
    load = Load(target, prompts(), "completions")
    running = asyncio.create_task(load.closed(5))
    await until(lambda: len(target.asked) == 5)
    load.stop()
    run = await running
    assert run.interrupted
    assert [record.error for record in run.records] == ["interrupted"] * 5


async def test_a_load_of_some_seconds_sends_no_more_after_them() -> None:
    target = Held()
    target.open.set()
    run = await Load(target, prompts(), "completions", seconds=0.05).open(constant(100.0))
    assert len(run.records) == 5
    run = await Load(target, prompts(), "completions", seconds=1e-9).closed(3)
    assert len(run.records) <= 3


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_requests_that_fail_are_counted_by_kind(served: Any, kind: str) -> None:
    for worker in served.workers:
        worker.script.error = InternalError("not this one")
        worker.script.fail_after = 0
    with pytest.raises(TargetError, match="not this one"):
        await bench(where(served, kind))
    for worker in served.workers:
        worker.script.fail_after = 2
    target = open_target(where(served, kind, model="fake"), Sampling())
    run = await Load(target, SHORT.open("completions", 1.0, 0), "completions", requests=4).closed(2)
    await target.close()
    measures = measure(run)
    assert (measures.requests, measures.succeeded, measures.failed) == (4, 0, 4)
    ((name, failure),) = measures.failures.items()
    assert name == ("error in the stream" if kind == "http" else "INTERNAL")
    assert (failure.count, "not this one" in failure.example) == (4, True)


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": None}])


WHOLE = (text("a"), b": still there\n\n", text("b"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n")
BROKEN: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "": (b"200 OK", WHOLE),
    "HTTP 429": (b"429 Too Many Requests", (b'{"error": {"message": "slow down"}}',)),
    "HTTP 500": (b"500 Oops", (b"<html>",)),
    "cut off": (b"200 OK", WHOLE[:2]),
    "error in the stream": (b"200 OK", (WHOLE[0], event(error={"message": "the worker is gone"}))),
    "malformed event": (b"200 OK", (b"data: {nonsense\n\n",)),
    "empty stream": (b"200 OK", (b"data: [DONE]\n\n",)),
}


@pytest.mark.parametrize("expected", BROKEN)
async def test_each_way_of_failing_has_its_name(raw_server: Any, expected: str) -> None:
    status, body = BROKEN[expected]

    async def handler(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for part in body:
            writer.write(part)
            await writer.drain()

    record = await ask(await raw_server(handler))
    assert record.error == expected
    if not expected:
        assert (record.text, len(record.arrivals), record.prompt_tokens, record.completion_tokens) == ("ab", 2, 3, 2)
    if expected == "HTTP 429":
        assert record.message == "slow down"


async def ask(url: str, timeout: float = 60.0) -> Record:
    target, record = open_target(Where(url, model="m", timeout=timeout), Sampling()), Record()
    try:
        await target.ask(Ask("hello", 5), record)
    finally:
        await target.close()
    assert record.ended >= record.sent > 0
    return record


async def test_a_server_that_hangs_is_a_timeout(raw_server: Any) -> None:
    async def handler(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + WHOLE[0])
        await reader.read()  # until the client leaves

    record = await ask(await raw_server(handler), timeout=0.3)
    assert record.error == "timeout"
    assert len(record.arrivals) <= 1


async def test_a_server_that_closes_the_connection_at_once(raw_server: Any) -> None:
    async def handler(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    assert (await ask(await raw_server(handler))).error == "connection broke"


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_a_server_that_is_not_there_is_said_to_be_unreachable(kind: str, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    with pytest.raises(TargetError, match=address):
        await bench(Where(f"http://{address}") if kind == "http" else Where(None, address))


async def test_key_and_further_fields_go_with_each_request_also_over_tls(raw_server: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    seen: list[bytes] = []

    async def handler(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + b"".join(WHOLE)
        )

    url = await raw_server(handler, context)
    sampling = Sampling(0.5, True, {"min_p": 0.1, "max_tokens": None})
    target = open_target(Where(url, api="chat", model="m", api_key="k-1", ca=tmp_path / "ca.pem"), sampling)
    record = Record()
    await target.ask(Ask("hello", 5, '{"type": "null"}', ("!",)), record)
    await target.close()
    assert not record.error, record.message
    (request,) = seen
    assert request.startswith(b"POST /v1/chat/completions ") and b"authorization: bearer k-1" in request.lower()
    body = json.loads(request.partition(b"\r\n\r\n")[2])
    assert body["response_format"]["json_schema"]["schema"] == {"type": "null"}
    told = {name: body[name] for name in ("temperature", "ignore_eos", "min_p", "max_tokens", "stop")}
    assert told == {"temperature": 0.5, "ignore_eos": True, "min_p": 0.1, "max_tokens": None, "stop": ["!"]}
    assert (await ask(url)).error == "no connection", "nobody vouches for the certificate"


async def test_a_server_that_hangs_before_the_load_can_be_left(raw_server: Any) -> None:
    asked = asyncio.Event()

    async def handler(_: bytes, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()  # until the client leaves

    benchmark = Benchmark(Plan(Where(await raw_server(handler)), SHORT, (Level("concurrency", 1),)))
    running = asyncio.create_task(benchmark.run())
    async with asyncio.timeout(60):
        await asked.wait()
        benchmark.stop()
        result = await running
    assert (result.interrupted, result.levels) == (True, [])


async def test_a_server_without_usage_gives_times_but_no_tokens(raw_server: Any) -> None:
    async def handler(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(WHOLE[0] + WHOLE[2] + WHOLE[4])

    result = await bench(Where(await raw_server(handler), model="m"), warm_up=0, requests=4)
    measures = result.levels[0].measures
    assert (result.tokens_a_word, measures.succeeded, measures.output_tokens, measures.without_usage) == (None, 4, 0, 4)
    assert measures.ttft is not None


@pytest.mark.parametrize(
    ("url", "base", "api"),
    [
        ("http://h:1", "http://h:1/v1", None),
        ("http://h:1/v1/", "http://h:1/v1", None),
        ("https://h/openai/v1/chat/completions", "https://h/openai/v1", "chat"),
        ("http://h/v1/completions", "http://h/v1", "completions"),
    ],
)
def test_urls_are_taken_as_people_write_them(url: str, base: str, api: str | None) -> None:
    assert parse_url(url) == (base, api)


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h?x=1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"no URL|neither"):
        parse_url(url)
