"""A whole cluster of real processes that needs no model: router, tokenizer with a small vocabulary, and a worker with a fake
runner or a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sapwood.client import Client

MODULES = {
    "router": "sapwood_router",
    "tokenizer": "sapwood_tokenizer",
    "worker": "sapwood_testing.worker.fake_worker",
    "model worker": "sapwood_worker",
}


# Where processes get little of a core, none of them is gone because it is silent for some seconds.
PATIENT = {
    "SAPWOOD_ROUTER_WORKER_SILENCE": "30",
    "SAPWOOD_ROUTER_RESUME_GRACE": "60",
}


class Process:
    """A running service and what it logged."""

    def __init__(self, service: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sapwood.cli.local.tied", MODULES[service], *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("SAPWOOD_")} | PATIENT,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def find(self, pattern: str) -> str:
        """The first group of the first logged line that matches, as soon as there is one."""
        with self._changed:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found[1]
                if not self._reader.is_alive():
                    pytest.fail(f"no line like {pattern!r}:\n" + "\n".join(self.lines))
                self._changed.wait(0.5)

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Cluster:
    """Addresses and processes of the three services.

    Args:
        lent: A tokenizer and a worker that run already, and continue; none: it starts its own.
    """

    def __init__(self, lent: dict[str, Process] | None = None) -> None:
        self._lent = lent or {}
        self.processes: dict[str, Process] = dict(self._lent)
        self.grpc = self.http = self.tokenizer = self.worker = ""
        self.secure = False

    def start(self, model: Path, common: tuple[str, ...], **flags: tuple[str, ...]) -> None:
        """Starts all; the worker computes nothing, unless there are flags for a ``model_worker``."""
        if not self._lent:
            self._start("tokenizer", "--model", str(model), "--port", "0", *common, *flags.get("tokenizer", ()))
        if "model_worker" in flags:
            worker = Process("model worker", "--model", str(model), "--port", "0", *common, *flags["model_worker"])
            self.processes["worker"] = worker
        elif not self._lent:
            self._start("worker", "--port", "0", "--vocab-size", "256", *common, *flags.get("worker", ()))
        self.tokenizer = self.processes["tokenizer"].find(r"\blistening on ([\d.]+:\d+)")
        self.worker = self.processes["worker"].find(r"\blistening on ([\d.]+:\d+)")
        router = ("--port", "0", "--http-port", "0", "--tokenizer", self.tokenizer, "--workers", self.worker)
        self.secure = "--tls-cert" in flags.get("router", ())
        self._start("router", *router, *common, *flags.get("router", ()))
        self.grpc = self.processes["router"].find(r"gRPC listening on ([\d.]+:\d+)")
        self.http = self.processes["router"].find(r"HTTP listening on ([\d.]+:\d+)")

    def wait_ready(self) -> None:
        """Returns once the router can answer."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        scheme = "https" if self.secure else "http"
        deadline = time.monotonic() + 120
        while True:
            try:
                with opener.open(f"{scheme}://{self.http}/health", timeout=30):
                    return
            except OSError as error:  # not ready, or too slow to say so
                why = error.read() if isinstance(error, urllib.error.HTTPError) else error
                assert time.monotonic() < deadline, why
                time.sleep(0.05)

    def metrics(self, service: str) -> str:
        """What a service shows under /metrics."""
        address = self.http
        if service != "router":
            address = self.processes[service].find(r"metrics at http://([\d.]+:\d+)/metrics")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{address}/metrics", timeout=60) as response:
            return str(response.read().decode())

    def stop(self) -> None:
        """Stops all, the router first."""
        for name in ("router", "worker", "tokenizer"):
            if name in self.processes and name not in self._lent:
                self.processes[name].stop()

    def _start(self, service: str, *flags: str) -> None:
        self.processes[service] = Process(service, *flags)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer of 256 tokens and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return folder


def _services(small_model: Path) -> Iterator[Callable[..., Cluster]]:
    running: list[Cluster] = []

    def start(*common: str, model: Path = small_model, **flags: tuple[str, ...]) -> Cluster:
        cluster = Cluster()
        running.append(cluster)
        cluster.start(model, common, **flags)
        return cluster

    yield start
    for cluster in running:
        cluster.stop()


@pytest.fixture(scope="session")
def backends(small_model: Path) -> Iterator[dict[str, Process]]:
    """A tokenizer and a worker without flags, for routers of several tests."""
    running = {
        "tokenizer": Process("tokenizer", "--model", str(small_model), "--port", "0"),
        "worker": Process("worker", "--port", "0", "--vocab-size", "256"),
    }
    yield running
    for process in running.values():
        process.stop()


@pytest.fixture
def start_router(backends: dict[str, Process], small_model: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a router before the tests' common tokenizer and worker, which are to be left as they are."""
    running: list[Cluster] = []

    def start(*flags: str) -> Cluster:
        running.append(Cluster(backends))
        running[-1].start(small_model, (), router=flags)
        return running[-1]

    yield start
    for cluster in running:
        cluster.stop()


@pytest.fixture
def start_services(small_model: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster: ``start_services("--log-level", "info", worker=("--step-ms", "5"))``."""
    yield from _services(small_model)


@pytest.fixture(scope="module")
def module_services(small_model: Path) -> Iterator[Callable[..., Cluster]]:
    """The same for a module's tests together."""
    yield from _services(small_model)


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    """Starts one service: ``start_process("router", "--port", "0")``."""
    running: list[Process] = []

    def start(service: str, *flags: str) -> Process:
        running.append(Process(service, *flags))
        return running[-1]

    yield start
    for process in running:
        process.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Opens clients that are closed in the end."""
    clients: list[Client] = []

    def make(address: str, **options) -> Client:
        clients.append(Client(address, timeout=60, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
