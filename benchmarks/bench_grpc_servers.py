"""CPU time of a service's process for each gRPC message, with Sapwood's server and with grpcio's (``--grpc-server``).

    .venv/bin/python benchmarks/bench_grpc_servers.py

A client in this process holds 32 streams, each with messages of 200 bytes; the service in another either sends or receives them.
Counted is all CPU time of that process: sockets, event loop and handlers too. Absolute times are the machine's; compare the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from sapwood_common.serving.server import Implementation, ServiceServer

STREAMS, MESSAGES, ROUNDS = 32, 150, 3
MESSAGE = bytes(200)
PAUSES = (0.0, 0.02)
"""Seconds between two messages of a stream: as fast as possible, and a token's pace."""


async def send(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(MESSAGES):
        await asyncio.sleep(float(request))
        yield MESSAGE


async def receive(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        pass
    yield b""


async def serve(implementation: Implementation, parent: Connection) -> None:
    server = ServiceServer("127.0.0.1", 0, ["bench.Bench"], implementation=implementation)
    handlers = {
        "Send": grpc.unary_stream_rpc_method_handler(send, bytes, bytes),
        "Receive": grpc.stream_stream_rpc_method_handler(receive, bytes, bytes),
    }
    server.grpc.add_registered_method_handlers("bench.Bench", handlers)
    parent.send(await server.start())
    while await asyncio.to_thread(parent.recv):
        parent.send(time.process_time())
    await server.stop(0)


def run(implementation: Implementation, parent: Connection) -> None:
    uvloop.run(serve(implementation, parent))


async def drive(implementation: Implementation, port: int, service: Connection) -> None:
    def cpu_seconds() -> float:
        service.send(True)
        seconds: float = service.recv()
        return seconds

    async def requests(pause: float) -> AsyncIterator[bytes]:
        for _ in range(MESSAGES):
            await asyncio.sleep(pause)
            yield MESSAGE

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for pause in PAUSES:
            for name in ("Send", "Receive"):

                async def call(name: str = name, pause: float = pause) -> None:
                    if name == "Send":
                        responses = channel.unary_stream("/bench.Bench/Send")(str(pause).encode())
                    else:
                        responses = channel.stream_stream("/bench.Bench/Receive")(requests(pause))
                    async for _ in responses:
                        pass

                times = []
                for _ in range(ROUNDS):
                    before = cpu_seconds()
                    await asyncio.gather(*(call() for _ in range(STREAMS)))
                    times.append((cpu_seconds() - before) / STREAMS / MESSAGES * 1e6)
                print(f"{implementation:8} {name:8} pause {pause:5} s: {sorted(times)[ROUNDS // 2]:6.1f} us a message")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for implementation in ("sapwood", "grpcio"):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=run, args=(implementation, theirs), daemon=True)
        process.start()
        asyncio.run(drive(implementation, ours.recv(), ours))
        ours.send(False)
        process.join()


if __name__ == "__main__":
    main()
