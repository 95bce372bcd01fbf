"""A router whose answers a test writes, on the real server, interceptor and wire."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from sapwood_common.serving.server import ServiceServer


@dataclass
class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Streams ``pieces``, then ends, fails with ``error``, or hangs until cancelled.

    Attributes:
        address: Where it listens.
        extra: Responses after the pieces.
        requests: What it was asked.
        cancelled: Set once a call was cancelled by its client.
    """

    address: str = ""
    pieces: tuple[str, ...] = ("Hello", ", ", "world")
    error: Exception | None = None
    hang: bool = False
    extra: tuple[Any, ...] = ()
    requests: list[Any] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append(request)
        await context.send_initial_metadata((("x-request-id", request.request_id or "made-here"),))
        try:
            for number, piece in enumerate(self.pieces):
                yield router_pb2.RouterGenerateResponse(text=piece, token_ids=[number])
            for response in self.extra:
                yield response
            if self.hang:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        yield router_pb2.RouterGenerateResponse(
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=common_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
            stop_match="\n",
        )

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        vectors = [worker_pb2.Embedding(values=[index, 0.5]) for index, _ in enumerate(request.input)]
        return router_pb2.RouterEmbedResponse(embeddings=vectors, prompt_tokens=7, model="demo")

    async def Classify(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        made = [router_pb2.Classification(scores=[index, 0.5]) for index, _ in enumerate(request.input)]
        return router_pb2.ClassifyResponse(classifications=made, labels=["no", "yes"], prompt_tokens=7, model="demo")

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.error is not None:
            raise self.error
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(id="demo", context_length=99, workers=2)])

    async def ListWorkers(self, request: Any, context: Any) -> Any:  # noqa: N802
        load = common_load()
        status = router_pb2.WorkerStatus(address="a:1", healthy=True, model="demo", in_flight=3, load=load)
        return router_pb2.ListWorkersResponse(workers=[status])

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        up = router_pb2.WorkerStatus(
            address="a:1", healthy=True, model="demo", in_flight=3, load=common_load(), breaker="closed"
        )
        up.tokens_per_second = 41.6
        down = router_pb2.WorkerStatus(address="b:2", problem="it does not answer", breaker="open")
        return router_pb2.GetStatusResponse(
            uptime_seconds=65.2,
            running_requests=3,
            queued_requests=2,
            resumptions=1,
            policy="least_load",
            workers=[up, down],
        )


def common_load() -> Any:
    from sapwood.v1 import worker_pb2

    return worker_pb2.LoadReport(running_requests=2, waiting_requests=1, used_pages=7, num_pages=8)


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    """A scripted router that listens on a free port, in an event loop of its own thread."""
    scripted = ScriptedRouter()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> ServiceServer:
        server = ServiceServer("127.0.0.1", 0, ["sapwood.v1.Router"])
        router_pb2_grpc.add_RouterServicer_to_server(scripted, server.grpc)
        scripted.address = f"127.0.0.1:{await server.start()}"
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield scripted
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
