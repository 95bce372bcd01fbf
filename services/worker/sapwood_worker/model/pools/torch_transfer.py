"""Copies of pages between device and host."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.memcpy_batch import MemcpyBatch
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool, PageParts, layer_groups, ranges_of
from sapwood_worker.model.pools.page_movers import KernelMover, PageStorer, StagedStorer
from sapwood_worker.records.handoff import log_stage
from sapwood_worker.records.step import Copies, CopyReport, LatePages, PageCopy

# Copies pages between device and host: the runner's half of the second tier.


class Transfer(Protocol):
    """Carries out what the scheduler asks for. The runner calls it before each step's computation."""

    def start(self, copies: Copies) -> None:
        """Copies pages, in the order and with the waits that :class:`Copies` says.

        Mutates the host pages of the store, which are valid once it is reported done, and the device pages of the load,
        which are valid for whatever the step computes next.
        """
        ...

    def finish(self, *, failed: bool = False) -> None:
        """The step's computation has been queued, or has failed: copies the remaining layers of the pages that it fills."""
        ...

    def poll(self) -> CopyReport:
        """The stores that have ended since the last call; never waits."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a store has been started and not reported."""
        ...


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``sapwood_kernels.reference.store_pages`` or ``load_pages``."""
_GROUPS = 8
"""Groups of layers: the pages of a group are copied together while a step computes the next group."""
_FEW_PAGES = 128
"""Fewer are copied when all layers are computed: to launch the groups' copies takes milliseconds, and a step that computes so few
pages is over hardly later than it is launched."""


def make_transfer(device: DevicePool, host: HostPool, ops: DeviceOps) -> Transfer:
    """The transfer between two pools; pins the host's memory if the device works in parallel with the host."""
    _set_groups(device, host)
    if not ops.asynchronous:
        return CpuTransfer(device, host)
    pin(host)
    kernel = KernelMover(device, host)
    try:
        batch = MemcpyBatch()
    except AttributeError:  # an older driver
        return CudaTransfer(device, host, kernel, kernel)
    return CudaTransfer(device, host, StagedStorer(device, host, batch), kernel)


class _Groups:
    """Follows a step through the groups of its layers.

    Args:
        device: The device pool.
        queued: Is called with a group's layers once all of them have been queued.
    """

    def __init__(self, device: DevicePool, queued: Callable[[Sequence[int]], object]) -> None:
        self._device = device
        self._queued = queued
        self._groups = deque(layer_groups(tuple(device.pages), _GROUPS))
        device.watched(self._come_to)

    def finish(self, *, failed: bool) -> None:
        """All layers have been queued, or the rest will not be."""
        self._device.watched(None)
        while self._groups and not failed:
            self._queued(self._groups.popleft())

    def _come_to(self, layer: int) -> None:
        """A layer is about to be queued."""
        while self._groups and self._groups[0][-1] < layer:
            self._queued(self._groups.popleft())


class _Teller:
    """Tells what has happened on the device, in the order in which it was asked to, in a thread of its own.

    Not the threads that answer reads: who looks again and again takes Python's lock from the one that launches steps.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], object], Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="page parts", daemon=True).start()

    def tell(self, wait: Callable[[], object], then: Callable[[], None]) -> None:
        """Calls ``then`` when ``wait`` has returned."""
        self._asked.put((wait, then))

    def _work(self) -> None:
        while True:
            wait, then = self._asked.get()
            with contextlib.suppress(RuntimeError):  # the device has failed, as the step's thread will see
                wait()
                then()


def _set_groups(device: DevicePool, host: HostPool) -> None:
    """Says which bytes of a host page the groups of layers are that steps fill one after the other."""
    layout = device.layout
    sizes = {layer: layout.layer_bytes(kept) for layer, kept in device.kept.items()}
    groups = layer_groups(tuple(device.pages), _GROUPS)
    host.parts.groups = [ranges_of(layers, layout.offsets(), sizes) for layers in groups]


class CpuTransfer:
    """Implements :class:`Transfer` in memory: every copy is done when :meth:`start` returns.

    Args:
        device: The device pool, on a CPU.
        host: The host pool.
    """

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        content = torch.from_numpy(host.content)
        offsets = device.layout.offsets()
        self._device = device
        self._host = host
        # Each layer's group, and the bytes of its pages on the device and on the host.
        self._layers: dict[int, tuple[int, Tensor, Tensor]] = {}
        for layer, pool in device.pages.items():
            pages = pool.view(torch.uint8).flatten(1)
            there = content[:, offsets[layer] : offsets[layer] + pages.shape[1]]
            self._layers[layer] = device.group[layer], pages, there
        self._during: tuple[_Groups, PageCopy, PageParts] | None = None
        self._done: tuple[int, ...] = ()
        self._failed: tuple[int, ...] = ()
        self._store_seconds = self._load_seconds = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._done or self._failed)

    def start(self, copies: Copies) -> None:
        if copies.store is not None:
            self._store_seconds += self._copy(copies.store, reference.store_pages, self._layers)
            self._done += (copies.store.number,)
        if copies.load is not None:
            self._load_seconds += self._copy(copies.load, reference.load_pages, self._layers)
        if copies.during is not None and (copy := copies.during.take()) is not None:
            parts = self._host.parts.begin(copy.host.tolist())

            def copy_layers(layers: Iterable[int]) -> None:
                parts.computed()
                self._store_seconds += self._copy(copy, reference.store_pages, layers)
                parts.copied()

            self._during = _Groups(self._device, copy_layers), copy, parts

    def finish(self, *, failed: bool = False) -> None:
        if self._during is not None:
            (groups, copy, parts), self._during = self._during, None
            groups.finish(failed=failed)
            self._host.parts.end(copy.host.tolist(), parts)
            if failed:
                self._failed += (copy.number,)
            else:
                self._done += (copy.number,)

    def poll(self) -> CopyReport:
        report = CopyReport(self._done, self._failed, self._store_seconds, self._load_seconds)
        self._done, self._failed, self._store_seconds, self._load_seconds = (), (), 0.0, 0.0
        return report

    def _copy(self, copy: PageCopy, kernel: Kernel, layers: Iterable[int]) -> float:
        began = time.perf_counter()
        for layer in layers:
            group, pages, there = self._layers[layer]
            kernel(pages, there, *(torch.from_numpy(ids).long() for ids in copy.of(group)))
        return time.perf_counter() - began


class CudaTransfer:
    """Implements :class:`Transfer` on two streams, one for each direction, besides the stream that computes.

    A store waits for what was launched before it, so that it reads finished KV; the computation waits for it only at a fence.
    A load goes layer by layer and records an event after each: the computation of a layer waits for that layer's event alone
    (``DevicePool.await_layer``). Pages that a step fills are copied the other way in the same manner, some layers at a time;
    these copies are launched when all of the step has been, as nobody waits for them as for the step.

    Args:
        device: The device pool.
        host: The host pool.
        storer: Copies pages, or some of their layers, to the host.
        kernels: Copies pages to the device.
    """

    def __init__(self, device: DevicePool, host: HostPool, storer: PageStorer, kernels: KernelMover) -> None:
        self._device = device
        self._host = host
        self._storer = storer
        self._kernels = kernels
        self._during: tuple[_Groups, list[tuple[Sequence[int], torch.cuda.Event]], LatePages] | None = None
        self._filling: dict[int, tuple[PageCopy, PageParts]] = {}
        self._computed, self._copied = _Teller(), _Teller()
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
                events = {layer: self._mark(self._loads) for layer in self._kernels.load(copies.load)}
            self._device.arriving(events)
            self._loading.append((begin, events[next(reversed(events))]))
        if copies.during is not None:
            self._begin_during(copies.during)

    def _begin_during(self, pages: LatePages) -> None:
        computing = torch.cuda.current_stream(self._device.device)
        computed: list[tuple[Sequence[int], torch.cuda.Event]] = []
        groups = _Groups(self._device, lambda layers: computed.append((layers, self._mark(computing))))
        self._during = groups, computed, pages

    def finish(self, *, failed: bool = False) -> None:
        if self._during is None:
            return
        (groups, computed, pages), self._during = self._during, None
        groups.finish(failed=failed)
        log_stage("all layers queued")
        if failed or (copy := pages.take()) is None:
            return
        parts = self._host.parts.begin(copy.host.tolist())
        for _, event in computed:
            self._computed.tell(event.synchronize, parts.computed)
        pieces = [(layers, event, 1) for layers, event in computed]
        if len(copy.host) < _FEW_PAGES:
            pieces = [(list(self._device.pages), computed[-1][1], len(computed))]
        with torch.cuda.stream(self._stores):
            store_layers = self._storer.layer_storer(copy)
            begin = None
            for layers, event, groups_of in pieces:
                self._stores.wait_event(event)
                begin = begin or self._mark(self._stores)
                store_layers(layers)
                end = self._mark(self._stores)
                for _ in range(groups_of):
                    self._copied.tell(end.synchronize, parts.copied)
        assert begin is not None
        self._running.append((copy.number, begin, end))
        self._filling[copy.number] = copy, parts
        # The pages may be given to somebody else before the next step.
        torch.cuda.current_stream(self._device.device).wait_stream(self._stores)

    def poll(self) -> CopyReport:
        ended = [item for item in self._running if item[2].query()]  # type: ignore[no-untyped-call]
        self._running = [item for item in self._running if item not in ended]
        loaded = [item for item in self._loading if item[1].query()]  # type: ignore[no-untyped-call]
        self._loading = [item for item in self._loading if item not in loaded]
        for number, _, _ in ended:
            if (filled := self._filling.pop(number, None)) is not None:
                copy, parts = filled
                self._host.parts.end(copy.host.tolist(), parts)
        return CopyReport(
            done=tuple(number for number, _, _ in ended),
            store_seconds=sum(_seconds(begin, end) for _, begin, end in ended),
            load_seconds=sum(_seconds(begin, end) for begin, end in loaded),
        )

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def marked(device: torch.device) -> Callable[[], None]:
    """A function that returns once everything is over that was launched on a device before this call."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


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
