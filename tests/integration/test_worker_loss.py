"""Workers on the demo model killed and stopped under streaming load: no request fails, and every greedy answer is the
undisturbed one, token for token.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sapwood.client import Client

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "Die Hauptstadt von Italien heißt",
    "Roses are red, violets are blue,",
    "Q: What is 12 times 12?\nA:",
]
TOKENS = 48


def port_of_its_own() -> int:
    """A free port below those that the kernel hands out: nobody takes it while its worker restarts."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
            port: int = probe.getsockname()[1]
            return port


class Service:
    """A service as a process; ends with the test."""

    def __init__(self, module: str, *flags: str) -> None:
        self.module, self.flags = module, flags
        self.ports: list[int] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *self.flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.ports = []
        wanted = 2 if self.module == "sapwood_router" else 1
        lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"listening on \S+:(\d+)", line):
                self.ports.append(int(found[1]))
                if len(self.ports) == wanted:
                    threading.Thread(target=self.process.stderr.read, daemon=True).start()
                    return
        raise AssertionError(f"{self.module} did not start:\n{''.join(lines)}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self.send(signal.SIGKILL)
        self.process.wait()


class Cluster:
    def __init__(self, model: Path) -> None:
        self.services: list[Service] = []
        try:
            self.tokenizer = self.add("sapwood_tokenizer", "--port", "0", "--metrics-port", "0", "--model", str(model))
            worker = (
                "sapwood_worker",
                "--model",
                str(model),
                "--kv-cache-gb",
                "0.1",
                "--threads",
                "1",
                "--metrics-port",
                "0",
            )
            self.workers = [
                self.add(*worker, "--served-model-name", "demo", "--port", str(port_of_its_own())) for _ in range(2)
            ]
            addresses = [worker.address for worker in self.workers]
            flags = ("--port", "0", "--http-port", "0", "--tokenizer", self.tokenizer.address, "--resume-grace", "60")
            self.router = self.add("sapwood_router", *flags, "--workers", *addresses)
            self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.router.ports[1]}", trust_env=False, timeout=60)
            self.wait_for_workers(2)
        except BaseException:
            self.close()
            raise

    def add(self, module: str, *flags: str) -> Service:
        self.services.append(Service(module, *flags))
        return self.services[-1]

    def close(self) -> None:
        for service in reversed(self.services):
            service.end()

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def wait_for_workers(self, count: int) -> None:
        deadline = time.monotonic() + 120
        while self.metric("sapwood_router_worker_available{") != count:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(demo_model: Path) -> Iterator[Cluster]:
    running = Cluster(demo_model)
    yield running
    running.close()


class Load:
    """Greedy streams over gRPC and HTTP, chat and json_schema among them, each compared with its undisturbed answer."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = Client(cluster.router.address)
        self.jobs = [*(self.over_grpc(prompt) for prompt in PROMPTS), *(self.over_http(p) for p in PROMPTS[:2])]
        self.expected = [job() for job in self.jobs]
        self.done = 0
        self.failures: list[BaseException | tuple[object, object]] = []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(index,)) for index in range(len(self.jobs))]

    def over_grpc(self, prompt: str):
        def job() -> list[int]:
            return [
                token
                for delta in self.client.generate(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True)
                for token in delta.token_ids
            ]

        return job

    def over_http(self, prompt: str):
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}

        def job() -> str:
            with self.cluster.http.stream("POST", "/v1/completions", json=body) as response:
                lines = [line for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            return "".join(c["text"] for line in lines[:-1] for c in json.loads(line[6:])["choices"])

        return job

    def run(self, index: int) -> None:
        while not self.stopping.is_set():
            try:
                answer = self.jobs[index]()
            except BaseException as error:
                self.failures.append(error)
                return
            if answer != self.expected[index]:
                self.failures.append((answer, self.expected[index]))
                return
            self.done += 1

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        self.client.close()
        assert not self.failures

    def progress(self, requests: int) -> None:
        goal, deadline = self.done + requests, time.monotonic() + 120
        while self.done < goal:
            assert not self.failures
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "rounds"), [("stop", 20), ("kill", 20)])
def test_losing_one_of_two_workers_under_load_changes_no_answer(cluster: Cluster, how: str, rounds: int) -> None:
    rng = random.Random(3)
    before = cluster.metric("sapwood_router_resumptions_total")
    with Load(cluster) as load:
        for _ in range(rounds):
            load.progress(2)
            worker = rng.choice(cluster.workers)
            if how == "stop":
                worker.send(signal.SIGSTOP)
                cluster.wait_for_workers(1)
                load.progress(1)
                worker.send(signal.SIGCONT)
            else:
                worker.end()
                load.progress(1)
                worker.start()
            cluster.wait_for_workers(2)
    assert cluster.metric("sapwood_router_resumptions_total") - before >= rounds / 2
    assert cluster.metric("sapwood_router_worker_in_flight_requests{") == 0
