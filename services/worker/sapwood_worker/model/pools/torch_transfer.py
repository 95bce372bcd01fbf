"""Copies of pages with torch: at once on a CPU, on streams of their own on CUDA."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.memcpy_batch import MemcpyBatch
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.page_movers import KernelMover, PageLoader, PageStorer, StagedStorer
from sapwood_worker.model.pools.transfer import Transfer
from sapwood_worker.records.page_copies import Copies, CopyReport, PageCopy

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``sapwood_kernels.reference.store_pages`` or ``load_pages``."""


def make_transfer(device: DevicePool, host: HostPool, ops: DeviceOps) -> Transfer:
    """The transfer between two pools; pins the host's memory if the device works beside the host."""
    if not ops.asynchronous:
        return CpuTransfer(device, host)
    pin(host)
    kernel = KernelMover(device, host)
    try:
        batch = MemcpyBatch()
    except AttributeError:  # an older driver
        return CudaTransfer(device, kernel, kernel)
    return CudaTransfer(device, StagedStorer(device, host, batch), kernel)


class CpuTransfer:
    """Implements :class:`Transfer` in memory: every copy is done when :meth:`start` returns.

    Args:
        device: The device pool, on a CPU.
        host: The host pool.
    """

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        content = torch.from_numpy(host.content)
        offsets = device.layout.offsets()
        # Each layer's group, and the bytes of its pages on the device and on the host.
        self._layers: list[tuple[int, Tensor, Tensor]] = []
        for layer, pool in device.pages.items():
            pages = pool.view(torch.uint8).flatten(1)
            self._layers.append(
                (device.group[layer], pages, content[:, offsets[layer] : offsets[layer] + pages.shape[1]])
            )
        self._done: tuple[int, ...] = ()
        self._store_seconds = self._load_seconds = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._done)

    def start(self, copies: Copies) -> None:
        if copies.store is not None:
            self._store_seconds += self._copy(copies.store, reference.store_pages)
            self._done += (copies.store.number,)
        if copies.load is not None:
            self._load_seconds += self._copy(copies.load, reference.load_pages)

    def poll(self) -> CopyReport:
        report = CopyReport(self._done, (), self._store_seconds, self._load_seconds)
        self._done, self._store_seconds, self._load_seconds = (), 0.0, 0.0
        return report

    def _copy(self, copy: PageCopy, kernel: Kernel) -> float:
        began = time.perf_counter()
        for group, pages, there in self._layers:
            kernel(pages, there, *(torch.from_numpy(ids).long() for ids in copy.of(group)))
        return time.perf_counter() - began


class CudaTransfer:
    """Implements :class:`Transfer` on two streams, one for each direction, beside the stream that computes.

    A store waits for what was launched before it, so that it reads finished KV; the computation waits for it only at a fence.
    A load goes layer by layer and records an event after each: the computation of a layer waits for that layer's event alone
    (``DevicePool.await_layer``).

    Args:
        device: The device pool.
        storer: Copies pages to the host.
        loader: Copies pages to the device.
    """

    def __init__(self, device: DevicePool, storer: PageStorer, loader: PageLoader) -> None:
        self._device = device
        self._storer = storer
        self._loader = loader
        self._stores = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
        self._loads = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
        # Stores have a number, a beginning and an end; loads a beginning and an end.
        self._running: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._loading: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def start(self, copies: Copies) -> None:
        computing = torch.cuda.current_stream(self._device.device)
        if copies.store is not None:
            self._stores.wait_stream(computing)
            with torch.cuda.stream(self._stores):
                begin = self._mark(self._stores)
                self._storer.store(copies.store)
                self._running.append((copies.store.number, begin, self._mark(self._stores)))
        if copies.fence:
            computing.wait_stream(self._stores)
        if copies.load is not None:
            self._loads.wait_stream(computing)  # earlier steps may still read the old content of these pages
            with torch.cuda.stream(self._loads):
                begin = self._mark(self._loads)
                events = {layer: self._mark(self._loads) for layer in self._loader.load(copies.load)}
            self._device.arriving(events)
            self._loading.append((begin, events[next(reversed(events))]))

    def poll(self) -> CopyReport:
        ended = [item for item in self._running if item[2].query()]  # type: ignore[no-untyped-call]
        self._running = [item for item in self._running if item not in ended]
        loaded = [item for item in self._loading if item[1].query()]  # type: ignore[no-untyped-call]
        self._loading = [item for item in self._loading if item not in loaded]
        return CopyReport(
            done=tuple(number for number, _, _ in ended),
            store_seconds=sum(_seconds(begin, end) for _, begin, end in ended),
            load_seconds=sum(_seconds(begin, end) for begin, end in loaded),
        )

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def pin(host: HostPool) -> None:
    """Registers the pool with CUDA, in place: torch's own pinned allocator would round its size up to a power of two.

    Raises:
        RuntimeError: CUDA does not take it.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = host.records.ctypes.data
    error = runtime.cudaHostRegister(address, host.records.nbytes, 0)
    if int(error) != 0:
        raise RuntimeError(
            f"the host cache of {host.records.nbytes} bytes could not be pinned: CUDA error {int(error)}"
        )
    # Without it the driver would still take the addresses for pinned when the memory is used for something else.
    weakref.finalize(host, runtime.cudaHostUnregister, address).atexit = False
