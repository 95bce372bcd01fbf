"""What every service shows under /metrics, and that docs/metrics.md lists just that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]


def documented(service: str) -> set[str]:
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = re.search(rf"## {service}\n(.*?)(?=\n## |\Z)", page, re.DOTALL)
    assert section is not None
    return set(re.findall(r"^\| `(\w+)`", section[1], re.MULTILINE))


def test_every_documented_metric_is_shown_and_every_shown_one_documented(start_router, connect) -> None:
    cluster = start_router()
    cluster.wait_ready()
    assert connect(cluster.grpc).generate("hello", max_tokens=8, ignore_eos=True).text()
    for service in ("router", "tokenizer", "worker"):
        families = list(text_string_to_metric_families(cluster.metrics(service)))
        shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
        own = {name for name in shown if name.startswith("sapwood_")}
        assert own == documented("Every service") | documented(service.capitalize()), service


def test_a_workers_metrics_follow_a_request(start_services, connect) -> None:
    cluster = start_services(worker=("--max-step-tokens", "16"))
    cluster.wait_ready()
    connect(cluster.grpc).generate("x" * 40, max_tokens=6, ignore_eos=True).text()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(cluster.metrics("worker"))
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert found["sapwood_worker_requests_total", "length"] == 1
    assert found["sapwood_worker_queue_seconds_count",] == 1
    assert found["sapwood_worker_time_to_first_token_seconds_count",] == 1
    assert found["sapwood_worker_step_tokens_total", "prefill"] == 40
    assert found["sapwood_worker_step_tokens_total", "decode"] == 5
    assert found["sapwood_worker_step_seconds_count", "prefill"] == 3
    assert found["sapwood_worker_step_seconds_count", "decode"] == 5
    assert found["sapwood_worker_prompt_tokens_total",] == 40


def test_the_page_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "docs" / "write_metrics.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
