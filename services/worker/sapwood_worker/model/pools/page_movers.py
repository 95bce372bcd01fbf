"""Ways of moving pages between a CUDA device and pinned host memory.

Measured on an H200 (``benchmarks/gpu/bench_page_copies.py``: 1000 scattered pages of 2 MiB, a layer's keys and values in two
pieces; plain pinned copies run at 55 GB/s each way). Loads: a kernel of few programs reaches 50 GB/s; the copy engines 47, with
27 ms of host time to launch. Stores: a kernel reaches 51 GB/s but slows concurrent matrix products by 1.4; a kernel that gathers
pages for the copy engines reaches 52 GB/s and slows them by 1.05.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.memcpy_batch import Addresses, MemcpyBatch
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.step import PageCopy, PageIds

_PROGRAMS = 16
_STAGING_BYTES = 64 << 20


class PageStorer(Protocol):
    """Copies pages to the host."""

    def store(self, copy: PageCopy) -> None:
        """Queues the copies on the current stream; they are done when that has reached this point."""
        ...

    def layer_storer(self, copy: PageCopy) -> Callable[[Iterable[int]], None]:
        """Returns a function that queues copies of layers of these pages on the current stream of this call."""
        ...


class PageLoader(Protocol):
    """Copies pages to the device, layer by layer."""

    def load(self, copy: PageCopy) -> Iterator[int]:
        """Queues each layer's copies on the current stream, then yields the layer's number."""
        ...


class KernelMover:
    """Implements :class:`PageStorer` and :class:`PageLoader` with a kernel on the host's memory, launched once for each layer.

    Args:
        device: The device pool.
        host: The host pool, pinned.
        programs: Programs of the kernel that copy.
    """

    def __init__(self, device: DevicePool, host: HostPool, programs: int = _PROGRAMS) -> None:
        from sapwood_kernels import triton_page_copy  # only CUDA builds of torch have triton

        self._device = device
        self._host = torch.from_numpy(host.content).view(torch.int32)
        self._starts = {layer: start // 4 for layer, start in device.layout.offsets().items()}
        self._programs = programs
        self._kernels = triton_page_copy

    def store(self, copy: PageCopy) -> None:
        self.layer_storer(copy)(list(self._device.pages))

    def layer_storer(self, copy: PageCopy) -> Callable[[Iterable[int]], None]:
        """As :class:`PageStorer`."""
        groups = _ids_of_groups(copy, self._device)

        def store_layers(layers: Iterable[int]) -> None:
            for layer in layers:
                pages, pool = groups[self._device.group[layer]], self._device.pages[layer]
                self._kernels.store_pages(pool, self._host, self._starts[layer], *pages, programs=self._programs)

        return store_layers

    def load(self, copy: PageCopy) -> Iterator[int]:
        groups = _ids_of_groups(copy, self._device)
        for layer, pool in self._device.pages.items():
            pages = groups[self._device.group[layer]]
            self._kernels.load_pages(pool, self._host, self._starts[layer], *pages, programs=self._programs)
            yield layer


class _Part(NamedTuple):
    """The layers of a component, which lie one after the other in a record: their page table, where their pages are, where the
    first layer begins in a record, and how many words a layer's page has."""

    layers: tuple[int, ...]
    group: int
    pools: Tensor
    first: int
    words: int


class StagedStorer:
    """Implements :class:`PageStorer`: a kernel collects pages in device memory, the copy engines take them from there.

    So the multiprocessors are busy with a page for a microsecond, not for its whole way to the host.

    Args:
        device: The device pool.
        host: The host pool, pinned.
        batch: The driver's call that copies many pieces.
    """

    def __init__(self, device: DevicePool, host: HostPool, batch: MemcpyBatch) -> None:
        from sapwood_kernels import triton_page_copy  # only CUDA builds of torch have triton

        self._device = device
        self._host = host
        self._batch = batch
        self._gather = triton_page_copy.gather_pages
        layout, offsets = device.layout, device.layout.offsets()
        self._parts: list[_Part] = []
        for each in layout.components:
            addresses = [device.pages[layer].data_ptr() for layer in each.layers]
            pools = torch.tensor(addresses, device=device.device)
            first, words = offsets[each.layers[0]] // 4, layout.layer_bytes(each) // 4
            self._parts.append(_Part(each.layers, layout.group_of(each), pools, first, words))
        count = max(1, _STAGING_BYTES // host.part_bytes)
        self._staged = torch.empty(count * (host.part_bytes // 4), dtype=torch.int32, device=device.device)

    def store(self, copy: PageCopy) -> None:
        """Pages go whole: those of all groups."""
        self.layer_storer(copy)(list(self._device.pages))

    def layer_storer(self, copy: PageCopy) -> Callable[[Iterable[int]], None]:
        """As :class:`PageStorer`. Mutates the staging memory: to be called on one stream only."""
        of_groups = map(copy.of, range(len(self._device.counts)))
        groups = [
            (page_ids(pages, self._device.device), record_addresses(self._host, places)) for pages, places in of_groups
        ]
        stream = torch.cuda.current_stream(self._device.device).cuda_stream

        def store_layers(layers: Iterable[int]) -> None:
            wanted = set(layers)
            for part in self._parts:
                places = [place for place, layer in enumerate(part.layers) if layer in wanted]
                if places:
                    self._store(part, places[0], len(places), *groups[part.group], stream)

        return store_layers

    def _store(self, part: _Part, place: int, layers: int, pages: Tensor, targets: Addresses, stream: int) -> None:
        """Copies ``layers`` layers of a part, from the ``place``-th on."""
        words = layers * part.words
        rows = len(self._staged) // words
        staged = self._staged[: rows * words].view(rows, words)
        sources = np.uint64(staged.data_ptr()) + np.arange(rows, dtype=np.uint64) * np.uint64(4 * words)
        targets = targets + np.uint64(4 * (part.first + place * part.words))
        for start in range(0, len(targets), rows):
            to = targets[start : start + rows]
            self._gather(
                part.pools[place : place + layers], staged[: len(to)], 0, part.words, pages[start : start + rows]
            )
            self._batch.copy(to, sources[: len(to)], 4 * words, stream)


def _ids_of_groups(copy: PageCopy, pool: DevicePool) -> list[tuple[Tensor, Tensor]]:
    """The ids of the pages to copy, on the device, for each group of the layout, and those of their host pages."""
    pairs = (copy.of(group) for group in range(len(pool.counts)))
    return [(page_ids(pages, pool.device), page_ids(places, pool.device)) for pages, places in pairs]


def record_addresses(host: HostPool, pages: PageIds) -> Addresses:
    """uint64 [N]: the addresses at which the content of host pages begins."""
    first, stride = host.content.ctypes.data, host.records.strides[0]
    addresses: Addresses = np.uint64(first) + pages.astype(np.uint64) * np.uint64(stride)
    return addresses


def page_ids(pages: PageIds, device: torch.device) -> Tensor:
    """The page ids on the device, int64; allocated on the current stream, which alone may use them."""
    return torch.from_numpy(pages).long().pin_memory().to(device, non_blocking=True)
