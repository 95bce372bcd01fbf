"""A process of other clients: what each kind of them waits for an answer, on new connections and on kept ones.

It answers each line of its input, a number of seconds, with a line of JSON: latencies in seconds by kind, and what failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import ssl
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import uvloop
from floods.wire import GENERATE, HEALTH, CallFailedError, Http2Client, call_block, client_tls

from sapwood.v1 import common_pb2, router_pb2

TOKENS = 4
_REST = 0.01
_TIMEOUT = 20.0
_numbers = itertools.count()

Ask = Callable[[], Coroutine[Any, Any, None]]


class _Grpc:
    """Calls of one method."""

    def __init__(self, port: int, tls: ssl.SSLContext | None, block: bytes, make: Callable[[], bytes]) -> None:
        self._port, self._tls, self._block, self._make = port, tls, block, make
        self._kept: Http2Client | None = None

    async def on_new(self) -> None:
        client = await Http2Client.connect(self._port, self._tls)
        try:
            await client.call(self._block, self._make())
        finally:
            client.close()

    async def on_kept(self) -> None:
        if self._kept is None:
            self._kept = await Http2Client.connect(self._port, self._tls)
        try:
            await self._kept.call(self._block, self._make())
        except BaseException:
            self._kept.close()
            self._kept = None
            raise


class _Http:
    """Completions over HTTP/1.1."""

    def __init__(self, port: int, tls: ssl.SSLContext | None, key: str) -> None:
        self._port, self._tls, self._key = port, tls, key
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def on_new(self) -> None:
        streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls)
        try:
            await self._ask(*streams)
        finally:
            streams[1].transport.abort()

    async def on_kept(self) -> None:
        if self._kept is None:
            self._kept = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls)
        try:
            await self._ask(*self._kept)
        except BaseException:
            self._kept[1].transport.abort()
            self._kept = None
            raise

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = msgspec.json.encode({"model": "mock", "prompt": f"other {next(_numbers)}", "max_tokens": TOKENS})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise CallFailedError(answer[:60].decode("latin-1"))
        fields = dict(line.split(b": ", 1) for line in answer.split(b"\r\n")[1:-2])
        await reader.readexactly(int(fields[b"content-length"]))


def _generate() -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return router_pb2.RouterGenerateRequest(text=f"other {next(_numbers)}", sampling=sampling).SerializeToString()


def make_kinds(grpc_port: int, http_port: int, key: str, tls: bool) -> dict[str, Ask]:
    """The other clients by kind; those of a server without completions ask for its health only."""
    h2, h1 = (client_tls("h2"), client_tls(None)) if tls else (None, None)
    health = _Grpc(grpc_port, h2, call_block(HEALTH), bytes)
    kinds: dict[str, Ask] = {"health, kept": health.on_kept, "health, new": health.on_new}
    if http_port:
        generate = _Grpc(grpc_port, h2, call_block(GENERATE, ("authorization", f"Bearer {key}")), _generate)
        http = _Http(http_port, h1, key)
        kinds |= {"gRPC, kept": generate.on_kept, "gRPC, new": generate.on_new}
        kinds |= {"HTTP, kept": http.on_kept, "HTTP, new": http.on_new}
    return kinds


async def _measure(kinds: dict[str, Ask], seconds: float) -> dict[str, Any]:
    latencies: dict[str, list[float]] = {kind: [] for kind in kinds}
    failed: dict[str, int] = {}
    until = time.monotonic() + seconds

    async def client(kind: str, ask: Ask) -> None:
        while time.monotonic() < until:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await ask()
            except (CallFailedError, OSError, EOFError, TimeoutError) as error:
                problem = f"{kind}: {type(error).__name__} {error}"
                failed[problem] = failed.get(problem, 0) + 1
            latencies[kind].append(time.perf_counter() - began)
            await asyncio.sleep(_REST)

    await asyncio.gather(*(client(kind, ask) for kind, ask in kinds.items()))
    return {"latencies": latencies, "failed": failed}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--http-port", type=int, default=0)
    parser.add_argument("--key", default="")
    parser.add_argument("--tls", action="store_true")
    args = parser.parse_args()
    kinds = make_kinds(args.grpc_port, args.http_port, args.key, args.tls)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await _measure(kinds, float(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
