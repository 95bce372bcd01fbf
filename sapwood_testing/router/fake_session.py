"""The session of a fake worker: many streams over one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from sapwood.v1 import worker_pb2
from sapwood_testing.router.script import SeenCall, SeenEmbedding

Put = Callable[[worker_pb2.SessionOutput], Awaitable[None]]


class Runs(Protocol):
    """The worker whose session it is."""

    load: worker_pb2.LoadReport
    draining: bool
    vitals: worker_pb2.SessionResponse
    packs_tokens: bool

    async def run(self, call: SeenCall, put: Put) -> None:
        """One stream, from its submit to its end."""
        ...

    async def run_embedding(self, call: SeenEmbedding, put: Put) -> None:
        """The same for embeddings."""
        ...


class FakeSession:
    """The streams of one Session call; one unread message a stream at most."""

    def __init__(self, worker: Runs) -> None:
        self._worker = worker
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._paused: set[int] = set()
        self._ready: dict[int, worker_pb2.SessionOutput] = {}
        self._taken = asyncio.Event()
        self._wake = asyncio.Event()
        self._heartbeat = 0.2
        self._packs_tokens = False

    async def read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        """Takes the requests as they come."""
        async for request in requests:
            if request.HasField("heartbeat_ms"):
                self._heartbeat = request.heartbeat_ms / 1000
                self._packs_tokens = request.packed_tokens and self._worker.packs_tokens
            for submit in request.submits:
                self._submit(submit)
            for stream_id in request.aborts:
                if stream_id in self._tasks:
                    self._tasks.pop(stream_id).cancel()
                self._ready.pop(stream_id, None)
            self._paused |= set(request.pauses)
            self._paused -= set(request.resumes)
            self._wake.set()

    async def next_response(self) -> worker_pb2.SessionResponse:
        """What is ready, or the next heartbeat."""
        with contextlib.suppress(TimeoutError):  # wait_for would swallow a cancellation that comes with the wake
            async with asyncio.timeout(self._heartbeat):
                await self._wake.wait()
        self._wake.clear()
        response = worker_pb2.SessionResponse(load=self._worker.load, draining=self._worker.draining)
        response.MergeFrom(self._worker.vitals)
        for stream_id in [stream_id for stream_id in self._ready if stream_id not in self._paused]:
            output = self._ready.pop(stream_id)
            answer = output.response
            one = worker_pb2.WorkerGenerateResponse(token_ids=answer.token_ids[:1], position=answer.position)
            if self._packs_tokens and answer.token_ids and answer == one:
                response.token_streams.append(stream_id)
                response.tokens.extend(answer.token_ids)
                response.positions.append(answer.position)
            else:
                response.outputs.append(output)
        self._taken.set()
        self._taken = asyncio.Event()
        return response

    def close(self) -> None:
        """Cancels all streams."""
        for task in self._tasks.values():
            task.cancel()

    def _submit(self, submit: worker_pb2.SessionSubmit) -> None:
        stream_id = submit.stream_id
        left = submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None
        client_id = submit.request.request_id.rpartition(".")[0]

        async def put(output: worker_pb2.SessionOutput) -> None:
            output.stream_id = stream_id
            while stream_id in self._ready:
                await self._taken.wait()
            self._ready[stream_id] = output
            self._wake.set()

        if submit.HasField("embed"):
            run = self._worker.run_embedding(SeenEmbedding(submit.embed, left), put)
        else:
            run = self._worker.run(SeenCall(submit.request, client_id, left), put)
        task = self._tasks[stream_id] = asyncio.ensure_future(run)
        task.add_done_callback(lambda _: self._tasks.pop(stream_id, None))
