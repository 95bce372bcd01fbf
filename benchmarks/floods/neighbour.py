"""A program that has nothing to do with the servers: it reads whatever comes and drops it.

A flood of it shows what an attacker costs others by the CPU time that he and the kernel take, whatever the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import uvloop


@contextlib.contextmanager
def neighbour() -> Iterator[int]:
    """Starts it; its port on 127.0.0.1."""
    command = [sys.executable, "-m", "floods.neighbour"]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


class _Sink(asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        pass


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(_Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
