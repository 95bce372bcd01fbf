"""Closed-loop load on a router: so many clients, each with a connection of its own, ask one request after another."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import httptools
import msgspec
from router_load.mock_engine import WORD
from router_load.mock_worker import MODEL, WORD_TOKEN

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import Dialer
from sapwood_router.transport.shared_call import open_call

_DONE = b"data: [DONE]"


@dataclass
class Result:
    """What a load saw. Latencies and times of the first byte of the body in seconds, of requests that went well."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    broken: int = 0
    """Answers that ended early, or that were not complete."""
    ended_at: list[float] = field(default_factory=list)
    events: int = 0
    """Events of all streams, where they are counted."""

    def add(self, answer: Answer, whole: bool) -> None:
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        if answer.status == 200 and whole:
            self.latencies.append(answer.ended - answer.began)
            self.first.append(answer.first - answer.began)
            self.ended_at.append(answer.ended)
        elif answer.status == 200:
            self.broken += 1

    @property
    def failed(self) -> int:
        return self.broken + sum(count for status, count in self.statuses.items() if status != 200)


def percentile(values: list[float], share: float) -> float:
    """A percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


@dataclass
class Answer:
    """A response as it came; status 0 if the connection broke before it."""

    began: float
    status: int = 0
    first: float = 0.0
    ended: float = 0.0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class HttpClient(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: Answer | None = None
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._begun: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, port: int) -> HttpClient:
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._wake()
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._answer is not None
        self._answer.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        assert self._answer is not None
        if not self._parts:
            self._answer.first = time.perf_counter()
            if self._begun is not None and not self._begun.done():
                self._begun.set_result(None)
        self._parts.append(body)

    def on_message_complete(self) -> None:
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()
        self._wake()

    async def ask(self, request: bytes) -> Answer:
        """Sends a whole request, headers included, and waits for the whole answer."""
        answer = self.send(request)
        if self._transport is None or self._waiter is None:
            return answer
        await self._waiter
        answer.ended = time.perf_counter()
        answer.body = b"".join(self._parts)
        return answer

    def send(self, request: bytes) -> Answer:
        """Sends it, and waits for nothing."""
        answer = self._answer = Answer(time.perf_counter())
        self._parts = []
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._begun = asyncio.get_running_loop().create_future()
        if self._transport is not None:
            self._transport.write(request)
        return answer

    async def begun(self) -> None:
        """Returns once the first of the body came, or the connection is over."""
        assert self._begun is not None
        await self._begun

    @property
    def open(self) -> bool:
        return self._transport is not None

    def pause(self) -> None:
        """Reads no more."""
        assert self._transport is not None
        self._transport.pause_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def http_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A request as bytes."""
    raw = msgspec.json.encode({"model": MODEL, **body})
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def is_whole(answer: Answer, tokens: int, stream: bool, as_ids: bool = False) -> bool:
    """Whether all of the text, or of the ids, is there: a router may end a broken stream as if nothing had happened."""
    words = answer.body.count(b"%d" % WORD_TOKEN if as_ids else WORD.encode())
    return words == tokens and (not stream or _DONE in answer.body) and b'"error"' not in answer.body


async def http_load(
    port: int,
    make: Callable[[int], bytes],
    tokens: int,
    stream: bool,
    *,
    concurrency: int,
    count: int,
    as_ids: bool = False,
) -> Result:
    """``count`` requests, made by ``make`` from their numbers."""
    result = Result()
    numbers = itertools.count()

    async def client() -> None:
        connection = await HttpClient.connect(port)
        while (number := next(numbers)) < count:
            if not connection.open:
                connection = await HttpClient.connect(port)
            answer = await connection.ask(make(number))
            result.add(answer, is_whole(answer, tokens, stream, as_ids))
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(concurrency, count))))
    result.seconds = time.perf_counter() - began
    return result


async def grpc_load(
    port: int,
    make: Callable[[int], list[int]],
    tokens: int,
    *,
    concurrency: int,
    count: int,
    channels: int = 8,
    as_ids: bool = False,
    worker: bool = False,
) -> Result:
    """The same over gRPC, with streams of token ids, and of their text unless ``as_ids``; or straight to a ``worker``."""
    result = Result()
    numbers = itertools.count()
    make_stub = worker_pb2_grpc.WorkerStub if worker else router_pb2_grpc.RouterStub

    def make_request(number: int) -> Any:
        sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
        if worker:
            return worker_pb2.WorkerGenerateRequest(token_ids=make(number), sampling=sampling)
        ids = common_pb2.TokenIds(ids=make(number))
        return router_pb2.RouterGenerateRequest(tokens=ids, sampling=sampling, detokenize=not as_ids)

    async with _channels(port, channels) as opened:
        stubs: list[Any] = [make_stub(channel) for channel in opened]

        async def client(which: int) -> None:
            stub = stubs[which % len(stubs)]
            while (number := next(numbers)) < count:
                request = make_request(number)
                answer = Answer(time.perf_counter())
                got = 0
                try:
                    async for response in stub.Generate(request):
                        answer.first = answer.first or time.perf_counter()
                        got += len(response.token_ids)
                    answer.status = 200
                except grpc.aio.AioRpcError:
                    answer.status = 500
                answer.ended = time.perf_counter()
                result.add(answer, got == tokens)

        began = time.perf_counter()
        await asyncio.gather(*(client(which) for which in range(min(concurrency, count))))
        result.seconds = time.perf_counter() - began
    return result


async def session_load(port: int, make: Callable[[int], list[int]], tokens: int, *, count: int) -> Result:
    """One request after another straight to a worker, over the session that ours speaks to it."""
    result = Result()
    call = await open_call(f"127.0.0.1:{port}", "/sapwood.v1.Worker/Session", Dialer(), 10.0)
    try:
        call.write(worker_pb2.SessionRequest(heartbeat_ms=1000).SerializeToString())
        for number in range(count):
            request = worker_pb2.WorkerGenerateRequest(token_ids=make(number))
            request.sampling.max_tokens = tokens
            submit = worker_pb2.SessionSubmit(stream_id=number, request=request)
            answer, got = Answer(time.perf_counter(), status=200), 0
            call.write(worker_pb2.SessionRequest(submits=[submit]).SerializeToString())
            while got < tokens:
                for output in worker_pb2.SessionResponse.FromString(await call.read()).outputs:
                    got += len(output.response.token_ids)
                answer.first = answer.first or time.perf_counter()
            answer.ended = time.perf_counter()
            result.add(answer, got == tokens)
    finally:
        call.close()
    return result


@asynccontextmanager
async def _channels(port: int, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(count)]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()
