"""The worker's gRPC front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_worker.convert import check_prompt, to_kv_events, to_load_report, to_response, to_sampling
from sapwood_worker.engine import Engine
from sapwood_worker.kv_event_stream import KvEventBatch
from sapwood_worker.model_info import ModelInfo

SERVICE = "sapwood.v1.Worker"
UNCOUNTED = frozenset({f"/{SERVICE}/WatchLoad", f"/{SERVICE}/SubscribeKvEvents"})
"""Calls that last as long as the worker: a drain does not wait for them, it ends them."""

DEFAULT_INTERVAL_MS, LEAST_INTERVAL_MS = 100, 10

Context = grpc.aio.ServicerContext[Any, Any]


class ServedModel(NamedTuple):
    """What is served: under which name, which model, and since which start of the scheduler (its epoch)."""

    name: str
    info: ModelInfo
    epoch: int


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Implements ``sapwood.v1.Worker``; see the proto for what each method does.

    Args:
        engine: The way to the scheduler.
        draining: Set when the service is about to stop.

    Attributes:
        model: Set once it is loaded; until then calls are refused UNAVAILABLE.
    """

    def __init__(self, engine: Engine, draining: asyncio.Event) -> None:
        self._engine = engine
        self._draining = draining
        self.model: ServedModel | None = None

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Streams tokens. However the call ends, cancelled, past its deadline or broken, its request ends with it."""
        info = self._loaded().info
        check_prompt(request, info)
        generation = self._engine.submit(request.request_id, request.token_ids, to_sampling(request, info))
        # A call that ends while its last message is being sent does not come back here.
        context.add_done_callback(cast(Any, lambda _: generation.close()))
        try:
            async for output in generation:
                yield to_response(output)
        finally:
            generation.close()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        """Ends a request by its id."""
        if not request.request_id:
            raise InvalidArgumentError("request_id is missing", field="request_id")
        return worker_pb2.AbortResponse(found=self._engine.abort(request.request_id))

    async def GetModelInfo(
        self, request: worker_pb2.GetModelInfoRequest, context: Context
    ) -> worker_pb2.GetModelInfoResponse:
        """Describes the model."""
        name, info, epoch = self._loaded()
        return worker_pb2.GetModelInfoResponse(
            model=name,
            architecture=info.architecture,
            dtype=info.dtype,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            page_size=info.page_size,
            num_pages=info.num_pages,
            epoch=epoch,
        )

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Pushes the load until the client goes or the worker drains."""
        interval = request.interval_ms if request.HasField("interval_ms") else DEFAULT_INTERVAL_MS
        if interval < LEAST_INTERVAL_MS:
            raise InvalidArgumentError(
                f"interval_ms is {interval}; it must be at least {LEAST_INTERVAL_MS}", field="interval_ms"
            )
        self._loaded()
        engine = self._engine
        draining = asyncio.ensure_future(self._draining.wait())
        change: asyncio.Future[None] | None = None
        try:
            while not draining.done():
                version = engine.load_version
                yield worker_pb2.WatchLoadResponse(load=to_load_report(engine.load, engine.kv_events))
                await asyncio.wait({draining}, timeout=interval / 1000)
                change = asyncio.ensure_future(engine.load_after(version))
                await asyncio.wait({change, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if change is not None:
                change.cancel()
        raise UnavailableError("this worker is shutting down", retry_after=1.0)

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        """Empties the prefix cache."""
        self._loaded()
        return worker_pb2.FlushCacheResponse(freed_pages=await self._engine.flush_cache())

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        """Pushes what is cached until the client goes or the worker drains."""
        block_size = self._loaded().info.page_size
        token_ids = request.token_ids if request.HasField("token_ids") else True
        batches = self._engine.kv_events.subscribe()
        draining = asyncio.ensure_future(self._draining.wait())
        upcoming: asyncio.Future[KvEventBatch] | None = None
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(batches))
                await asyncio.wait({upcoming, draining}, return_when=asyncio.FIRST_COMPLETED)
                if draining.done():
                    break
                yield to_kv_events(upcoming.result(), block_size, token_ids=token_ids)
        finally:
            draining.cancel()
            if upcoming is not None and not upcoming.done():
                upcoming.cancel()
                await asyncio.wait({upcoming})
            await batches.aclose()
        raise UnavailableError("this worker is shutting down", retry_after=1.0)

    def _loaded(self) -> ServedModel:
        if self.model is None:
            raise UnavailableError("the model is still being loaded", retry_after=1.0)
        return self.model
