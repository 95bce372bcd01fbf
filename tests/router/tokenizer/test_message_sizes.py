"""What many requests bring together does not make a message that a service refuses: it would end the session of all."""

import asyncio
import time
from typing import cast

import pytest

from sapwood.v1 import worker_pb2
from sapwood_common.network.channel import MAX_MESSAGE_BYTES, Dialer
from sapwood_net.http2.client.duplex_call import DuplexCall
from sapwood_router.fleet.convert import pack
from sapwood_router.fleet.session import StreamSink, WorkerSession

MOST = MAX_MESSAGE_BYTES / 8
REQUESTS = 128
MEGABYTE = 1 << 20


class WrittenCall:
    """A call that keeps what is written."""

    ready = True

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, message: bytes) -> None:
        self.written.append(message)

    async def all_written(self) -> None:
        """Large messages leave one a turn of the event loop."""
        for _ in range(REQUESTS + 1):
            await asyncio.sleep(0)


async def test_many_large_grammars_for_one_worker_go_in_several_messages() -> None:
    call = WrittenCall()
    session = WorkerSession(
        "w", Dialer(), 200, lambda *_: None, lambda _: 1.0, lambda _: None, lambda: 1.0, time.monotonic
    )
    session._call = cast(DuplexCall, call)
    for _ in range(REQUESTS):
        request = worker_pb2.WorkerGenerateRequest(token_ids=[1])
        request.grammar.compiled = bytes(MEGABYTE)
        session.open(request, 1.0, cast(StreamSink, None))  # nothing comes back
    await call.all_written()
    assert max(map(len, call.written)) < MOST
    submits = [item for message in call.written for item in worker_pb2.SessionRequest.FromString(message).submits]
    assert [item.stream_id for item in submits] == list(range(1, REQUESTS + 1))


@pytest.mark.parametrize("count", [1, 30, 70_000])  # lengths of one, two and three bytes
async def test_a_request_may_come_in_parts_beside_others(count: int) -> None:
    call = WrittenCall()
    session = WorkerSession(
        "w", Dialer(), 200, lambda *_: None, lambda _: 1.0, lambda _: None, lambda: 1.0, time.monotonic
    )
    session._call = cast(DuplexCall, call)
    tokens, sink = [7] * count, cast(StreamSink, None)
    session.open(worker_pb2.WorkerGenerateRequest(request_id="a", token_ids=[1]), 1.0, sink)
    whole = worker_pb2.WorkerGenerateRequest(request_id="b", tenant="t")
    session.open(whole, 1.0, sink, [pack(tokens), pack([8, 9])])
    session.open(worker_pb2.WorkerGenerateRequest(request_id="c", token_ids=[2]), 1.0, sink)
    await call.all_written()
    submits = [item for message in call.written for item in worker_pb2.SessionRequest.FromString(message).submits]
    assert [(item.stream_id, item.request.request_id, item.timeout_ms) for item in submits] == [
        (1, "a", 1000),
        (2, "b", 1000),
        (3, "c", 1000),
    ]
    assert [list(item.request.token_ids) for item in submits] == [[1], [*tokens, 8, 9], [2]]
    assert submits[1].request.tenant == "t"


@pytest.mark.parametrize("count", [1024, 1025])
async def test_stop_tokens_are_bounded(cluster, count: int) -> None:
    body = {"prompt": [65], "max_tokens": 2, "stop_token_ids": [5] * count}
    answer = await cluster.http.post("/v1/completions", json=body)
    assert (answer.status_code == 200) == (count == 1024), answer.text
    if answer.status_code != 200:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop_token_ids")
