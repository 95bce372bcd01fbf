"""What metrics of model servers tell of their load."""

from __future__ import annotations

import pytest

from sapwood_router.fleet.backends.server_load import load_of
from sapwood_router.routing.worker_view import Load


@pytest.mark.parametrize(
    ("page", "running", "waiting", "share"),
    [
        (
            'vllm:num_requests_running{a="b"} 3.0\nvllm:num_requests_waiting 4\nvllm:kv_cache_usage_perc{} 0.25',
            3,
            4,
            0.25,
        ),
        ("sglang:num_running_reqs 1\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5", 1, 2, 0.5),
        ('vllm:num_requests_running{e="0"} 1\nvllm:num_requests_running{e="1"} 2', 3, 0, 0.0),
        ("vllm:gpu_cache_usage_perc 1e-1\nvllm:gpu_cache_usage_perc 7.0", 0, 0, 1.0),
        ('vllm:num_requests_running{model_name="a}b 9"} 2', 2, 0, 0.0),
        (
            "vllm:num_requests_running 1e300\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc nan",
            1_000_000,
            0,
            0.0,
        ),
    ],
)
def test_a_page_of_metrics_is_read(page: str, running: int, waiting: int, share: float) -> None:
    load = load_of(page.encode())
    assert load is not None
    assert (load.running_requests, load.waiting_requests) == (running, waiting)
    assert load.used_pages / load.num_pages == share


@pytest.mark.parametrize(
    "page", ["", "# vllm:num_requests_running 3", "my_vllm:num_requests_running 3", "\x00\xff" * 99]
)
def test_a_page_that_tells_nothing_is_no_load(page: str) -> None:
    assert load_of(page.encode()) is None


def test_the_metrics_of_our_own_workers_are_read() -> None:
    from prometheus_client import generate_latest

    from sapwood_common.telemetry.metrics import MetricSet
    from sapwood_worker.front.metrics import WorkerMetrics
    from sapwood_worker.records.load import Load as WorkerLoad

    metrics = MetricSet()
    load = WorkerLoad(running_requests=5, waiting_requests=6, used_pages=60, evictable_pages=20, num_pages=80)
    WorkerMetrics(metrics).watch(lambda: load)
    found = load_of(generate_latest(metrics.registry))
    assert found == Load(running_requests=5, waiting_requests=6, used_pages=5000, num_pages=10_000)
