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

from serving_load.load_process import DONE, READY, Job
from serving_load.stream import Stream
from serving_load.workload import Planned

_LEAD_SECONDS = 0.1
"""From when all are ready to the start: none hears of it too late."""


class LoadFailedError(Exception):
    """A request failed, or gave other than the tokens asked for."""


class Clients:
    """The processes of the load generator, for one load after the other: they start once, and stay connected. Use as a context
    manager.

    Args:
        processes: How many.
    """

    def __init__(self, processes: int) -> None:
        folder = Path(__file__).resolve().parent.parent
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "serving_load.load_process"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(processes)
        ]

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def run(self, kind: Literal["gRPC", "HTTP"], address: str, model: str, requests: list[Planned]) -> list[Stream]:
        """Sends requests, each at its time, and waits for all answers; they come in the order of the processes.

        Raises:
            LoadFailedError: Not every request got its tokens; says what the first of them got.
        """
        count = len(self._processes)
        shares = [share for share in (requests[number::count] for number in range(count)) if share]
        asked = self._processes[: len(shares)]
        with tempfile.TemporaryDirectory(prefix="serving-load-") as results:
            files = [Path(results) / str(number) for number in range(len(shares))]
            for process, share, file in zip(asked, shares, files, strict=True):
                _tell(process, msgspec.json.encode(Job(kind, address, model, share, str(file))).decode())
            for process in asked:
                _hear(process, READY)
            start = time.monotonic() + _LEAD_SECONDS
            for process in asked:
                _tell(process, str(start))
            for process in asked:
                _hear(process, DONE)
            streams = [msgspec.json.decode(file.read_bytes(), type=list[Stream]) for file in files]
        for share, got in zip(shares, streams, strict=True):
            for request, stream in zip(share, got, strict=True):
                if stream.error or stream.tokens != request.outputs:
                    raise LoadFailedError(f"{kind}: {stream.tokens} of {request.outputs} tokens; {stream.error}")
        return [stream for got in streams for stream in got]


def run_load(
    kind: Literal["gRPC", "HTTP"], address: str, model: str, requests: list[Planned], processes: int
) -> list[Stream]:
    """One load, from so many processes that end with it; as :meth:`Clients.run`."""
    with Clients(processes) as clients:
        return clients.run(kind, address, model, requests)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != word:
        raise LoadFailedError(f"a process of the load generator did not come to {word!r}")
