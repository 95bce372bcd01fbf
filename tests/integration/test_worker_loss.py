"""Workers on the demo model killed, stopped (whole, or the scheduler process alone) and cut off, and the only tokenizer killed,
under streaming load: no request fails, and every greedy answer is the undisturbed one, token for token; completions, chat, tool
calls and answers after a schema.

``make test-losses`` does each 20 times to one of four workers; tests/router/fleet/test_worker_losses.py does so without a model.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood.client import Client
from sapwood_testing.losses import note
from sapwood_testing.ports import port_of_its_own

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "Die Hauptstadt von Italien heißt",
    "Roses are red, violets are blue,",
    "Q: What is 12 times 12?\nA:",
]
TOKENS = 32
ROUNDS = int(os.environ.get("SAPWOOD_LOSS_ROUNDS", "4"))
WORKERS = int(os.environ.get("SAPWOOD_LOSS_WORKERS", "2"))
QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 12},
        "cities": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["capital", "cities"],
    "additionalProperties": False,
}
CHATS = [
    {"max_tokens": TOKENS},
    {
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "france", "schema": SCHEMA, "strict": True}},
    },
    {
        "max_tokens": 80,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
]


class Service:
    """A service as a process; ends with the test. ``namespace``: the network that it is in."""

    def __init__(self, module: str, *flags: str, namespace: Any = None) -> None:
        self.module, self.flags, self.namespace = module, flags, namespace
        self.ports: list[int] = []
        self.log: deque[str] = deque(maxlen=100)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.within(), sys.executable, "-m", self.module, *self.flags],
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
                    threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True).start()
                    return
        raise AssertionError(f"{self.module} did not start:\n{''.join(lines)}")

    @property
    def address(self) -> str:
        return f"{'127.0.0.1' if self.namespace is None else self.namespace.host}:{self.ports[0]}"

    def within(self) -> list[str]:
        return [] if self.namespace is None else ["ip", "netns", "exec", self.namespace.name]

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
    def __init__(self, model: Path, namespaces: Sequence[Any], *of_workers: str) -> None:
        self.services: list[Service] = []
        try:
            tokenizer = ("--port", str(port_of_its_own()), "--metrics-port", "0", "--model", str(model))
            self.tokenizer = self.add("sapwood_tokenizer", *tokenizer)
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
            worker += ("--served-model-name", "demo", *of_workers)
            self.workers = [
                self.add(
                    *(
                        *worker,
                        "--port",
                        str(port_of_its_own()),
                        "--host",
                        namespace.host if namespace else "127.0.0.1",
                    ),
                    namespace=namespace,
                )
                for namespace in namespaces or (None,) * WORKERS
            ]
            addresses = [worker.address for worker in self.workers]
            flags = ("--port", "0", "--http-port", "0", "--tokenizer", self.tokenizer.address, "--resume-grace", "60")
            # Of the many seconds' silences some may be the machine's: those cost resumptions, too.
            flags += ("--most-resumptions", "20", "--queue-wait", "300")
            self.router = self.add("sapwood_router", *flags, "--workers", *addresses)
            self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.router.ports[1]}", trust_env=False, timeout=200)
            self.wait_for_workers(WORKERS)
        except BaseException:
            self.close()
            raise

    def add(self, module: str, *flags: str, namespace: Any = None) -> Service:
        self.services.append(Service(module, *flags, namespace=namespace))
        return self.services[-1]

    def close(self) -> None:
        for service in reversed(self.services):
            service.end()

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while self.http.get("/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_workers(self, count: int) -> None:
        self.wait_for("sapwood_router_worker_available{", count)

    def wait_for(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 120
        while self.metric(name) != value:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(demo_model: Path, make_namespace: Any) -> Iterator[Cluster]:
    try:
        namespaces = [make_namespace() for _ in range(WORKERS)]
    except pytest.skip.Exception:
        namespaces = []
    running = Cluster(demo_model, namespaces)
    yield running
    running.close()


class Load:
    """Greedy streams over gRPC and HTTP, chat and json_schema among them, each compared with its undisturbed answer."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = Client(cluster.router.address)
        self.jobs = [
            *(self.over_grpc(prompt) for prompt in PROMPTS[:3]),
            *(self.over_http(p) for p in PROMPTS[3:5]),
            *(self.chat(asked) for asked in CHATS),
        ]
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

    def chat(self, asked: dict[str, Any]):
        def job() -> tuple[str, str, str, int]:
            content = called = reason = ""
            tokens = 0
            body = {**QUESTION, **asked, "stream": True, "stream_options": {"include_usage": True}}
            with self.cluster.http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            for event in map(json.loads, lines[:-1]):
                for choice in event["choices"]:
                    content += choice["delta"].get("content") or ""
                    for call in choice["delta"].get("tool_calls") or ():
                        called += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
                    reason = choice.get("finish_reason") or reason
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            return content, called, reason, tokens

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
        assert not self.failures, f"the router's log:\n{''.join(self.cluster.router.log)}"

    def progress(self, requests: int) -> None:
        goal, deadline = self.done + requests, time.monotonic() + 120
        while self.done < goal:
            assert not self.failures
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("how", ["stop", "freeze", "part", "kill"])
def test_losing_a_worker_under_load_changes_no_answer(cluster: Cluster, how: str) -> None:
    if how == "part" and cluster.workers[0].namespace is None:
        pytest.skip("no network namespaces here")
    rng, rounds = random.Random(3), ROUNDS
    before = cluster.metric("sapwood_router_resumptions_total")
    losses = 0
    noticed, moved = [0.0], [0.0]
    with Load(cluster) as load:
        # A worker may have said all before the router reads it.
        while losses < rounds or cluster.metric("sapwood_router_resumptions_total") - before < rounds / 2:
            assert losses < 5 * rounds
            losses += 1
            load.progress(2)
            worker = rng.choice(cluster.workers)
            if how == "stop":
                worker.send(signal.SIGSTOP)
                cluster.wait_for_workers(WORKERS - 1)
                load.progress(1)
                worker.send(signal.SIGCONT)
            elif how == "freeze":
                begun = time.monotonic()
                os.kill(worker.pids()[1], signal.SIGSTOP)
                cluster.wait_for_workers(WORKERS - 1)
                noticed.append(time.monotonic() - begun)
                cluster.wait_for(f'sapwood_router_worker_in_flight_requests{{worker="{worker.address}"', 0)
                moved.append(time.monotonic() - begun)
                load.progress(1)
                os.kill(worker.pids()[1], signal.SIGCONT)
            elif how == "part":
                worker.namespace.part()
                cluster.wait_for_workers(WORKERS - 1)
                load.progress(1)
                worker.namespace.mend()
            else:
                worker.end()
                load.progress(1)
                worker.start()
            cluster.wait_for_workers(WORKERS)
            note(
                how=how,
                workers=WORKERS,
                noticed=noticed[-1],
                moved=moved[-1],
                answers=load.done,
                wrong=len(load.failures),
            )
    resumed = cluster.metric("sapwood_router_resumptions_total") - before
    print(f"{how}: {losses} losses of 1 of {WORKERS}, {resumed:g} streams resumed, {load.done} answers, none wrong")
    if how == "freeze":
        print(f"not chosen after {max(noticed):.1f} s, its streams elsewhere after {max(moved):.1f} s at most")
    assert resumed >= rounds / 2
    assert cluster.metric("sapwood_router_worker_in_flight_requests{") == 0


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_killing_the_only_tokenizer_under_load_changes_no_answer(cluster: Cluster) -> None:
    running = 0.0
    away = [0.0]
    with Load(cluster) as load:
        for _ in range(ROUNDS):
            load.progress(2)
            running += cluster.metric("sapwood_router_running_requests")
            begun = time.monotonic()
            cluster.tokenizer.end()
            cluster.tokenizer.start()
            cluster.wait_until_ready()  # the router, too, has seen that it is back
            away.append(time.monotonic() - begun)
        load.progress(2)
    print(
        f"{ROUNDS} kills of the only tokenizer, away for {max(away):.1f} s at most: {running:g} streams waited, "
        f"{load.done} answers, none wrong"
    )
    assert running >= ROUNDS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", [(), ("--data-parallel-attention",)], ids=["one", "own-requests"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_losing_each_rank_of_two_groups_in_turn_changes_no_answer(
    demo_model: Path, number: signal.Signals, flags: tuple[str, ...]
) -> None:
    cluster = Cluster(demo_model, (), "--tensor-parallel", "2", *flags)
    try:
        with Load(cluster) as load:
            for worker in cluster.workers:
                for turn in (1, 2):
                    load.progress(2)
                    before = worker.pids()
                    os.kill(before[turn], number)
                    deadline = time.monotonic() + 120
                    while len(after := worker.pids()) < 3 or set(after[1:]) & set(before[1:]):
                        assert time.monotonic() < deadline
                        time.sleep(0.05)
                    cluster.wait_for_workers(WORKERS)
            while load.done < 60:
                load.progress(1)
        resumed = cluster.metric("sapwood_router_resumptions_total")
        print(f"{number.name} of each rank: {resumed:g} streams resumed, {load.done} answers, none wrong or lost")
        assert resumed > 0
    finally:
        cluster.close()
