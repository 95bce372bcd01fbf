"""A real worker in processes of its own, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sapwood_testing.namespace import Namespace


class StartedWorker(NamedTuple):
    """A worker that listens.

    Attributes:
        address: Of its gRPC server.
        metrics: The URL of its metrics.
        pid: The front's process.
    """

    address: str
    metrics: str
    pid: int


@contextlib.contextmanager
def started_worker(
    model: Path, log: Path, *flags: str, inside: Namespace | None = None, module: str = "sapwood_worker"
) -> Iterator[StartedWorker]:
    """Starts a worker, and kills it in the end.

    Args:
        model: What it serves.
        log: Where it writes what it says.
        flags: Further flags.
        inside: The network that it is in; None: this machine's.
        module: What is run.

    Raises:
        AssertionError: It has ended before it listened.
    """
    command = [
        *(() if inside is None else ("ip", "netns", "exec", inside.name)),
        *(sys.executable, "-m", module, "--model", str(model), "--port", "0", "--metrics-port", "0", *flags),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        metrics = re.search(r"metrics at (\S+/metrics)", log.read_text())
        assert metrics is not None
        yield StartedWorker(found[1], metrics[1], process.pid)
    finally:
        process.kill()
        process.wait()
