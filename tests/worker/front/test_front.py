"""The worker's gRPC front alone; the test plays the scheduler process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.seeds import Seeds
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.telemetry.logs import request_id_var
from sapwood_common.telemetry.metrics import MetricSet
from sapwood_common.telemetry.tracing import Tracing
from sapwood_testing.worker.no_loras import no_loras
from sapwood_worker.front.engine import Engine
from sapwood_worker.front.metrics import EngineObserver, WorkerMetrics
from sapwood_worker.front.served_model import ServedModel
from sapwood_worker.front.service import WorkerService
from sapwood_worker.ipc.messages import Abort, Step, Submit, ToScheduler
from sapwood_worker.records.load import Load
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

INFO = ModelInfo(
    architecture="fake",
    dtype="none",
    context_length=64,
    vocab_size=50,
    eos_token_ids=(),
    page_size=4,
    num_pages=32,
    embedding_size=2,
)


class SlowGrammars:
    """Compiles nothing until told to, or has a fault."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def compiled(self, request: worker_pb2.WorkerGenerateRequest, time_remaining: float | None) -> bytes:
        if self.fault is not None:
            raise self.fault
        self.begun.set()
        await self.go_on.wait()
        return b""


class Front:
    """The service on a real server, and what it sends to the scheduler."""

    def __init__(
        self, channel: grpc.aio.Channel, engine: Engine, grammars: SlowGrammars, sent: asyncio.Queue[ToScheduler]
    ) -> None:
        self.stub = worker_pb2_grpc.WorkerStub(channel)
        self.engine = engine
        self.grammars = grammars
        self.sent = sent
        self.draining = asyncio.Event()

    async def submitted(self) -> Submit:
        message = await asyncio.wait_for(self.sent.get(), 60)
        assert isinstance(message, Submit)
        return message

    def end(self, request: Submit, embedding: bytes = b"") -> None:
        self.engine.receive(Step([RequestOutput(request.serial, [], "stop", embedding=embedding)], Load()))

    async def begin_drain(self) -> asyncio.Task[worker_pb2.DrainResponse]:
        """A drain that has begun and had the time to end, if it waited for nothing."""
        drain = asyncio.ensure_future(self.stub.Drain(worker_pb2.DrainRequest()))
        await asyncio.wait_for(self.draining.wait(), 60)
        for _ in range(3):
            await self.stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        return drain


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    sent: asyncio.Queue[ToScheduler] = asyncio.Queue()
    engine = Engine(sent.put_nowait, EngineObserver(WorkerMetrics(MetricSet())))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    made = Front(channel, engine, SlowGrammars(), sent)

    async def begin_drain() -> None:
        made.draining.set()

    service = WorkerService(
        engine, made.draining, begin_drain, RpcTelemetry(MetricSet(), Tracing()), Seeds(7), no_loras()
    )
    service.model = ServedModel("fake", INFO, 1, made.grammars, 4)  # type: ignore[arg-type]
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    await server.start()
    yield made
    await channel.close()
    await server.stop(None)


async def test_embeddings_whose_client_leaves_are_taken_out_of_the_scheduler(front: Front) -> None:
    inputs = [common_pb2.TokenIds(ids=[number]) for number in (1, 2, 3)]
    call = front.stub.Embed(worker_pb2.WorkerEmbedRequest(inputs=inputs))
    first, *others = [await front.submitted() for _ in inputs]
    front.end(first, np.array([3, 4], np.float32).tobytes())
    call.cancel()
    gone = [await asyncio.wait_for(front.sent.get(), 60) for _ in others]
    assert gone == [Abort(request.serial) for request in others]
    assert front.engine.embeddings.running == 0


async def test_of_a_request_with_many_inputs_half_as_many_are_submitted_as_may_wait(front: Front) -> None:
    inputs = [common_pb2.TokenIds(ids=[number % 7]) for number in range(2048)]
    call = front.stub.Embed(worker_pb2.WorkerEmbedRequest(inputs=inputs))
    submitted = [await front.submitted() for _ in range(512)]
    assert front.sent.empty()
    for number in range(2048):
        front.end(submitted[number], np.array([number + 1, 0], np.float32).tobytes())
        if len(submitted) < 2048:
            submitted.append(await front.submitted())
    assert len((await call).embeddings) == 2048
    assert front.sent.empty()


async def test_all_requests_of_a_tenant_together_submit_half_as_many_inputs_as_may_wait(front: Front) -> None:
    def embed(tenant: str) -> Any:
        inputs = [common_pb2.TokenIds(ids=[number % 7]) for number in range(300)]
        return front.stub.Embed(worker_pb2.WorkerEmbedRequest(inputs=inputs, tenant=tenant))

    calls = [embed("alice") for _ in range(4)]
    submitted = [await front.submitted() for _ in range(512)]
    assert front.sent.empty()
    calls.append(embed("bob"))
    submitted += [await front.submitted() for _ in range(300)]
    assert [each.terms.tenant for each in submitted[512:]] == ["bob"] * 300
    for number in range(1500):
        front.end(submitted[number], np.array([1, 0], np.float32).tobytes())
        if len(submitted) < 1500 and submitted[number].terms.tenant == "alice":
            submitted.append(await front.submitted())
    assert [len((await call).embeddings) for call in calls] == [300] * 5


async def test_a_drain_waits_for_embeddings(front: Front) -> None:
    call = front.stub.Embed(worker_pb2.WorkerEmbedRequest(inputs=[common_pb2.TokenIds(ids=[1, 2])]))
    request = await front.submitted()
    drain = await front.begin_drain()
    assert not drain.done()
    front.end(request, np.array([3, 4], np.float32).tobytes())
    assert list((await call).embeddings[0].values) == pytest.approx([0.6, 0.8])
    await asyncio.wait_for(drain, 60)


async def test_a_drain_waits_for_a_request_whose_grammar_is_being_compiled(front: Front) -> None:
    call = front.stub.Generate(worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=[1]))
    ended = asyncio.ensure_future(call.read())
    await asyncio.wait_for(front.grammars.begun.wait(), 60)
    drain = await front.begin_drain()
    assert not drain.done()
    front.grammars.go_on.set()
    request = await front.submitted()
    assert not drain.done()
    front.end(request)
    assert (await ended).finish_reason == common_pb2.FINISH_REASON_STOP
    await asyncio.wait_for(drain, 60)


async def test_a_fault_ends_its_stream_and_is_in_the_log_under_the_request_id(front: Front) -> None:
    lines: list[tuple[str, str]] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((request_id_var.get(), self.format(record)))

    heard = Heard()
    front.grammars.fault = RuntimeError("what only the log should have")
    session = front.stub.Session()
    request = worker_pb2.WorkerGenerateRequest(request_id="r7", token_ids=[1])
    logging.getLogger("sapwood_worker").addHandler(heard)
    try:
        await session.write(worker_pb2.SessionRequest(submits=[worker_pb2.SessionSubmit(stream_id=1, request=request)]))
        async with asyncio.timeout(60):
            while not (outputs := (await session.read()).outputs):
                pass
    finally:
        logging.getLogger("sapwood_worker").removeHandler(heard)
        session.cancel()
    assert outputs[0].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "what only" not in outputs[0].error.message
    assert [name for name, line in lines if "what only the log should have" in line] == ["r7"]


async def test_loads_are_pushed_after_each_step_that_changed_them(front: Front) -> None:
    call = front.stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=0))
    assert (await call.read()).load.used_pages == 0
    for used_pages in range(1, 20):
        front.engine.receive(Step([], Load(used_pages=used_pages)))
        assert (await asyncio.wait_for(call.read(), 60)).load.used_pages == used_pages
    call.cancel()


async def test_loads_are_not_pushed_more_often_than_asked(front: Front) -> None:
    call = front.stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=2000))
    assert (await call.read()).load.used_pages == 0
    for used_pages in range(1, 20):
        front.engine.receive(Step([], Load(used_pages=used_pages)))
    assert (await asyncio.wait_for(call.read(), 60)).load.used_pages == 19
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError, match="interval_ms is 5"):
        await front.stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=5)).read()


async def test_requests_without_a_seed_get_what_a_random_seed_gives(front: Front) -> None:
    def asked(name: str, **sampling: int) -> worker_pb2.WorkerGenerateRequest:
        return worker_pb2.WorkerGenerateRequest(
            request_id=name, token_ids=[1], sampling=common_pb2.SamplingParams(**sampling)
        )

    front.grammars.go_on.set()
    calls = [front.stub.Generate(asked("a")), front.stub.Generate(asked("b")), front.stub.Generate(asked("c", seed=5))]
    seeds = {(message := await front.submitted()).request_id: message.sampling.seed for _ in calls}
    expected = Seeds(7)
    assert {seeds["a"], seeds["b"]} == {expected.draw(), expected.draw()}
    assert seeds["c"] == 5
