"""The shipped images and compose file, used and hurt as in production; in this order, on one stack."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from sapwood.client import Client, SapwoodError, UnavailableError
from sapwood.v1 import router_pb2, router_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"
GREEDY = " Paris.\n\nThe answer is:"
SERVICES = ("tokenizer", "worker-0", "worker-1", "router")
NETWORK = "sapwood-test_default"

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]


def fetch(url: str, body: bytes | None = None, **headers: str) -> str:
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
        return str(response.read().decode())


def openai_client(stack) -> openai.OpenAI:
    web = httpx.Client(trust_env=False, timeout=300)
    return openai.OpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0, http_client=web)


class Load:
    """Streams one completion after another, with each of the two clients, until it is told to stop; keeps what fails.

    Nothing is tried again. Only while the one router there is gets replaced (``router_leaves``) is what it refused asked
    again: no connection, 503, UNAVAILABLE, and only as long as nothing of the answer has come.
    """

    def __init__(self, stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.router_leaves = threading.Event()
        self.finished = 0
        self.refused = 0
        self.failures: list[str] = []
        kinds = (self._openai, self._openai, self._grpc)
        self._threads = [threading.Thread(target=self._loop, args=(index, kind)) for index, kind in enumerate(kinds)]
        for thread in self._threads:
            thread.start()

    def wait_for_more(self, wait_until, count: int = 2) -> None:
        """Returns once so many further requests have finished, of those that begin from now on."""
        target = self.finished + count + len(self._threads)
        wait_until(lambda: self.finished >= target, lambda: f"only {self.finished} of {target}: {self.failures}")

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=600)

    def _loop(self, index: int, stream: Callable[[str], Iterator[str]]) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                if not self._ask(stream, f"{index}.{number}. Once upon a time"):
                    self.failures.append(f"{stream.__name__}: nothing was generated")
            except Exception as error:
                self.failures.append(f"{time.strftime('%X')} {stream.__name__}: {error!r}")
                time.sleep(0.5)
            self.finished += 1

    def _ask(self, stream: Callable[[str], Iterator[str]], prompt: str) -> str:
        deadline = time.monotonic() + 300
        while True:
            leaves = self.router_leaves.is_set()
            answer = stream(prompt)
            try:
                text = next(answer)
            except (openai.APIConnectionError, openai.InternalServerError, UnavailableError) as error:
                refused = not isinstance(error, openai.InternalServerError) or error.status_code == 503
                if not (refused and (leaves or self.router_leaves.is_set())) or time.monotonic() > deadline:
                    raise
                self.refused += 1
                time.sleep(0.5)
            else:
                return text + "".join(answer)

    def _openai(self, prompt: str) -> Iterator[str]:
        with openai_client(self._stack) as client:
            chunks = client.completions.create(model="demo", prompt=prompt, max_tokens=16, temperature=0, stream=True)
            yield from (chunk.choices[0].text for chunk in chunks if chunk.choices)

    def _grpc(self, prompt: str) -> Iterator[str]:
        with Client(self._stack.grpc, timeout=300) as client:
            yield from (one.text for one in client.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True))


def router_metrics(engine) -> str:
    return fetch(f"http://{engine.address('router')}:9150/metrics")


def not_ok(engine) -> dict[str, float]:
    """What the router has counted that did not end OK, by its labels."""
    found = {}
    for line in router_metrics(engine).splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("sapwood_router_requests_total{") and 'code="OK"' not in name:
            found[name] = float(value)
    return found


@pytest.fixture(scope="module")
def prometheus(engine, stack, wait_until) -> str:
    """The compose file's Prometheus, as Debian builds it, at work since before anything is hurt: its address."""
    dockerfile = ROOT / "tests/containers/prometheus.Dockerfile"
    engine.docker("build", "-t", "sapwood-test-prometheus", "-f", dockerfile, "/usr/bin")
    stack.up("prometheus", COMPOSE_PROFILES="observability")
    url = f"http://127.0.0.1:{engine.variables['SAPWOOD_PROMETHEUS_PORT']}"

    def ready() -> bool:
        try:
            return bool(fetch(f"{url}/-/ready"))
        except OSError:
            return False

    wait_until(ready, stack.logs, 120)
    return url


@pytest.fixture(scope="module")
def load(stack, prometheus, wait_until):
    """A load on the stack, steady over all tests that ask for it."""
    running = Load(stack)
    running.wait_for_more(wait_until)
    yield running
    running.end()
    told = f"{running.finished}, of which failed: {len(running.failures)}"
    print(f"\n[containers] the load's requests: {told} (refused by the router that was replaced: {running.refused})")


@pytest.fixture
def settle(engine, stack, load, wait_until) -> Callable[[], None]:
    """Waits until all is healthy again and more requests have finished; none must have failed since the test began, neither
    at the clients nor by the router's own count."""
    before, counted = len(load.failures), not_ok(engine)

    def check() -> None:
        stack.wait_healthy(*SERVICES)
        load.wait_for_more(wait_until)
        assert not load.failures[before:], f"{load.failures[before:]}\n{stack.logs(40)}"
        more = {name: value for name, value in not_ok(engine).items() if value > counted.get(name, 0)}
        assert not more, f"{more}\n{stack.logs(40)}"

    return check


def test_a_completion_streams_through_it(stack) -> None:
    chunks = openai_client(stack).completions.create(
        model="demo", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == GREEDY
    with Client(stack.grpc, timeout=300) as client:
        assert client.generate(PROMPT, max_tokens=8, temperature=0).text() == GREEDY


def test_operators_methods_are_answered_inside_the_routers_container_only(engine, stack) -> None:
    command = ("sapwood", "router", "workers", "list", "--address", "127.0.0.1:50055")
    listed = engine.compose("exec", "-T", "router", *command)
    assert "worker-0:50061" in listed and "worker-1:50061" in listed
    with grpc.insecure_channel(stack.grpc) as channel, pytest.raises(grpc.RpcError, match="is for operators"):
        router_pb2_grpc.RouterStub(channel).ListWorkers(router_pb2.ListWorkersRequest(), timeout=60)


def test_one_request_is_one_connected_trace_over_all_services(engine, stack, traces, wait_until) -> None:
    # The caller's own span is the root: the client hands its context on, as it does in any program with OpenTelemetry.
    provider = TracerProvider(resource=Resource({"service.name": "caller"}))
    endpoint = engine.variables["SAPWOOD_TRACE_ENDPOINT"]
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
    with Client(stack.grpc, timeout=300) as client, provider.get_tracer("test").start_as_current_span("ask") as root:
        spans = traces.keep(f"{root.get_span_context().trace_id:032x}")
        assert client.generate(PROMPT, max_tokens=4, ignore_eos=True).text()
    wanted = {
        ("caller", "ask"),
        ("sapwood-router", "sapwood.v1.Router/Generate"),
        ("sapwood-router", "text_completion demo"),
        ("sapwood-router", "prepare"),
        ("sapwood-router", "select"),
        ("sapwood-tokenizer", "sapwood.v1.Tokenizer/Tokenize"),
        ("sapwood-worker", "worker generate"),
        ("sapwood-worker", "queue"),
        ("sapwood-worker", "prefill"),
        ("sapwood-worker", "decode"),
    }

    def missing() -> set[tuple[str, str]]:
        return wanted - {(name, span.name) for name, span in spans()}

    wait_until(lambda: not missing(), lambda: f"missing: {missing()}", 120)
    known = {span.span_id for _, span in spans()}
    assert [span.name for _, span in spans() if span.parent_span_id not in known] == ["ask"]


def test_no_request_fails_when_a_worker_is_killed(engine, stack, load, settle, wait_until) -> None:
    busy = 'sapwood_router_worker_in_flight_requests{worker="worker-0:50061"} '

    def has_work() -> bool:
        return any(line.startswith(busy) and not line.endswith(" 0.0") for line in shown().splitlines())

    def shown() -> str:
        return router_metrics(engine)

    wait_until(has_work, shown)
    os.kill(int(engine.inspect("worker-0", "{{.State.Pid}}")), signal.SIGKILL)
    load.wait_for_more(wait_until)
    wait_until(lambda: engine.inspect("worker-0", "{{.RestartCount}}") != "0", stack.logs)
    settle()


def test_no_request_fails_when_the_tokenizer_restarts(engine, settle) -> None:
    engine.compose("restart", "tokenizer")
    settle()


def test_no_request_fails_when_a_worker_has_no_network_for_5_seconds(engine, settle) -> None:
    container = engine.container("worker-1")
    engine.docker("network", "disconnect", NETWORK, container)
    time.sleep(5)
    engine.docker("network", "connect", "--alias", "worker-1", NETWORK, container)
    settle()


@pytest.mark.parametrize("service", ["tokenizer", "worker-1", "router"])
def test_no_request_fails_when_a_service_is_replaced(engine, stack, load, settle, service: str) -> None:
    before = engine.container(service)
    if service == "router":
        load.router_leaves.set()
    engine.compose("up", "-d", "--no-build", "--force-recreate", "--wait", service)
    assert engine.container(service) != before
    load.router_leaves.clear()
    settle()


def test_every_metric_is_there_and_every_dashboard_query_has_data(engine, prometheus, load, wait_until) -> None:
    addresses = {"router": 9150, "tokenizer": 9152, "worker-0": 9161, "worker-1": 9161}
    shown = "".join(fetch(f"http://{engine.address(name)}:{port}/metrics") for name, port in addresses.items())
    documented = re.findall(r"^\| `(\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert len(documented) > 40
    assert [name for name in documented if f"# TYPE {name} " not in shown] == []

    def answer(query: str) -> list:
        url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        return json.loads(fetch(url))["data"]["result"]

    before, missing = len(load.failures), _queries()
    assert len(missing) > 30

    def all_answered() -> bool:
        for name, query in list(missing.items()):
            if answer(query):
                del missing[name]
        return not missing

    wait_until(all_answered, lambda: f"no data: {missing}", 180)
    wanted = {f"{name}:{port}" for name, port in addresses.items()}
    wait_until(
        lambda: {item["metric"]["instance"] for item in answer("up == 1")} == wanted, lambda: str(answer("up")), 120
    )
    # Of the routers that were replaced as well: none has counted a request that failed.
    assert answer('max_over_time(sapwood_router_requests_total{code!="OK"}[2h]) > 0') == []
    assert "SapwoodNoWorker" in fetch(f"{prometheus}/api/v1/rules")
    assert not load.failures[before:]


def _queries() -> dict[str, str]:
    found = {}
    for path in (ROOT / "deploy/observability/grafana/dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                # So long that what was hurt before is in it.
                query = target["expr"].replace("$__rate_interval", "60m")
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = query
    return found


def test_stop_drains_what_runs_within_the_grace_period(engine, stack, load) -> None:
    load.end()
    with Client(stack.grpc, timeout=300) as client:
        answer = client.generate("Once upon a time", max_tokens=24, temperature=0, ignore_eos=True)
        deltas = [next(answer)]
        stopping = threading.Thread(target=engine.compose, args=("stop",))
        stopping.start()
        try:
            deltas += list(answer)
        except SapwoodError as error:
            pytest.fail(f"the running stream was cut off: {error}\n{stack.logs()}")
        finally:
            stopping.join(timeout=600)
    assert deltas[-1].finish_reason is not None
    for service in SERVICES:  # killed at the end of the grace period, the exit code were 137
        assert engine.inspect(service, "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}") == "exited 0 false"
