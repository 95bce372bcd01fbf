"""Every way of moving KV pages between one GPU and pinned host memory, compared with a plain pinned copy of the same size.

    python benchmarks/gpu/bench_page_copies.py

Pages of the Llama-3.1-8B shape (2 MiB: 32 layers, 16 tokens, 8 heads of 128, bf16), 1000 of them at scattered places. For each
way: GB/s of the median of five, what the host spends asking for it, and what a matrix product that runs next to it slows down to.
Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch
from commit import measured_commit

from sapwood_kernels.memcpy_batch import MemcpyBatch
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.page_movers import KernelMover, PageLoader, PageStorer, StagedStorer, record_addresses
from sapwood_worker.model.pools.torch_transfer import pin
from sapwood_worker.records.kv_layout import KVComponent, KVLayout
from sapwood_worker.records.step import PageCopy

LAYERS, PAGE, HEADS, DIM = 32, 16, 8, 128
PAGES, DEVICE_PAGES, HOST_PAGES = 1000, 2048, 1500


def show(what: str, value: float, unit: str) -> None:
    row = {"what": what, "value": round(value, 4), "unit": unit, "engine": "sapwood"}
    print(json.dumps({**row, "device": torch.cuda.get_device_name(), "commit": measured_commit()}), flush=True)


def attempt(what: str, function: Callable[[], None]) -> None:
    """One part that fails does not take the others with it."""
    try:
        function()
        torch.cuda.synchronize()
    except Exception:
        print(json.dumps({"what": what, "error": traceback.format_exc()[-1500:]}), flush=True)


class BatchLoader:
    """Loads by the copy engines: each layer one batch of pages.

    Args:
        device: The device pool.
        host: The host pool, pinned.
        batch: The driver's call.
    """

    def __init__(self, device: DevicePool, host: HostPool, batch: MemcpyBatch) -> None:
        self._device = device
        self._host = host
        self._batch = batch

    def load(self, copy: PageCopy) -> Iterator[int]:
        """Copies pages as a PageLoader does."""
        pool = self._device
        piece = self._host.page_bytes // LAYERS
        stream = torch.cuda.current_stream(pool.device).cuda_stream
        within = copy.device.astype(np.uint64) * np.uint64(piece)
        sources = record_addresses(self._host, copy.host)
        for layer, pages in pool.pages.items():
            self._batch.copy(within + np.uint64(pages.data_ptr()), sources + np.uint64(layer * piece), piece, stream)
            yield layer


class Bench:
    def __init__(self) -> None:
        layout = KVLayout((KVComponent(tuple(range(LAYERS)), 2, HEADS, DIM, "bfloat16"),), PAGE)
        self.device = DevicePool(layout, DEVICE_PAGES, torch.device("cuda"))
        for pages in self.device.pages.values():
            pages.normal_()
        size = layout.page_bytes
        self.host = HostPool(HOST_PAGES, size)
        self.host.records[:] = 1
        began = time.perf_counter()
        pin(self.host)
        show("pinning 3 GB of touched memory", time.perf_counter() - began, "s")
        self.size = PAGES * size
        chance = np.random.default_rng(1)
        self.copy = PageCopy(
            0,
            chance.permutation(DEVICE_PAGES)[:PAGES].astype(np.int32),
            chance.permutation(HOST_PAGES)[:PAGES].astype(np.int32),
        )
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def seconds(self, ask: Callable[[], None]) -> tuple[float, float]:
        """Medians of five: until it is done, and until it has been asked for."""
        done, asked = [], []
        for attempt_number in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            with torch.cuda.stream(self.stream):
                ask()
            middle = time.perf_counter()
            torch.cuda.synchronize()
            if attempt_number:  # the first compiles
                done.append(time.perf_counter() - began)
                asked.append(middle - began)
        return median(done), median(asked)

    def beside(self, ask: Callable[[], None]) -> float:
        """How much longer 30 matrix products take while copies continue."""
        torch.cuda.synchronize()
        times = []
        for copying in (False, False, True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if copying:
                with torch.cuda.stream(self.stream):
                    ask()
                    ask()
            begin.record()
            for _ in range(30):
                self.matrix @ self.matrix
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return times[2] / times[1]

    def plain(self) -> dict[str, float]:
        pinned = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(self.size, dtype=torch.uint8, device="cuda")
        rates = {}
        for name, target, source in (("load", device, pinned), ("store", pinned, device)):
            taken, _ = self.seconds(lambda target=target, source=source: target.copy_(source, non_blocking=True))
            rates[name] = self.size / taken / 1e9
            show(f"{name}, plain pinned copy", rates[name], "GB/s")
        return rates

    def clear(self, copy: PageCopy, *, store: bool) -> None:
        if store:
            self.host.content[copy.host] = 0
        else:
            pages = torch.from_numpy(copy.device).long().cuda()
            for layer in range(LAYERS):
                self.device.pages[layer][pages] = 0

    def same(self) -> bool:
        torch.cuda.synchronize()
        content = torch.from_numpy(self.host.content).view(torch.int16).view(HOST_PAGES, LAYERS, -1)
        places, pages = torch.from_numpy(self.copy.host).long(), torch.from_numpy(self.copy.device).long().cuda()
        for layer in range(0, LAYERS, 5):
            there = self.device.pages[layer][pages]
            if not torch.equal(content[places, layer], there.cpu().view(torch.int16).flatten(1)):
                return False
        return bool(there.any())

    def storer(self, name: str, storer: PageStorer, plain: float) -> None:
        self.clear(self.copy, store=True)
        self.measure(f"store, {name}", lambda: storer.store(self.copy), plain)

    def loader(self, name: str, loader: PageLoader, plain: float) -> None:
        self.clear(self.copy, store=False)
        self.measure(f"load, {name}", lambda: [None for _ in loader.load(self.copy)], plain)

    def measure(self, name: str, ask: Callable[[], object], plain: float) -> None:
        taken, asked = self.seconds(ask)
        show(f"{name}: right", float(self.same()), "bool")
        show(name, self.size / taken / 1e9, "GB/s")
        show(f"{name}: over the plain copy", self.size / taken / 1e9 / plain, "ratio")
        show(f"{name}: host", asked * 1e3, "ms")
        show(f"{name}: matrix products next to it", self.beside(ask), "times as long")

    def index_copies(self, plain: dict[str, float]) -> None:
        """What torch's own indexing does: a gather on the device, then a copy through a pinned buffer."""
        pages = torch.from_numpy(self.copy.device).long().cuda()
        buffer = torch.empty((PAGES, 2, HEADS, PAGE, DIM), dtype=torch.bfloat16, pin_memory=True)
        host = torch.from_numpy(self.host.content).view(torch.int16).view(HOST_PAGES, LAYERS, -1)
        places = torch.from_numpy(self.copy.host).long()

        def store() -> None:
            for layer in range(4):
                buffer.copy_(self.device.pages[layer][pages])
                host[places, layer] = buffer.view(torch.int16).flatten(1)

        taken, _ = self.seconds(store)
        show("store, torch indexing", self.size * 4 / LAYERS / taken / 1e9, "GB/s")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    bench = Bench()
    plain = bench.plain()
    device, pool = bench.device, bench.host
    # Stores first: what the loads read is then what the device had.
    attempt(
        "store, staged",
        lambda: bench.storer("gather and batch", StagedStorer(device, pool, MemcpyBatch()), plain["store"]),
    )
    for programs in (16, 32, 64, 132, 1 << 20):
        name = f"kernel of {programs} programs"
        attempt(name, lambda n=programs, name=name: bench.storer(name, KernelMover(device, pool, n), plain["store"]))
    attempt("load, batch", lambda: bench.loader("batch", BatchLoader(device, pool, MemcpyBatch()), plain["load"]))
    for programs in (16, 32, 64, 132, 1 << 20):
        name = f"kernel of {programs} programs"
        attempt(name, lambda n=programs, name=name: bench.loader(name, KernelMover(device, pool, n), plain["load"]))
    attempt("index", lambda: bench.index_copies(plain))


if __name__ == "__main__":
    main()
