"""`sapwood scaler`: what it counts, whom it tells, and workers that it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes import client

from sapwood.cli.errors import CliError
from sapwood.cli.main import main
from sapwood.cli.scale import objective
from sapwood.cli.scale.drivers import KubernetesDriver
from sapwood.cli.scale.objective import FirstTokens, count
from sapwood.cli.scaler import requests_of
from sapwood.v1 import router_pb2, router_pb2_grpc, worker_pb2


class ApiServer:
    """Kubernetes' API as far as scales go: keeps the replicas of whatever is named."""

    def __init__(self) -> None:
        self.replicas: dict[str, int] = {}
        self.patches: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                name = self.path.split("?")[0]
                status = 200 if name in outer.replicas else 404
                replicas = {"replicas": outer.replicas.get(name, 0)}
                body = {"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": replicas, "status": replicas}
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                self.answer()

            def do_PATCH(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.replicas[self.path.split("?")[0]] = asked["spec"]["replicas"]
                outer.patches.append(self.path)
                self.answer()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def api(self) -> Any:
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{self.server.server_port}"
        configuration.retries = False
        return client.AppsV1Api(client.ApiClient(configuration))


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    found = ApiServer()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.parametrize("kind", ["statefulset", "deployment"])
async def test_the_scale_subresource_is_patched_where_the_number_is_another(api_server: ApiServer, kind: str) -> None:
    path = f"/apis/apps/v1/namespaces/prod/{kind}s/worker/scale"
    api_server.replicas[path] = 3
    driver = KubernetesDriver(api_server.api, f"prod/{kind}/worker")
    await driver.scale(3, [], [])
    assert api_server.patches == []
    await driver.scale(5, [], [])
    assert api_server.replicas[path] == 5
    await driver.scale(0, [], [])
    assert api_server.replicas[path] == 0


async def test_an_api_server_that_refuses_or_is_away_is_only_reported(
    api_server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    driver = KubernetesDriver(api_server.api, "prod/deployment/none")
    await driver.scale(3, [], [])
    assert "prod/deployment/none: (404)" in caplog.text
    api_server.server.shutdown()
    api_server.server.server_close()
    await driver.scale(3, [], [])
    assert len(caplog.records) == 2


@pytest.mark.parametrize("target", ["worker", "prod/worker", "prod/pod/worker", "/deployment/x", "a/deployment/b/c"])
def test_a_target_that_is_none_is_refused(api_server: ApiServer, target: str) -> None:
    with pytest.raises(CliError, match="is not NAMESPACE/statefulset/NAME"):
        KubernetesDriver(api_server.api, target)


def test_requests_are_counted_for_the_role_where_they_are() -> None:
    def worker(name: str, role: Any, running: int, in_flight: int = 0, **more: Any) -> router_pb2.WorkerStatus:
        load = worker_pb2.LoadReport(running_requests=running, waiting_requests=1)
        return router_pb2.WorkerStatus(address=name, role=role, load=load, in_flight=in_flight, **more)

    status = router_pb2.GetStatusResponse(
        queued_requests=7,
        workers=[
            worker("p:1", worker_pb2.WORKER_ROLE_PREFILL, 2, healthy=True),
            worker("d:1", worker_pb2.WORKER_ROLE_DECODE, 4, 9, healthy=True),
            worker("d:2", worker_pb2.WORKER_ROLE_DECODE, 4, healthy=True, draining=True),
            worker("d:3", worker_pb2.WORKER_ROLE_DECODE, 0),
        ],
    )
    roles = ["prefill", "decode"]
    assert requests_of(status, "prefill", roles) == (3 + 7, ["p:1"], ["p:1"])
    assert requests_of(status, "decode", roles) == (9 + 5 + 1, ["d:1"], ["d:1", "d:2", "d:3"])
    assert requests_of(status, "decode", ["decode"])[0] == 15 + 7


PAGE = b"""# TYPE sapwood_router_time_to_first_token_seconds histogram
sapwood_router_time_to_first_token_seconds_bucket{model="m",le="0.5"} 3.0
sapwood_router_time_to_first_token_seconds_bucket{model="m",le="1.0"} 8.0
sapwood_router_time_to_first_token_seconds_bucket{model="m",le="+Inf"} 10.0
sapwood_router_time_to_first_token_seconds_bucket{model="n",le="0.5"} 1.0
sapwood_router_time_to_first_token_seconds_bucket{model="n",le="1.0"} 1.0
sapwood_router_time_to_first_token_seconds_bucket{model="n",le="+Inf"} 1.0
sapwood_router_time_to_first_token_seconds_count{model="m"} 10.0
"""


@pytest.mark.parametrize(("late", "in_time"), [(0.1, 0.0), (0.5, 4.0), (0.9, 4.0), (1.0, 9.0), (30.0, 9.0)])
def test_first_tokens_in_time_are_counted_over_all_models(late: float, in_time: float) -> None:
    assert count(PAGE, late) == (in_time, 11.0)


def test_the_share_in_time_is_that_since_the_last_look(tmp_path: Path) -> None:
    page = tmp_path / "metrics"
    page.write_bytes(PAGE)
    tokens = FirstTokens(page.as_uri(), 1.0)
    assert tokens.in_time() is None
    assert tokens.in_time() is None, "nothing came"
    page.write_bytes(PAGE.replace(b" 10.0", b" 14.0").replace(b" 8.0", b" 11.0"))
    assert tokens.in_time() == 0.75
    page.write_bytes(b"")
    assert tokens.in_time() is None, "the router began again"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--per-worker", "8"], "name who scales"),
        (["--per-worker", "8", "both=9", "--metrics", "127.0.0.1:0"], "names a role twice"),
        (["--per-worker", "8", "--metrics", "9155"], "--metrics: '9155' is not HOST:PORT"),
        (["--per-worker", "8", "--min", "3", "--max", "2", "--metrics", "127.0.0.1:0"], "--min is more than --max"),
        (["--per-worker", "8", "--objective", "1", "--metrics", "127.0.0.1:0"], "--objective: '1' is not SECONDS,URL"),
        (["--per-worker", "decode=8", "--", "--model", "x"], "workers on this machine have the role both"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_their_names(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scaler", *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_plan_is_a_gauge_for_others_who_scale(router: Any) -> None:
    flags = ["--per-worker", "2", "--interval", "0.2", "--metrics", "127.0.0.1:0"]
    with start_scaler("--address", router.address, *flags) as scaler:
        try:
            assert scaler.stderr is not None
            lines = iter(scaler.stderr.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"metrics at (\S+)", line)))
            assert any("wanted" in line for line in lines)
            page = urllib.request.urlopen(url, timeout=10).read().decode()
            assert float(re.search(r'sapwood_scaler_wanted_workers\{role="both"\} (\S+)', page)[1]) >= 1  # type: ignore[index]
        finally:
            scaler.send_signal(signal.SIGTERM)
        assert scaler.wait(timeout=30) == 0


def start_scaler(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sapwood.cli.main", "scaler", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
async def test_workers_start_under_load_and_end_after_it_without_a_lost_request(
    start_cluster: Any, dummy_model: Path
) -> None:
    with start_cluster("--workers", "1", "--worker-max-running", "2", "--threads", "1") as cluster:
        flags = ["--interval", "0.3", "--start", "1", "--patience", "2", "--max", "3"]
        worker = ["--model", str(dummy_model), "--load-format", "dummy", "--num-pages", "1024", "--max-running", "2"]
        own = ["--address", cluster.grpc, "--per-worker", "2", *flags, "--", *worker, "--threads", "1"]
        with start_scaler(*own) as scaler:
            said: list[str] = []
            assert scaler.stderr is not None
            reader = threading.Thread(target=lambda: said.extend(scaler.stderr or ()), daemon=True)
            reader.start()
            done: list[int] = []

            async def ask(channel: grpc.aio.Channel) -> None:
                stub = router_pb2_grpc.RouterStub(channel)
                sampling = {"max_tokens": 2000, "ignore_eos": True}
                request = router_pb2.RouterGenerateRequest(text="a", sampling=sampling, detokenize=False)
                count = 0
                async for answer in stub.Generate(request):
                    count += len(answer.token_ids)
                done.append(count)

            async def serving() -> int:
                workers = (await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
                return sum(each.healthy and not each.draining for each in workers)

            async with grpc.aio.insecure_channel(cluster.grpc) as channel:
                stub = router_pb2_grpc.RouterStub(channel)
                asking = [asyncio.create_task(ask(channel)) for _ in range(12)]
                try:
                    while await serving() < 3:
                        if all(each.done() for each in asking):  # all too fast: more of them
                            asking += [asyncio.create_task(ask(channel)) for _ in range(12)]
                        await asyncio.sleep(0.2)
                    await asyncio.gather(*asking)
                    assert set(done) == {2000}
                    while len((await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers) > 1:
                        await asyncio.sleep(0.2)
                finally:
                    scaler.send_signal(signal.SIGTERM)
            assert scaler.wait(timeout=60) == 0
            reader.join(timeout=10)
            assert sum(" starts" in line for line in said) == sum(" ends" in line for line in said) >= 2, said


BUCKETS = b'sapwood_router_time_to_first_token_seconds_bucket{model="m",le="1.0"} '


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + BUCKETS + b"3\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n" + BUCKETS,
        b"HTTP/1.1 200 OK\r\n\r\n" + BUCKETS + b"eee\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + BUCKETS.replace(b"1.0", b"x") + b"3\n",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"",
    ],
    ids=["cut", "cut chunk", "no number", "no bound", "no HTTP", "503", "headers", "nothing"],
)
def test_a_page_that_is_broken_is_a_missed_look_and_not_the_scalers_end(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError):
            FirstTokens(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", 1.0).in_time()
        thread.join()


def test_a_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b"#\n")
                    time.sleep(0.05)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(OSError, match="does not end"):
            FirstTokens(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", 1.0).in_time()
        thread.join()
