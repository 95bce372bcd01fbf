"""What /metrics says of adapters: for gateways that read vLLM's gauge, and for people."""

from __future__ import annotations

import time
from pathlib import Path

from sapwood_common.telemetry.metrics import MetricSet
from sapwood_worker.front.loras import Loras
from sapwood_worker.front.metrics import WorkerMetrics
from sapwood_worker.records.load import LoraLoads, LoraUse
from sapwood_worker.records.lora import Lora, LoraFacts


class Reader:
    async def read_lora(self, lora: Lora) -> LoraFacts:
        return LoraFacts(lora.number, lora.name.encode(), 8, ("q_proj",), 1000)

    async def drop_lora(self, number: int) -> None:
        return None


async def test_the_gauge_of_gateways_names_running_and_waiting_adapters_at_this_time(tmp_path: Path) -> None:
    metrics = MetricSet()
    loras = Loras(Reader(), Path, 10_000)
    loras.slots = 4
    WorkerMetrics(metrics).watch_loras(loras)
    for name in ("b", "a", "c"):
        await loras.load(name, str(tmp_path))
    loras.loads = lambda: LoraLoads((1, 2, 0, 0), 3, (LoraUse(1, 2, 1), LoraUse(2, 1, 0), LoraUse(3, 0, 5)), 7, 1)
    samples = {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for family in metrics.registry.collect()
        for each in family.samples
    }
    labels = (("max_lora", "4"), ("running_lora_adapters", "a,b"), ("waiting_lora_adapters", "b,c"))
    assert abs(samples["vllm:lora_requests_info", labels] - time.time()) < 60
    assert samples["sapwood_worker_lora_running_requests", (("lora", "b"),)] == 2
    assert samples["sapwood_worker_lora_waiting_requests", (("lora", "c"),)] == 5
    assert samples["sapwood_worker_lora_slots", (("state", "used"),)] == 1
    assert samples["sapwood_worker_lora_host_bytes", ()] == 3000
    assert samples["sapwood_worker_lora_reads_total", (("outcome", "read"),)] == 3
    assert samples["sapwood_worker_lora_slot_loads_total", ()] == 7


async def test_a_thousand_adapters_make_a_bounded_number_of_series(tmp_path: Path) -> None:
    metrics = MetricSet()
    loras = Loras(Reader(), Path, 10_000_000)
    loras.slots = 4
    WorkerMetrics(metrics).watch_loras(loras)
    for number in range(1000):
        await loras.load(f"a{number}", str(tmp_path))
    loras.loads = lambda: LoraLoads((), 0, tuple(LoraUse(number, 1, 1) for number in range(1, 1001)))
    names = {
        each.labels["lora"] for family in metrics.registry.collect() for each in family.samples if "lora" in each.labels
    }
    assert len(names) <= 257 and "other" in names
