"""``Worker.Session`` on a real worker, front and scheduler in their processes, around the runner that needs no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from itertools import islice
from types import SimpleNamespace
from typing import NoReturn

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import child_seed
from sapwood_common.errors import UnavailableError
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_testing.worker.fake_runner import continuation
from sapwood_testing.worker.no_loras import no_loras
from sapwood_worker.front.session import Session

SEED = 11


class Client:
    """One session, its outputs sorted by stream."""

    def __init__(self, address: str, heartbeat_ms: int = 50, *, packed_tokens: bool = False) -> None:
        self.address = address
        self.packed_tokens = packed_tokens
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.call = self.stub.Session()
        self.heartbeat_ms = heartbeat_ms
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, worker_pb2.WorkerGenerateResponse | worker_pb2.GenerationError] = {}
        self.responses: list[worker_pb2.SessionResponse] = []
        self.submits: list[worker_pb2.SessionSubmit] = []
        self.gathering = False

    def request_id(self, stream_id: int) -> str:
        """Its own, also where others have asked the same worker."""
        return f"{id(self)}-{stream_id}"

    async def open(self) -> worker_pb2.SessionResponse:
        first = worker_pb2.SessionRequest(heartbeat_ms=self.heartbeat_ms, packed_tokens=self.packed_tokens)
        await self.call.write(first)
        return await self.read()

    async def submit(
        self, stream_id: int, prompt: list[int], timeout_ms: int | None = None, traceparent: str = "", **sampling
    ) -> None:
        request = worker_pb2.WorkerGenerateRequest(
            request_id=self.request_id(stream_id),
            traceparent=traceparent,
            token_ids=prompt,
            sampling=common_pb2.SamplingParams(**({"seed": SEED} | sampling)),
        )
        submit = worker_pb2.SessionSubmit(stream_id=stream_id, request=request, timeout_ms=timeout_ms)
        self.submits.append(submit)
        if not self.gathering:
            await self.flush()

    async def flush(self) -> None:
        """Sends all that was submitted in one message."""
        submits, self.submits, self.gathering = self.submits, [], False
        await self.call.write(worker_pb2.SessionRequest(submits=submits))

    async def read(self) -> worker_pb2.SessionResponse:
        async with asyncio.timeout(60):
            response = await self.call.read()
        assert response is not grpc.aio.EOF
        self.responses.append(response)
        for stream_id, token in zip(response.token_streams, response.tokens, strict=True):
            assert stream_id not in self.ends
            self.tokens[stream_id].append(token)
        for output in response.outputs:
            assert output.stream_id not in self.ends
            if output.HasField("error"):
                self.ends[output.stream_id] = output.error
            else:
                self.tokens.setdefault(output.stream_id, []).extend(output.response.token_ids)
                if output.response.finish_reason:
                    self.ends[output.stream_id] = output.response
        return response

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.read()

    async def load_where(self, condition: Callable[[worker_pb2.LoadReport], bool]) -> None:
        """Returns once the latest report is such a one; there is none that says again what the one before it said."""
        while True:
            reports = [response.load for response in self.responses if response.HasField("load")]
            if reports and condition(reports[-1]):
                return
            await self.read()


@pytest.fixture
async def connect(start, lend) -> AsyncIterator[Callable]:
    """Opens a session with a worker: one that the file's tests share, or ``own``, to which anything may be done."""
    clients: list[Client] = []

    async def make(*flags: str, step_ms: float = 1, heartbeat_ms: int = 50, own: bool = False) -> Client:
        worker = (start if own else lend)(*flags, step_ms=step_ms)
        clients.append(Client(worker.address, heartbeat_ms))
        clients[-1].worker = worker
        await clients[-1].open()
        return clients[-1]

    yield make
    for client in clients:
        await client.channel.close()


def expected(prompt: list[int], count: int) -> list[int]:
    return list(islice(continuation(prompt, SamplingParams(seed=SEED), 1000), count))


async def test_the_first_response_describes_the_worker(connect) -> None:
    client = await connect()
    info = await client.stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
    assert client.responses[0].info == info
    assert not client.responses[0].draining


async def test_each_stream_gets_its_own_tokens_and_a_step_is_one_message(connect) -> None:
    client = await connect(step_ms=5)
    prompts = {n: [7] * 20 + [n] for n in range(1, 41)}
    client.gathering = True  # all begin together, however slow this process is
    for number, prompt in prompts.items():
        await client.submit(number, prompt, max_tokens=30)
    await client.flush()
    await client.until(lambda: len(client.ends) == 40)
    for number, prompt in prompts.items():
        assert client.tokens[number] == expected(prompt, 30)
        end = client.ends[number]
        assert end.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (21, 30)
    sizes = [len(response.outputs) for response in client.responses if response.outputs]  # others are heartbeats
    assert sum(sizes) > 8 * len(sizes)


async def test_single_tokens_come_packed_for_who_understands_that(connect) -> None:
    plain = await connect(step_ms=1)
    packing = Client(plain.address, packed_tokens=True)
    await packing.open()
    for client in (plain, packing):
        for number in range(1, 9):
            await client.submit(number, [7, number], max_tokens=30, logprobs=1 if number == 8 else None)
        await client.until(lambda client=client: len(client.ends) == 8)
        for number in range(1, 9):
            assert client.tokens[number] == expected([7, number], 30)
            assert client.ends[number].usage.completion_tokens == 30
    assert not any(response.tokens for response in plain.responses)
    packed = [stream_id for response in packing.responses for stream_id in response.token_streams]
    assert packed
    assert 8 not in packed, "its tokens come with probabilities"
    await packing.channel.close()


async def test_a_stream_that_is_refused_leaves_the_others_alone(connect) -> None:
    client = await connect("--log-format", "json", own=True)
    await client.submit(1, [5], max_tokens=20)
    await client.submit(2, [])
    await client.submit(3, [5], temperature=-1, traceparent=f"00-{'5b' * 16}-{'c7' * 8}-01")
    await client.until(lambda: len(client.ends) == 3)
    assert client.tokens == {1: expected([5], 20)}
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (client.ends[2].code, client.ends[2].field) == (invalid, "token_ids")
    assert (client.ends[3].code, client.ends[3].field) == (invalid, "sampling.temperature")
    # The log says so under the ids of each request, though they came over one call.
    client.worker.process.terminate()
    await asyncio.to_thread(client.worker.wait)
    lines = [json.loads(line) for line in client.worker.log.splitlines()]
    said = [line for line in lines if line["message"].startswith("request ends INVALID_ARGUMENT")]
    ids = {(line["request_id"], line.get("trace_id")) for line in said}
    assert ids == {(client.request_id(2), None), (client.request_id(3), "5b" * 16)}


async def test_a_stream_id_that_is_open_ends_the_call(connect) -> None:
    client = await connect(step_ms=20)
    for _ in range(2):
        await client.submit(1, [5])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await client.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_abort_and_the_end_of_the_call_free_everything(connect) -> None:
    client = await connect("--no-prefix-cache", "--num-pages", "1024", step_ms=20)
    for number in range(1, 5):
        await client.submit(number, [number] * 40)
    await client.load_where(lambda load: load.running_requests == 4)
    await client.call.write(worker_pb2.SessionRequest(aborts=[1, 2, 99]))
    await client.load_where(lambda load: load.running_requests == 2)
    client.call.cancel()
    other = Client(client.address)
    await other.open()
    if other.responses[0].load.running_requests:
        await other.load_where(lambda load: not load.running_requests and not load.used_pages)
    await other.channel.close()


async def test_heartbeats_come_while_idle_and_through_a_long_step(connect) -> None:
    client = await connect(step_ms=2500)
    for _ in range(3):
        assert not (await client.read()).outputs
    await client.submit(1, [5], max_tokens=1)
    await client.until(lambda: bool(client.ends))
    empty = [response for response in client.responses if not response.outputs]
    assert len(empty) >= 4 + 2


async def test_a_stream_past_its_time_ends(connect) -> None:
    client = await connect(step_ms=20)
    await client.submit(1, [5], timeout_ms=150)
    await client.submit(2, [5], max_tokens=3, timeout_ms=120_000)
    await client.until(lambda: len(client.ends) == 2)
    assert client.ends[1].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert client.tokens[2] == expected([5], 3)
    await client.load_where(lambda load: not load.running_requests)


async def test_a_paused_stream_keeps_its_tokens_until_it_is_resumed(connect) -> None:
    client = await connect(step_ms=5)
    await client.submit(1, [5], max_tokens=600)  # three seconds, in which it is paused
    await client.until(lambda: 1 in client.tokens)
    await client.call.write(worker_pb2.SessionRequest(pauses=[1]))
    await client.submit(2, [6], max_tokens=400)
    await client.until(lambda: 2 in client.ends)
    assert 1 not in client.ends
    before = len(client.tokens[1])
    for _ in range(3):
        await client.read()
    assert len(client.tokens[1]) == before
    await client.call.write(worker_pb2.SessionRequest(resumes=[1]))
    await client.until(lambda: 1 in client.ends)
    assert client.tokens[1] == expected([5], 600)


async def test_draining_finishes_what_runs_refuses_what_is_new_and_ends_the_call(connect) -> None:
    client = await connect(step_ms=10, own=True)
    await client.submit(1, [5], max_tokens=300)  # three seconds, in which another asks
    await client.until(lambda: 1 in client.tokens)
    client.worker.process.send_signal(signal.SIGTERM)
    while not (await client.read()).draining:
        pass
    await client.submit(2, [6])
    await client.until(lambda: len(client.ends) == 2)
    assert client.ends[2].code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert client.ends[2].retry_after_ms == 1000
    assert client.tokens[1] == expected([5], 300)
    assert await client.call.read() is grpc.aio.EOF
    assert await asyncio.to_thread(client.worker.wait) == 0


async def test_when_the_scheduler_dies_the_call_ends_and_its_streams_with_it(connect) -> None:
    client = await connect(step_ms=5, own=True)
    for number in range(1, 31):
        await client.submit(number, [number])
    await client.until(lambda: len(client.tokens) == 30)
    os.kill(client.worker.scheduler_pid(), signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await client.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not client.ends, "none was refused: they may go on"


async def test_continuations_of_one_stream_come_together_and_end_one_by_one(connect) -> None:
    client = await connect("--eos-token", "4", "--vocab-size", "20", step_ms=3)
    message = worker_pb2.WorkerGenerateRequest(
        request_id="many", token_ids=[7] * 40, sampling=common_pb2.SamplingParams(seed=SEED, n=8, max_tokens=40)
    )
    submit = worker_pb2.SessionSubmit(stream_id=1, request=message)
    await client.call.write(worker_pb2.SessionRequest(submits=[submit]))
    parts: dict[int, list[worker_pb2.WorkerGenerateResponse]] = {}
    async with asyncio.timeout(60):
        while sum(bool(each[-1].finish_reason) for each in parts.values()) < 8:
            for output in (await client.call.read()).outputs:
                assert output.stream_id == 1
                parts.setdefault(output.response.index, []).append(output.response)
    lengths = set()
    for index, responses in parts.items():
        tokens = [token for response in responses for token in response.token_ids]
        own = continuation([7] * 40, SamplingParams(seed=child_seed(SEED, index)), 20)
        whole = list(islice(own, 40))
        end = whole.index(4) + 1 if 4 in whole else 40
        assert tokens == whole[:end]
        assert [bool(response.finish_reason) for response in responses[:-1]] == [False] * (len(responses) - 1)
        lengths.add(len(tokens))
    assert len(lengths) > 1
    await client.submit(1, [5], max_tokens=3)  # the stream is over: its id is not open any more
    await client.until(lambda: 1 in client.ends)
    assert client.tokens[1] == list(islice(continuation([5], SamplingParams(seed=SEED), 20), 3))


async def test_embeddings_travel_it_beside_generations(connect) -> None:
    client = await connect("--embedding-size", "1", step_ms=2)
    inputs = [common_pb2.TokenIds(ids=range(number, number + 40)) for number in range(1, 6)]
    embed = worker_pb2.WorkerEmbedRequest(request_id="e", inputs=inputs, normalize=False)
    alone = await client.stub.Embed(embed)
    wrong = worker_pb2.WorkerEmbedRequest(inputs=[common_pb2.TokenIds(ids=[5000])])
    submit = worker_pb2.SessionSubmit
    await client.call.write(
        worker_pb2.SessionRequest(
            submits=[submit(stream_id=1, embed=embed), submit(stream_id=2, embed=wrong), submit(stream_id=3)]
        )
    )
    await client.submit(4, [1, 2, 3], max_tokens=20)
    outputs: dict[int, worker_pb2.SessionOutput] = {}
    while len(outputs) < 3 or 4 not in client.ends:
        response = await client.read()
        outputs |= {output.stream_id: output for output in response.outputs if output.stream_id < 4}
    assert outputs[1].embeddings == alone
    assert alone.prompt_tokens == 200
    assert (outputs[2].error.field, outputs[3].error.field) == ("inputs", "request_id")
    assert len(client.tokens[4]) == 20


async def test_an_embedding_request_that_is_aborted_or_late_leaves_the_scheduler(connect) -> None:
    client = await connect("--embedding-size", "1", "--max-running", "1", own=True)
    await client.stub.Pause(worker_pb2.PauseRequest())
    embed = worker_pb2.WorkerEmbedRequest(inputs=[common_pb2.TokenIds(ids=[number]) for number in (1, 2, 3)])
    submits = [
        worker_pb2.SessionSubmit(stream_id=1, embed=embed),
        worker_pb2.SessionSubmit(stream_id=2, embed=embed, timeout_ms=300),
    ]
    await client.call.write(worker_pb2.SessionRequest(submits=submits))
    await client.load_where(lambda load: load.waiting_requests == 6)
    await client.until(lambda: 2 in client.ends)
    assert client.ends[2].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    await client.load_where(lambda load: load.waiting_requests == 3)
    await client.call.write(worker_pb2.SessionRequest(aborts=[1]))
    await client.load_where(lambda load: load.waiting_requests == 0)
    assert 1 not in client.ends


async def test_a_message_of_many_requests_is_taken_a_few_a_turn_of_the_loop() -> None:
    turns: list[None] = []
    begun: list[int] = []

    async def start(*_: object) -> NoReturn:
        if not begun or begun[-1] != len(turns):
            asyncio.get_running_loop().call_soon(turns.append, None)
        begun.append(len(turns))
        raise UnavailableError("it takes none")

    async def requests() -> AsyncIterator[worker_pb2.SessionRequest]:
        submits = [worker_pb2.SessionSubmit(stream_id=number + 1, request={}) for number in range(5 * A_FEW)]
        yield worker_pb2.SessionRequest(heartbeat_ms=1000)
        yield worker_pb2.SessionRequest(submits=submits, aborts=range(10**6, 10**6 + 5000))
        await asyncio.Event().wait()

    liveness = SimpleNamespace(stuck=False, frozen=0.0, step=0.0, lag=SimpleNamespace(recent=0.0))
    engine = SimpleNamespace(load_version=-1, liveness=liveness)
    session = Session(
        start, None, engine, worker_pb2.GetModelInfoResponse, lambda: 0, asyncio.Event(), lambda: None, no_loras()
    )
    refused: list[int] = []
    async for response in session.responses(requests()):
        refused += [output.stream_id for output in response.outputs if output.HasField("error")]
        if len(refused) == 5 * A_FEW:
            break
    assert sorted(refused) == list(range(1, 5 * A_FEW + 1))
    assert len(begun) == 5 * A_FEW
    assert max(map(begun.count, begun)) <= A_FEW
