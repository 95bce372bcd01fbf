"""What tests ask of a worker over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from sapwood.v1 import worker_pb2


async def collect(
    stub: Any, message: worker_pb2.WorkerGenerateRequest
) -> tuple[list[int], worker_pb2.WorkerGenerateResponse]:
    """All tokens of an answer, and its last message."""
    tokens: list[int] = []
    async for response in stub.Generate(message):
        tokens += response.token_ids
    return tokens, response


async def rest_of(call: Any) -> list[int]:
    """The tokens of an answer that have not been read."""
    tokens: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        tokens += response.token_ids
    return tokens


async def loads(stub: Any) -> AsyncIterator[worker_pb2.LoadReport]:
    """The worker's loads as they change."""
    async for response in stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10)):
        yield response.load


async def load_where(stub: Any, condition: Callable[[worker_pb2.LoadReport], bool]) -> worker_pb2.LoadReport:
    """The first load of which a condition holds."""
    async with asyncio.timeout(60):
        async for load in loads(stub):
            if condition(load):
                return load
    raise AssertionError("the stream of loads ended")
