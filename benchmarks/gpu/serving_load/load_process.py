"""One process of the load generator: ``python -m serving_load.load_process``.

Standard input: a line with the job in JSON, then, once this process has said ``ready``, a line with the start on
``time.monotonic``'s clock. Standard output: ``ready``. What it saw goes to a file: standard output was seen to lose what a
pipe does not take at once.
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

READY = "ready"


class Job(msgspec.Struct, frozen=True):
    """Which requests to send, by which protocol, where to, naming which model; and where to write the streams, in JSON."""

    kind: Literal["gRPC", "HTTP"]
    address: str
    model: str
    requests: list[Planned]
    results: str


async def _run(job: Job) -> list[Stream]:
    client: Client = GrpcClient(job.address) if job.kind == "gRPC" else HttpClient(job.address, job.model)
    await client.warm_up()
    print(READY, flush=True)
    start = float(await asyncio.to_thread(sys.stdin.readline))

    async def send(request: Planned) -> Stream:
        await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
        return await client.ask(request)

    return await asyncio.gather(*map(send, job.requests))


def main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    gc.disable()  # a collection in the client is not the server's delay
    Path(job.results).write_bytes(msgspec.json.encode(uvloop.run(_run(job))))


if __name__ == "__main__":
    main()
