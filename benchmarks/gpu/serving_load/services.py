"""Tokenizer, worker and router as processes, started with the command lines that ``sapwood up`` uses, on free ports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep

import grpc

from sapwood.cli.local.gpus import VISIBLE, gpus_here
from sapwood.v1 import worker_pb2, worker_pb2_grpc

_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENING = re.compile(r"\b(?:(\w+) )?listening on (?:https?://)?(\S+:\d+)")
_START_SECONDS = 300.0
_STOP_SECONDS = 20.0


class ServiceFailedError(Exception):
    """A service did not start."""


def gpus_of_pair(device: str) -> list[str]:
    """The GPUs of two workers, of those that this process may use; without names where there are no GPUs to choose from.

    Raises:
        ServiceFailedError: There are too few.
    """
    if device == "cpu":
        return ["", ""]
    found = gpus_here(os.environ)
    if len(found) < 2:
        raise ServiceFailedError(f"a pair of workers takes two GPUs, of which {len(found)} can be used here")
    return found[:2]


class Service:
    """A running service; what it writes goes to ``NAME.log``.

    Args:
        name: For the log and the figures.
        module: Its package.
        flags: Its command line.
        logs: Folder for the log.
        gpu: The one GPU that it sees, as CUDA_VISIBLE_DEVICES names it; empty: as it is here.
    """

    def __init__(self, name: str, module: str, flags: Sequence[str], logs: Path, gpu: str = "") -> None:
        self.name = name
        self._log = logs / f"{name}.log"
        self._addresses: dict[str, str] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sapwood.cli.local.tied", module, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"} | ({VISIBLE: gpu} if gpu else {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self, kind: str = "") -> str:
        """The address of its log line ``KIND listening on HOST:PORT``; without a kind, of the first.

        Raises:
            ServiceFailedError: It ended before, or takes too long.
        """
        with self._changed:
            self._changed.wait_for(lambda: kind in self._addresses or self._ended, _START_SECONDS)
            if kind in self._addresses:
                return self._addresses[kind]
        last = self._log.read_text()[-2000:]
        raise ServiceFailedError(f"{self.name} does not listen; it wrote last:\n{last}")

    def stop(self) -> None:
        """Asks it to end, and ends it if it does not."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if (found := _LISTENING.search(line)) is not None:
                    with self._changed:
                        self._addresses.setdefault(found[1] or "", found[2])
                        self._addresses.setdefault("", found[2])
                        self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Services:
    """One of each. Use as a context manager; inside, all of them are ready.

    Args:
        model: The model's folder.
        worker_module: What to start as the worker.
        worker_flags: The worker's, besides model and port.
        router_flags: The router's, besides addresses.
        logs: Folder for their logs.
    """

    def __init__(
        self, model: Path, worker_module: str, worker_flags: Sequence[str], router_flags: Sequence[str], logs: Path
    ) -> None:
        self._model = model
        self._worker_module = worker_module
        self._worker_flags = worker_flags
        self._router_flags = router_flags
        self._logs = logs
        self._started: list[Service] = []
        self.grpc = self.http = self._worker = ""
        self.seconds = self.worker_seconds = 0.0

    def __enter__(self) -> Services:
        shared = ("--port", "0", "--model", str(self._model), "--served-model-name", self.name)
        try:
            began = monotonic()
            worker = self._start("worker", self._worker_module, *shared, *self._worker_flags)
            tokenizer = self._start("tokenizer", "sapwood_tokenizer", *shared)
            self._worker = worker.address()
            self.worker_seconds = monotonic() - began
            router = self._start(
                "router", "sapwood_router", "--port", "0", "--http-port", "0", "--log-level", "warning",
                "--tokenizer", tokenizer.address(), "--workers", self._worker, *self._router_flags,
            )  # fmt: skip
            self.grpc, self.http = router.address("gRPC"), router.address("HTTP")
            self._await_health()
            self.seconds = monotonic() - began
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for service in reversed(self._started):
            service.stop()

    def flush_cache(self) -> None:
        """Empties the worker's prefix cache."""
        with grpc.insecure_channel(self._worker) as channel:
            worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest(), timeout=30)

    @property
    def name(self) -> str:
        """The model's, as clients call it."""
        return self._model.name

    def processes(self) -> dict[str, int]:
        """Process ids by name; the worker's two apart."""
        found = {service.name: service.pid for service in self._started}
        children = Path(f"/proc/{found['worker']}/task/{found['worker']}/children").read_text().split()
        schedulers = [
            child for child in children if b"scheduler_process" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return found | {"scheduler": int(schedulers[0])}

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time by process, all threads, so far."""
        return {name: _cpu_seconds(pid) for name, pid in self.processes().items()}

    def _start(self, name: str, module: str, *flags: str) -> Service:
        service = Service(name, module, flags, self._logs)
        self._started.append(service)
        return service

    def _await_health(self) -> None:
        until = monotonic() + _START_SECONDS
        while monotonic() < until:
            with contextlib.suppress(urllib.error.URLError, OSError):
                if urllib.request.urlopen(f"http://{self.http}/health", timeout=5).status == 200:
                    return
            sleep(0.02)
        raise ServiceFailedError("the router does not become healthy")


def _cpu_seconds(pid: int) -> float:
    # After the name, which may hold anything: the state is field 3, utime 14, stime 15.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
