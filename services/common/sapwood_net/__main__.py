"""An example that runs: a service of two methods, and a client that talks with it over one call.

    python -m sapwood_net serve 50080
    python -m sapwood_net call 127.0.0.1:50080 hello "good bye"

Messages are plain bytes here. Generated code of protobuf is registered in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from sapwood_net.errors import CallError, InvalidArgumentError
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_net.http2.server.server import Http2Server
from sapwood_net.sockets.port import Port

SERVICE = "example.Echo"
MOST_BYTES = 1 << 20


async def say(request: bytes, context: Any) -> bytes:
    """Answers with the request. Raises InvalidArgumentError if it is empty."""
    if not request:
        raise InvalidArgumentError("there is nothing to say")
    return request


async def talk(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Answers each message of a call as it comes."""
    async for request in requests:
        yield await say(request, context)


def status_of(error: CallError) -> tuple[grpc.StatusCode, str, tuple[()]]:
    """The part of an error that a caller sees."""
    known = isinstance(error, InvalidArgumentError)
    return grpc.StatusCode.INVALID_ARGUMENT if known else grpc.StatusCode.INTERNAL, error.message, ()


def make_server() -> Http2Server:
    """The service, which does not listen yet."""
    server = Http2Server(lambda method, handler: handler, MOST_BYTES, status_of)
    handlers: dict[str, Any] = {
        "Say": grpc.unary_unary_rpc_method_handler(say),
        "Talk": grpc.stream_stream_rpc_method_handler(talk),
    }
    server.add_registered_method_handlers(SERVICE, handlers)
    return server


async def serve(port: int) -> None:
    """Serves until it is cancelled, and lets running calls end for five seconds."""
    server = make_server()
    number = await server.start(Port("127.0.0.1", port))
    print(f"listening on 127.0.0.1:{number}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop(5.0)


async def call(address: str, words: list[str]) -> list[str]:
    """The service's answers to each word, over one call. Raises CallEndedError if the call ends before."""
    host, _, port = address.rpartition(":")
    talking = DuplexCall(address, f"/{SERVICE}/Talk", secure=False, most_bytes=MOST_BYTES)
    await asyncio.get_running_loop().create_connection(lambda: talking, host, int(port))
    try:
        answers = []
        for word in words:
            talking.write(word.encode())
            answers.append((await talking.read()).decode())
        return answers
    finally:
        talking.close()


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    match arguments:
        case ["serve", port] if port.isdigit():
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(serve(int(port)))
            return 0
        case ["call", address, *words] if address.rpartition(":")[2].isdigit():
            try:
                print("\n".join(asyncio.run(call(address, words))))
            except (CallEndedError, OSError) as error:
                print(f"{address}: {error}", file=sys.stderr)
                return 1
            return 0
    print("usage: python -m sapwood_net serve PORT | call HOST:PORT WORD...", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
