"""One process of the load generator: ``python -m serving_load.load_process``.

Standard input: a line with a job in JSON, then, once this process has said ``ready``, a line with the start on
``time.monotonic``'s clock; and so on, until it ends. Standard output: ``ready`` and ``done`` for each job. What it saw goes to a
file: standard output was seen to lose what a pipe does not take at once.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import uvloop

from serving_load.clients import Client, GrpcClient, HttpClient
from serving_load.stream import Stream
from serving_load.workload import Planned

READY, DONE = "ready", "done"


class Job(msgspec.Struct, frozen=True):
    """Which requests to send, by which protocol, where to, naming which model; and where to write the streams, in JSON."""

    kind: Literal["gRPC", "HTTP"]
    address: str
    model: str
    requests: list[Planned]
    results: str


async def _serve() -> None:
    clients: dict[tuple[str, str, str], Client] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = msgspec.json.decode(line, type=Job)
        named = job.kind, job.address, job.model
        if named not in clients:
            clients[named] = GrpcClient(job.address) if job.kind == "gRPC" else HttpClient(job.address, job.model)
            await clients[named].warm_up()
        print(READY, flush=True)
        start = float(await asyncio.to_thread(sys.stdin.readline))
        streams = await asyncio.gather(*(_send(clients[named], request, start) for request in job.requests))
        await asyncio.to_thread(Path(job.results).write_bytes, msgspec.json.encode(streams))
        print(DONE, flush=True)
        gc.collect()


async def _send(client: Client, request: Planned, start: float) -> Stream:
    await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
    return await client.ask(request)


def main() -> None:
    gc.disable()  # a collection in the client is not the server's delay: there is one after each job
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
