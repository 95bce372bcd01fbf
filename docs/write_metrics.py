"""Writes docs/metrics.md from the metrics that the services make.

make docs          writes it
python docs/write_metrics.py --check    exits 1 if it is not up to date
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.telemetry.metrics import MetricSet, MetricSpec
from sapwood_common.telemetry.tracing import Tracing
from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_router.admission.control import AdmissionControl
from sapwood_router.admission.fair_queue import AdmissionSettings
from sapwood_router.fleet.connection import SilenceLimit
from sapwood_router.fleet.registry import Registry
from sapwood_router.observe.metrics import RouterMetrics
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_testing.worker.no_loras import no_loras
from sapwood_tokenizer.serve.metrics import add_metrics
from sapwood_worker.front.metrics import WorkerMetrics
from sapwood_worker.ipc.liveness import Liveness
from sapwood_worker.records.expert_load import ExpertLoad
from sapwood_worker.records.load import Load
from sapwood_worker.records.model_info import SumChoices
from sapwood_worker.records.pictures import PictureUse

TARGET = Path(__file__).resolve().parent / "metrics.md"

HEAD = """\
# Metrics

Written by `make docs` from the services' code; a test checks that it is fresh and that a running cluster shows just these.

Prometheus reads `/metrics` on the router's HTTP port (8000, or `--metrics-port`), on the tokenizer's port 9152 and on the
workers' ports 9161 and up. A label takes only the values named here; any other is counted as `other`. Process metrics
(`process_*`) come with each.
"""


def main() -> None:
    """Writes the page, or checks it."""
    text = render()
    if "--check" in sys.argv[1:]:
        if not TARGET.is_file() or TARGET.read_text() != text:
            sys.exit("docs/metrics.md is not up to date: make docs")
        return
    TARGET.write_text(text)


def render() -> str:
    """The whole page."""
    every, router, tokenizer, worker = MetricSet(), MetricSet(), MetricSet(), MetricSet()
    RpcTelemetry(every, Tracing())
    registry, router_metrics = Registry([]), RouterMetrics(router)
    router_metrics.watch(registry, AdmissionControl(registry, AdmissionSettings(), time.monotonic, random.Random()))
    router_metrics.watch_index(BlockIndex(0))
    router_metrics.watch_sessions(lambda: 0)
    router_metrics.watch_lag(LoopLag(), SilenceLimit(1.0, LoopLag()), registry)
    add_metrics(tokenizer, dict, lambda: 0, dict, dict, dict)
    worker_metrics = WorkerMetrics(worker)
    worker_metrics.watch(Load)
    worker_metrics.watch_loras(no_loras())
    worker_metrics.watch_experts(ExpertLoad, int)
    worker_metrics.watch_sums(dict, SumChoices)
    worker_metrics.watch_pictures(PictureUse)
    worker_metrics.watch_liveness(Liveness())
    sections = [("Every service", every), ("Router", router), ("Tokenizer", tokenizer), ("Worker", worker)]
    return "\n".join([HEAD, *(f"## {name}\n\n{table(metrics.specs)}" for name, metrics in sections)])


def table(specs: list[MetricSpec]) -> str:
    """Metrics as a Markdown table."""
    rows = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for spec in specs:
        labels = "; ".join(f"`{name}`: {label.describe()}" for name, label in spec.labels.items())
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
