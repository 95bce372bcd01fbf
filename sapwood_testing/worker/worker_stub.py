"""Stubs of real workers, on one host or on two."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from sapwood.v1 import worker_pb2_grpc
from sapwood_testing.namespace import Namespace
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.group_key import group_key
from sapwood_testing.worker.worker_process import started_worker


@contextlib.contextmanager
def worker(
    model: Path, log: Path, *flags: str, inside: Namespace | None = None, module: str = "sapwood_worker"
) -> Iterator[Any]:
    """A worker's stub; its process id is in ``pid``. ``inside``: the network that it is in; ``module``: what is run."""
    with (
        started_worker(model, log, *flags, inside=inside, module=module) as found,
        grpc.insecure_channel(found.address) as channel,
    ):
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        stub.pid = found.pid
        yield stub


@contextlib.contextmanager
def two_hosts(
    model: Path,
    log: Path,
    inside: Namespace | None,
    *flags: str,
    others: Path | None = None,
    module: str = "sapwood_worker",
) -> Iterator[Any]:
    """A worker's stub whose first host is in a network of its own, if one is given, and whose second is this machine.

    ``others``: the second host's model, if it is another; ``module``: what is run.
    """
    host = "127.0.0.1" if inside is None else inside.host
    meeting = ("--rendezvous", f"{host}:{port_of_its_own()}", "--rendezvous-key", group_key())
    flags = ("--nnodes", "2", *meeting, *flags)
    command = [sys.executable, "-m", module, "--model", str(others or model), "--node-rank", "1", *flags]
    with log.with_suffix(".second").open("w") as output:
        second = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        with worker(model, log, "--host", host, *flags, inside=inside, module=module) as stub:
            yield stub
    finally:
        second.terminate()
        assert second.wait() == 0
