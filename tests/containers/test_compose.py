"""The shipped images and compose file, used and hurt as in production; in this order, on one stack."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from sapwood.client import Client, SapwoodError, UnavailableError

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"
GREEDY = " the capital of the country of France."

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1500)]


def fetch(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as response:
        return str(response.read().decode())


def openai_client(stack) -> openai.OpenAI:
    # Refused connections and 503s are tried again, with pauses of up to 8 seconds.
    web = httpx.Client(trust_env=False, timeout=120)
    return openai.OpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=20, http_client=web)


class Load:
    """Streams one completion after another, with each of the two clients, until it is told to stop; counts what fails."""

    def __init__(self, stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.finished = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._loop, args=(one,)) for one in (self._openai, self._grpc)]
        for thread in self._threads:
            thread.start()

    def wait_for_more(self, count: int, seconds: float = 180) -> None:
        """Returns once so many further requests have finished, of those that begin from now on."""
        target, deadline = self.finished + count + len(self._threads), time.monotonic() + seconds
        while self.finished < target:
            assert time.monotonic() < deadline, f"only {self.finished} of {target} finished; failed: {self.failures}"
            time.sleep(0.2)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=180)

    def _loop(self, one: Callable[[int], str]) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                text = one(number)
                if not text:
                    self.failures.append(f"{one.__name__}: nothing was generated")
            except Exception as error:
                self.failures.append(f"{time.strftime('%X')} {one.__name__}: {error!r}")
            self.finished += 1

    def _openai(self, number: int) -> str:
        client = openai_client(self._stack)
        with client.completions.create(
            model="demo", prompt=f"{number}. Once upon a time", max_tokens=12, temperature=0, stream=True
        ) as chunks:
            return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def _grpc(self, number: int) -> str:
        deadline = time.monotonic() + 120
        with Client(self._stack.grpc, timeout=120) as client:
            while True:
                answer = client.generate(f"{number}. It was a dark", max_tokens=12, temperature=0, ignore_eos=True)
                deltas = []
                try:
                    deltas += [delta.text for delta in answer]
                    return "".join(deltas)
                except UnavailableError:  # what openai's client does by itself
                    if deltas or time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)


@pytest.fixture
def load(stack):
    running = Load(stack)
    yield running
    running.end()


def test_images_hold_what_they_need_and_no_more(engine, image_sizes) -> None:
    for name in ("router", "tokenizer"):
        found = engine.docker(
            *("run", "--rm", "--network", "none", "--entrypoint", "python", f"sapwood-{name}", "-c"),
            "import importlib.util as u, os; print(u.find_spec('torch'), u.find_spec('pip'), os.getuid())",
        )
        assert found.split() == ["None", "None", "10001"], name
    print("MB on top of the base image:", {name: round(size) for name, size in image_sizes.items()})
    assert image_sizes["router"] < 75  # python:3.12-slim has 125
    assert image_sizes["tokenizer"] < 220
    assert image_sizes["worker"] < 1400


def test_a_completion_streams_through_it(stack) -> None:
    chunks = openai_client(stack).completions.create(
        model="demo", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == GREEDY
    with Client(stack.grpc, timeout=60) as client:
        assert client.generate(PROMPT, max_tokens=8, temperature=0).text() == GREEDY


def test_no_request_fails_while_services_die_and_are_replaced(stack, load) -> None:
    engine = stack.engine
    everything = ("tokenizer", "worker-0", "worker-1", "router")

    def settle(what: str) -> None:
        stack.wait_healthy(*everything)
        load.wait_for_more(2)
        assert not load.failures, f"after {what}: {load.failures}"

    load.wait_for_more(2)
    os.kill(int(engine.inspect("worker-0", "{{.State.Pid}}")), signal.SIGKILL)
    load.wait_for_more(1)
    settle("kill -9 of a worker")

    engine.compose("restart", "tokenizer")
    settle("the tokenizer's restart")

    network = "sapwood-test_default"
    container = engine.container("worker-1")
    engine.docker("network", "disconnect", network, container)
    time.sleep(5)
    engine.docker("network", "connect", "--alias", "worker-1", network, container)
    settle("5 seconds without network at a worker")

    for service in everything:
        engine.compose("up", "-d", "--no-deps", "--no-build", "--force-recreate", "--wait", service)
        settle(f"replacing {service}")


def test_every_metric_and_every_dashboard_query_has_data(stack, load, tmp_path: Path) -> None:
    engine = stack.engine
    targets = {
        "router:8000": f"{engine.address('router')}:8000",
        "tokenizer:9152": f"{engine.address('tokenizer')}:9152",
        "worker-0:9161": f"{engine.address('worker-0')}:9161",
        "worker-1:9161": f"{engine.address('worker-1')}:9161",
    }
    shown = "".join(fetch(f"http://{address}/metrics") for address in targets.values())
    documented = re.findall(r"^\| `(\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert [name for name in documented if f"# TYPE {name.removesuffix('_total')}" not in shown] == []

    config = yaml.safe_load((ROOT / "deploy/observability/prometheus/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    del config["rule_files"]
    for job in config["scrape_configs"]:
        for static in job["static_configs"]:
            static["targets"] = [targets[name] for name in static["targets"]]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    server = subprocess.Popen(
        [*command, "--web.listen-address=127.0.0.1:19090"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        load.wait_for_more(4)
        missing = _queries()
        deadline = time.monotonic() + 90
        while missing and time.monotonic() < deadline:
            missing = {name: query for name, query in missing.items() if not _answer(query)}
            time.sleep(1)
    finally:
        server.terminate()
        server.wait()
    # Nothing was lost or tried again while Prometheus looked.
    quiet = {name for name in missing if name.startswith("router: Further tries")}
    assert set(missing) == quiet, missing
    assert not load.failures


def _queries() -> dict[str, str]:
    found = {}
    for path in (ROOT / "deploy/observability/grafana/dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "20s")
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = query
    return found


def _answer(query: str) -> list:
    try:
        answer = fetch(f"http://127.0.0.1:19090/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    except OSError:
        return []
    return json.loads(answer)["data"]["result"]


def test_stop_drains_what_runs(stack) -> None:
    engine = stack.engine
    with Client(stack.grpc, timeout=120) as client:
        answer = client.generate("Once upon a time", max_tokens=40, temperature=0, ignore_eos=True)
        deltas = [next(answer)]
        stopping = threading.Thread(target=engine.compose, args=("stop",))
        stopping.start()
        try:
            deltas += list(answer)
        except SapwoodError as error:
            pytest.fail(f"the running stream was cut off: {error}")
        finally:
            stopping.join(timeout=120)
    assert deltas[-1].finish_reason is not None
    for service in ("router", "tokenizer", "worker-0", "worker-1"):
        assert engine.inspect(service, "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}") == "exited 0 false"
