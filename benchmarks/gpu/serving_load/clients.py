"""Streaming clients of a router: gRPC, and OpenAI's completions over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol, cast

import grpc
import httptools

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc
from serving_load.stream import Stream
from serving_load.workload import Planned


class Client(Protocol):
    """Asks for one answer at a time or several."""

    async def warm_up(self) -> None:
        """Connects."""
        ...

    async def ask(self, request: Planned) -> Stream:
        """Sends a request and reads its answer to the end."""
        ...


class GrpcClient:
    """``Router.Generate`` with token ids, end tokens ignored; all requests over one connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def warm_up(self) -> None:
        await self._channel.channel_ready()

    async def ask(self, request: Planned) -> Stream:
        message = router_pb2.RouterGenerateRequest(
            tokens=common_pb2.TokenIds(ids=request.prompt),
            sampling=common_pb2.SamplingParams(
                temperature=request.temperature, max_tokens=request.outputs, ignore_eos=True
            ),
        )
        stream = Stream(time.monotonic())
        try:
            call = self._stub.Generate(message)
            while isinstance(response := await call.read(), router_pb2.RouterGenerateResponse):
                if response.token_ids:
                    stream.arrivals.append(time.monotonic())
                    stream.tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            stream.error = f"{error.code().name}: {error.details()}"
        return stream


class HttpClient:
    """``/v1/completions`` with token ids, end tokens ignored, usage included; a connection a request."""

    def __init__(self, address: str, model: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._model = model

    async def warm_up(self) -> None:
        """Nothing is kept open."""

    async def ask(self, request: Planned) -> Stream:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": request.prompt,
                "max_tokens": request.outputs,
                "temperature": request.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        transport, answer = await loop.create_connection(lambda: _Answer(Stream(began)), self._host, self._port)
        transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        await answer.over
        transport.close()
        return answer.stream


class _Answer(asyncio.Protocol):
    """One response's events."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if cast(int, self._parser.get_status_code()) != 200:
            self.stream.error += body.decode(errors="replace")
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if b'"text":' in event:
                self.stream.arrivals.append(time.monotonic())
            elif b'"usage":{' in event:
                self.stream.tokens = json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"]
            elif event not in (b"", b"data: [DONE]"):
                self.stream.error = event.decode(errors="replace")

    def on_message_complete(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.stream.error = self.stream.error or f"the connection broke: {exc}"
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
