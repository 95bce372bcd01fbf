"""The front tells a scheduler process that stands still from one that takes its time, on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc

STALL = 77


class Worker:
    """A worker process around the runner without a model."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", "0", "--metrics-port", "0"]
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.address = next(line.split()[-1] for line in self.process.stderr if " listening on " in line)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.scheduler = int(children.split()[0])

    def close(self) -> None:
        os.kill(self.scheduler, signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    running: list[Worker] = []

    def start_one(*flags: str) -> Worker:
        running.append(Worker(*flags))
        return running[-1]

    yield start_one
    for worker in running:
        worker.close()


class Session:
    """A session that was opened, and what it has said."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = worker_pb2_grpc.WorkerStub(channel).Session()
        self.health = health_pb2_grpc.HealthStub(channel)
        self.said: list[worker_pb2.SessionResponse] = []
        self.tokens = 0

    async def submit(self, stream_id: int, prompt: list[int], max_tokens: int) -> None:
        request = worker_pb2.WorkerGenerateRequest(
            request_id=f"r{stream_id}", token_ids=prompt, sampling=common_pb2.SamplingParams(max_tokens=max_tokens)
        )
        submit = worker_pb2.SessionSubmit(stream_id=stream_id, request=request)
        await self.call.write(worker_pb2.SessionRequest(heartbeat_ms=20, submits=[submit]))

    async def until(self, condition: Callable[[worker_pb2.SessionResponse], bool]) -> None:
        async with asyncio.timeout(60):
            while True:
                response = await self.call.read()
                self.said.append(response)
                self.tokens += sum(len(output.response.token_ids) for output in response.outputs)
                if condition(response):
                    return

    async def status(self) -> int:
        return (await self.health.Check(health_pb2.HealthCheckRequest())).status


@pytest.fixture
async def connect(start):
    channels: list[grpc.aio.Channel] = []

    async def open_session(*flags: str) -> tuple[Worker, Session]:
        worker = start(*flags)
        channels.append(grpc.aio.insecure_channel(worker.address))
        session = Session(channels[-1])
        await session.call.write(worker_pb2.SessionRequest(heartbeat_ms=20))
        await session.until(lambda response: True)
        return worker, session

    yield open_session
    for channel in channels:
        await channel.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with work"])
async def test_a_stopped_scheduler_shows_in_heartbeats_and_health_until_it_resumes(connect, busy) -> None:
    worker, session = await connect("--step-ms", "10")
    if busy:
        await session.submit(1, [1, 2, 3], 400)
        await session.until(lambda response: session.tokens > 3)
    await session.until(lambda response: response.frozen_ms == 0)
    os.kill(worker.scheduler, signal.SIGSTOP)
    await session.until(lambda response: response.frozen_ms >= 1500)
    assert await session.status() == health_pb2.HealthCheckResponse.NOT_SERVING
    before = session.tokens
    os.kill(worker.scheduler, signal.SIGCONT)
    await session.until(lambda response: response.frozen_ms == 0)
    async with asyncio.timeout(60):
        while await session.status() != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.02)
    if busy:
        await session.until(lambda response: session.tokens > before + 3)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.slow, id="waits"),
        pytest.param(("--stall-computes",), id="holds the interpreter's lock"),
    ],
)
async def test_a_long_step_is_not_taken_for_a_process_that_stands_still(connect, flags) -> None:
    for _ in range(3):  # where the machine has no time for it, it does stand still
        _, session = await connect("--stall-token", str(STALL), "--stall-seconds", "7", *flags)
        await session.submit(1, [STALL], 5)
        await session.until(lambda _, session=session: session.tokens == 5)
        assert max(response.step_ms for response in session.said) >= 2000
        frozen = max(response.frozen_ms for response in session.said)
        if frozen < 1000:
            break
    assert frozen < 1000
