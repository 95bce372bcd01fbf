"""A Mooncake Store of its own: a master and a client that lends it memory, each a process. For tests and benchmarks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from sapwood_worker.core.cache.storage.mooncake_store import MooncakeOptions, MooncakeStorage

_MASTER = Path(sys.executable).with_name("mooncake_master")
_LENDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(sys.argv[1], sys.argv[2], int(sys.argv[4]), 16 << 20, "tcp", "", sys.argv[3]) == 0
print("ready", flush=True)
time.sleep(1e6)
"""


@functools.cache
def mooncake_is_installed() -> bool:
    """Whether there can be a cluster: the package is here, and the libraries of the system that it wants are."""
    if importlib.util.find_spec("mooncake") is None or not _MASTER.exists():
        return False
    return subprocess.run([str(_MASTER), "--version"], capture_output=True, check=False, timeout=60).returncode != 127


class MooncakeCluster:
    """The processes, on free ports of this machine. A context manager: they run within the block.

    Args:
        folder: For their log.
        lend_bytes: Memory that the client lends.
    """

    def __init__(self, folder: Path, lend_bytes: int = 64 << 20) -> None:
        self._log = folder / "mooncake.log"
        self._lend_bytes = lend_bytes
        self._rpc, self._http, self._metrics, self._lender_port = _free_ports(4)
        self._metadata = f"http://127.0.0.1:{self._http}/metadata"
        self._master: subprocess.Popen[Any] | None = None
        self._lender: subprocess.Popen[Any] | None = None

    def connect(self) -> MooncakeStorage:
        """A client, given all the time a busy machine may take."""
        return MooncakeStorage(MooncakeOptions(f"127.0.0.1:{self._rpc}", self._metadata), patience=300)

    @property
    def url(self) -> str:
        """For ``--storage``."""
        return f"mooncake://127.0.0.1:{self._rpc}?metadata={self._metadata}"

    def __enter__(self) -> MooncakeCluster:
        try:
            self.start_master()
            command = [
                *(sys.executable, "-c", _LENDER, f"127.0.0.1:{self._lender_port}", self._metadata),
                *(f"127.0.0.1:{self._rpc}", str(self._lend_bytes)),
            ]
            with self._log.open("a") as log:
                self._lender = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert self._lender.stdout is not None
            assert self._lender.stdout.readline() == "ready\n", self._log.read_text()[-2000:]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start_master(self) -> None:
        """Starts the master and waits until it listens."""
        ports = (
            f"--rpc_port={self._rpc}",
            f"--http_metadata_server_port={self._http}",
            f"--metrics_port={self._metrics}",
        )
        with self._log.open("a") as log:
            self._master = subprocess.Popen(
                [str(_MASTER), "--enable_http_metadata_server=true", *ports], stdout=log, stderr=subprocess.STDOUT
            )
        for port in (self._rpc, self._http):
            while True:
                assert self._master.poll() is None, f"mooncake_master ended: {self._log.read_text()[-2000:]}"
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)

    def kill_master(self) -> None:
        """Kills the master (SIGKILL)."""
        assert self._master is not None
        self._master.kill()
        self._master.wait()

    def _stop(self) -> None:
        for process in (self._lender, self._master):
            if process is not None:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    """Free ports below those that the kernel hands out: nobody takes them before the master does, or while it is away."""
    found: set[int] = set()
    while len(found) < count:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
            found.add(probe.getsockname()[1])
    return list(found)
