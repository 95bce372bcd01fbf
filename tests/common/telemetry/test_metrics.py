import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

from sapwood_common.errors import ConfigError
from sapwood_common.telemetry import logs as telemetry
from sapwood_common.telemetry import metrics_thread
from sapwood_common.telemetry.metrics import AtMost, MetricSet, MetricsServer, OneOf
from sapwood_net.pacing.rate import Rate


def test_a_label_value_nobody_knows_is_other() -> None:
    metrics = MetricSet()
    calls = metrics.counter("calls_total", "Calls.", code=OneOf("OK", "BAD"), worker=AtMost(2))
    for code, worker in (("OK", "a"), ("OK", "a"), ("made-up", "b"), ("BAD", "c"), ("BAD", "d")):
        calls.at(code=code, worker=worker).inc()

    def value(code: str, worker: str) -> float | None:
        return metrics.registry.get_sample_value("calls_total", {"code": code, "worker": worker})

    assert value("OK", "a") == 2
    assert value("other", "b") == 1
    assert value("BAD", "other") == 2
    assert value("BAD", "c") is None


def test_a_value_that_is_forgotten_makes_room_for_another() -> None:
    metrics, worker = MetricSet(), AtMost(1)
    losses = metrics.counter("losses_total", "Losses.", worker=worker)
    for name in ("a", "b"):
        losses.at(worker=name).inc()
        losses.remove(worker=name)
        worker.forget(name)
        assert metrics.registry.get_sample_value("losses_total", {"worker": name}) is None
    losses.at(worker="c").inc()
    losses.at(worker="d").inc()
    losses.remove(worker="d")  # nobody's own series is "other"
    assert metrics.registry.get_sample_value("losses_total", {"worker": "c"}) == 1
    assert metrics.registry.get_sample_value("losses_total", {"worker": "other"}) == 1


def test_a_renamed_metric_shows_its_series_under_both_names() -> None:
    metrics = MetricSet()
    moves = metrics.counter("moves_total", "Moves.", was="steps_total", kind=OneOf("fast"))
    metrics.polled("gauge", "load", "Load.", lambda: [((), 3.0)], was="burden")
    moves.at(kind="fast").inc(2)
    for name in ("moves_total", "steps_total"):
        assert metrics.registry.get_sample_value(name, {"kind": "fast"}) == 2
    assert [metrics.registry.get_sample_value(name) for name in ("load", "burden")] == [3, 3]
    assert [(spec.name, spec.help) for spec in metrics.specs if "Old" in spec.help] == [
        ("steps_total", "Old name of moves_total; the next version does not have it."),
        ("burden", "Old name of load; the next version does not have it."),
    ]


def test_polled_metrics_are_read_when_asked_and_bounded_too() -> None:
    metrics = MetricSet()
    load = {"a": 1.0, "b": 2.0, "c": 3.0}
    metrics.polled(
        "gauge", "load", "Load.", lambda: (((name,), value) for name, value in load.items()), worker=AtMost(2)
    )
    load["a"] = 5.0
    assert metrics.registry.get_sample_value("load", {"worker": "a"}) == 5
    load["d"] = 4.0
    assert metrics.registry.get_sample_value("load", {"worker": "other"}) == 7


def test_a_value_falls_into_every_bucket_it_is_not_above() -> None:
    metrics = MetricSet()
    seconds = metrics.histogram("seconds", "Seconds.", buckets=(0.1, 1.0, 5.0), code=OneOf("OK"))
    for amount in (0.05, 0.1, 0.2, 1.0, 4.0, 7.0, 0.0):
        seconds.at(code="OK").observe(amount)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"seconds_{name}", {"code": "OK", **labels})

    assert [value("bucket", le=le) for le in ("0.1", "1.0", "5.0", "+Inf")] == [3, 5, 6, 7]
    assert (value("count"), value("sum")) == (7, pytest.approx(12.35))


def test_the_page_is_as_the_library_would_write_it() -> None:
    metrics, library = MetricSet(CollectorRegistry()), CollectorRegistry()
    labels = OneOf("x", "y")
    counters = metrics.counter("c_total", "C.", a=labels), prometheus_client.Counter("c", "C.", "a", registry=library)
    gauges = metrics.gauge("g", "G."), prometheus_client.Gauge("g", "G.", registry=library)
    bounds = (0.001, 1, 2.5, 1000)
    histograms = (
        metrics.histogram("h", "H.", buckets=bounds, a=labels),
        prometheus_client.Histogram("h", "H.", "a", registry=library, buckets=bounds),
    )
    for number in range(600):  # more than a histogram keeps
        label = "xy"[number % 2]
        counters[0].at(a=label).inc(number)
        counters[1].labels(label).inc(number)
        histograms[0].at(a=label).observe(number / 100)
        histograms[1].labels(label).observe(number / 100)
    for gauge in gauges[0].at(), gauges[1]:
        gauge.set(4)
        gauge.dec()
        gauge.inc(0.5)
    written = prometheus_client.generate_latest(library).decode().splitlines()
    page = prometheus_client.generate_latest(metrics.registry).decode().splitlines()
    assert [line for line in page if not re.search("(process|python)_", line)] == [
        line for line in written if "_created" not in line
    ]


def test_what_several_threads_count_is_all_counted() -> None:
    counter = MetricSet().counter("c_total", "C.").at()
    threads = [threading.Thread(target=lambda: [counter.inc() for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    page = CounterMetricFamily("c", "C.")
    counter.add_to(page, ())
    assert page.samples[0].value == 20_000


def test_two_sets_share_nothing() -> None:
    first, second = MetricSet(), MetricSet()
    first.gauge("level", "Level.").at().set(1)
    second.gauge("level", "Level.").at().set(2)
    assert (first.registry.get_sample_value("level"), second.registry.get_sample_value("level")) == (1, 2)


def test_the_server_shows_the_registry_and_frees_its_port() -> None:
    metrics = MetricSet()
    metrics.gauge("level", "Level.").at().set(7)
    server = MetricsServer(metrics.registry, "127.0.0.1", 0)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{server.port}/metrics") as response:
        assert "level 7.0" in response.read().decode()
    with pytest.raises(ConfigError, match=str(server.port)):
        MetricsServer(metrics.registry, "127.0.0.1", server.port)
    server.close()
    again = MetricsServer(metrics.registry, "127.0.0.1", server.port)
    again.close()


@pytest.fixture
def metrics_server() -> Iterator[MetricsServer]:
    metrics = MetricSet()
    metrics.gauge("level", "Level.").at().set(7)
    server = MetricsServer(metrics.registry, "127.0.0.1", 0)
    yield server
    server.close()


def test_metrics_of_this_machine_alone_are_read_under_no_other_name(metrics_server: MetricsServer) -> None:
    for name, status in (("evil.example", 403), (f"127.0.0.1:{metrics_server.port}", 200), ("localhost", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", metrics_server.port, timeout=30)
        connection.request("GET", "/metrics", headers={"Host": name})
        assert connection.getresponse().status == status
        connection.close()


def test_beyond_a_few_clients_of_the_metrics_nobody_is_let_in(metrics_server: MetricsServer) -> None:
    others = set(threading.enumerate())  # another test's server may have some of its own

    def at_work() -> int:
        return sum("process_request_thread" in each.name for each in threading.enumerate() if each not in others)

    address = ("127.0.0.1", metrics_server.port)
    held = [socket.create_connection(address, timeout=60) for _ in range(metrics_thread.MOST_AT_ONCE)]
    while at_work() < len(held):
        time.sleep(0.001)
    with socket.create_connection(address, timeout=60) as beyond, contextlib.suppress(ConnectionResetError):
        assert beyond.recv(1) == b""
    for connection in held:
        connection.close()
    while at_work():
        time.sleep(0.001)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{metrics_server.port}/metrics") as response:
        assert "level 7.0" in response.read().decode()


def test_a_silent_client_of_the_metrics_is_closed_in_time(
    metrics_server: MetricsServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_thread._Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", metrics_server.port), timeout=60) as client:
        assert client.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_a_client_of_the_metrics_that_sends_a_byte_now_and_then_is_closed_in_time(
    metrics_server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_thread, "MOST_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", metrics_server.port), timeout=0.01) as client:
        closed = False
        while not closed:  # never silent for as long as would end it
            try:
                client.sendall(b"G")
                closed = client.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                closed = True


def test_many_clients_of_the_metrics_are_served_more_slowly(
    metrics_server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(metrics_thread.time, "sleep", waited.append)
    metrics_server._server._rate = Rate(6, lambda: 0.0)  # one at once, and time does not pass
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(3):
        with opener.open(f"http://127.0.0.1:{metrics_server.port}/metrics") as response:
            assert "level 7.0" in response.read().decode()
    assert [seconds for seconds in waited if seconds > 1] == [10.0, 20.0]


def test_json_logs_hold_request_and_trace_id(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    request = telemetry.request_id_var.set("req-1")
    trace = telemetry.traceparent_var.set(f"00-{'ab' * 16}-{'cd' * 8}-01")
    try:
        telemetry.setup_logging("router", "info", "json")
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("x").exception("it said %r", "hallo\n")
    finally:
        telemetry.request_id_var.reset(request)
        telemetry.traceparent_var.reset(trace)
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "it said" in line]
    entry = json.loads(line)
    assert entry["message"] == "it said 'hallo\\n'"
    assert (entry["service"], entry["level"], entry["request_id"]) == ("router", "error", "req-1")
    assert entry["trace_id"] == "ab" * 16
    assert entry["exception"].endswith("ValueError: no")
