"""The bytes that reach a client, for requests over every API, are those that were recorded.

A refactoring leaves them as they are. Who changes them on purpose records them with ``SAPWOOD_RECORD=1`` and reads the diff.
What differs from run to run stands for itself: ids, times and ports. A machine that is short of time may put two of the
worker's messages into one event, so a record that differs is tried again with more time between them.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from google.protobuf import text_format

from sapwood.v1 import worker_pb2
from sapwood_common.errors import UnavailableError
from sapwood_testing.router.recorded_requests import GRPC, HTTP, Grpc, Http

FOLDER = Path(__file__).parent / "answers"
CHANGING = [
    (re.compile(r"\b[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\b|\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"req-<id>(?:\.[0-9a-f]+)?"), "<request>"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[0-9.]*Z"), "<time>"),
    (re.compile(r"\b((?:call|rs|msg|resp|fc|cmpl|chatcmpl|toolu|sess|req)[_-])[0-9A-Za-z_-]{8,}"), r"\1<id>"),
    (re.compile(r'("(?:created|created_at|completed_at|expires_at|expires_in|e2e_latency)": ?)[0-9.]+'), r"\1<time>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "<address>"),
    (re.compile(r"(?m)^(date|x-request-id|request-id|x-sapwood-worker|content-length): .*$"), r"\1: <value>"),
    (re.compile(r'("(?:start_time|end_time|timestamp)": ?)[0-9.]+'), r"\1<time>"),
]
"""What may be other in each run, and what stands for it."""


def without_what_changes(text: str) -> str:
    for pattern, instead in CHANGING:
        text = pattern.sub(instead, text)
    return text


def unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + rest[:length], rest[length + 2 :]
        if length == 0:
            break
    return whole


def in_order_of_choices(stream: bytes) -> bytes:
    """The events of several choices come in any order; here the first choice's come first."""
    events = stream.split(b"\n\n")

    def choice(event: bytes) -> int:
        found = re.match(rb'data: .*?"choices":\[\{"index":(\d+)', event)
        return len(events) if found is None else int(found[1])

    return b"\n\n".join(sorted(events, key=choice)) if any(choice(event) == 1 for event in events) else stream


async def ask_http(cluster, case: Http) -> str:
    """What a client reads, from the first byte to the end of the connection."""
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = (
        case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode() if case.body is not None else b""
    )
    head = [f"{case.method} {case.path} HTTP/1.1", f"Host: {host}", "Connection: close", *case.headers]
    if case.body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    try:
        if case.leaves:
            start = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1)
            writer.close()
            await cluster.idle()
            return start.decode().replace("\r\n", "\n") + f"the worker's call: {cluster.calls()[-1].outcome}\n"
        answer = await reader.read()
    finally:
        writer.close()
    start, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in start.lower():
        rest = unchunked(rest)
    if b"\ndata: " in rest:
        rest = in_order_of_choices(rest)
    return start.decode().replace("\r\n", "\n") + "\n\n" + rest.decode() + ("" if rest.endswith(b"\n") else "\n")


async def ask_grpc(cluster, case: Grpc) -> str:
    """The messages of a call as text, or its status."""
    call = getattr(cluster.stub, case.method)(case.request, timeout=60)
    try:
        messages = [message async for message in call] if hasattr(call, "__aiter__") else [await call]
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}\n"
    messages.sort(key=lambda message: getattr(message, "index", 0))  # several choices come in any order
    return "".join(text_format.MessageToString(message, as_utf8=True) + "--\n" for message in messages)


async def record(cluster, cases: Sequence[Http | Grpc], delay: float) -> str:
    """What a client gets for each case, with so many seconds before each of the worker's messages."""
    parts = []
    for case in cases:
        cluster.answer_with(case.answer, chunk=4, delay=delay)
        for worker in cluster.workers:
            fails = isinstance(case, Http) and case.fails_after is not None
            worker.script.fail_after = case.fails_after if fails else None
            worker.script.error = UnavailableError("the worker is out of order") if fails else None
            worker.labels = list(case.labels) if isinstance(case, Http) else []
            worker.embedding_size = 0 if worker.labels else 3
            worker.activation = worker_pb2.ACTIVATION_UNSPECIFIED
        if isinstance(case, Http):
            title, answer = f"{case.method} {case.path}: {case.name}", await ask_http(cluster, case)
        else:
            title, answer = f"{case.method}: {case.name}", await ask_grpc(cluster, case)
        parts.append(f"=== {title}\n{without_what_changes(answer)}")
    return "\n".join(parts)


@pytest.mark.parametrize("api", [*HTTP, "grpc"])
async def test_answers_are_as_recorded(make_cluster, api: str) -> None:
    path = FOLDER / f"{api}.txt"
    for delay in (0.02, 0.1, 0.4):
        async with make_cluster(workers=1) as cluster:
            found = await record(cluster, HTTP.get(api, GRPC), delay)
        if os.environ.get("SAPWOOD_RECORD"):
            FOLDER.mkdir(exist_ok=True)
            path.write_text(found, encoding="utf-8")
        if found == (expected := path.read_text(encoding="utf-8")):
            return
    difference = difflib.unified_diff(expected.splitlines(), found.splitlines(), "recorded", "found", lineterm="")
    pytest.fail("\n".join(difference), pytrace=False)
