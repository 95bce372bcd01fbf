"""The load generator: several processes, so that the client is not what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec

from serving_load.load_process import READY, Job
from serving_load.stream import Stream
from serving_load.workload import Planned

_LEAD_SECONDS = 0.3


class LoadFailedError(Exception):
    """A request failed, or gave other than the tokens asked for."""


def run_load(
    kind: Literal["gRPC", "HTTP"], address: str, model: str, requests: list[Planned], processes: int
) -> list[Stream]:
    """Sends requests, each at its time, from so many processes, and waits for all answers.

    Raises:
        LoadFailedError: Not every request got its tokens; says what the first of them got.
    """
    shares = [share for share in (requests[number::processes] for number in range(processes)) if share]
    folder = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "serving_load.load_process"]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in shares
    ]
    with tempfile.TemporaryDirectory(prefix="serving-load-") as results:
        files = [Path(results) / str(number) for number in range(len(shares))]
        try:
            for client, share, file in zip(clients, shares, files, strict=True):
                _tell(client, msgspec.json.encode(Job(kind, address, model, share, str(file))).decode())
            for client in clients:
                assert client.stdout is not None
                if client.stdout.readline().strip() != READY:
                    raise LoadFailedError("a process of the load generator could not start")
            start = time.monotonic() + _LEAD_SECONDS
            for client in clients:
                _tell(client, str(start))
            codes = [client.wait() for client in clients]
            if any(codes):
                raise LoadFailedError("a process of the load generator failed")
        finally:
            for client in clients:
                client.kill()
                client.communicate()
        streams = [msgspec.json.decode(file.read_bytes(), type=list[Stream]) for file in files]
    for share, got in zip(shares, streams, strict=True):
        for request, stream in zip(share, got, strict=True):
            if stream.error or stream.tokens != request.outputs:
                raise LoadFailedError(f"{kind}: {stream.tokens} of {request.outputs} tokens; {stream.error}")
    return [stream for got in streams for stream in got]


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()
