"""A device pool whose pages other processes of the host read: CUDA IPC, by the driver's own calls. Knows no torch streams.

Memory is exported by whole allocations; a page's layer is an offset into one. A reader must know when the pages are in place,
and check after the read that they still were.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from sapwood_kernels.memcpy_batch import Addresses, MemcpyBatch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

Targets = Callable[[int], Addresses]
"""Offset in a page's content -> for each page the address where the part that begins there goes."""


class LayerPages(msgspec.Struct, frozen=True, array_like=True):
    """Where a layer's pages lie, as it travels to another process.

    Attributes:
        handle: Names the allocation.
        first: Where in it page 0 begins, in bytes.
        size: Bytes of a page, and from one to the next.
        at: Where in the content of a page's record they go.
    """

    handle: bytes
    first: int
    size: int
    at: int


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """A device pool, as it travels to another process.

    Attributes:
        process: The process whose it is, and the namespace of processes in which that is its number.
        layers: Its layers.
    """

    process: tuple[int, int]
    layers: list[LayerPages]


class DeviceMemory(Protocol):
    """A device's memory among processes. For any thread."""

    def export(self, address: int) -> tuple[bytes, int]:
        """Names the allocation in which an address lies, and the address's place in it."""
        ...

    def open(self, handle: bytes) -> int:
        """The address here of an allocation of another process."""
        ...

    def close(self, address: int) -> None:
        """Undoes :meth:`open`."""
        ...

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, batched: bool = True) -> None:
        """Copies this many bytes from each source to its target, in device or host memory; the copies are complete when it
        returns. In batches host memory must be pinned.

        Raises:
            RuntimeError: They are not.
        """
        ...


class CudaMemory:
    """Implements :class:`DeviceMemory` by the driver.

    Args:
        index: The device.

    Raises:
        OSError, RuntimeError: There is no driver, or no such device.
    """

    def __init__(self, index: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._batch = MemcpyBatch() if hasattr(self._driver, "cuMemcpyBatchAsync") else None
        self._streams = threading.local()

    def export(self, address: int) -> tuple[bytes, int]:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._enter()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.bytes), address - base.value

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        content = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        self._enter()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), content, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._enter()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, batched: bool = True) -> None:
        self._enter()
        stream = self._stream()
        if batched and self._batch is not None:
            self._batch.copy(targets, sources, sizes, stream.value or 0)
        else:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._call(
                    "cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream
                )
        self._call("cuStreamSynchronize", stream)

    def _enter(self) -> None:
        """Makes the device's context this thread's."""
        self._call("cuCtxSetCurrent", self._context)

    def _stream(self) -> ctypes.c_void_p:
        """This thread's."""
        found: ctypes.c_void_p | None = getattr(self._streams, "stream", None)
        if found is None:
            found = self._streams.stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(found), ctypes.c_uint(_NON_BLOCKING))
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class OwnPool:
    """This process's device pool.

    Args:
        layers: For each its address, the bytes of a page, and where in the content of a page's record they go; at least one.
        memory: The device's.
        mark: Notes the work launched on the device so far; returns a function that waits until that work is over.

    Attributes:
        memory, mark: The arguments.
        page_bytes: Bytes of a page's content, all layers together.
    """

    def __init__(
        self, layers: Sequence[tuple[int, int, int]], memory: DeviceMemory, mark: Callable[[], Callable[[], None]]
    ) -> None:
        assert layers
        self.memory = memory
        self.mark = mark
        self._layers = {at: (address, size) for address, size, at in layers}
        self.page_bytes = sum(size for _, size, _ in layers)

    def export(self) -> bytes:
        """The data that another process needs to read its pages.

        Raises:
            RuntimeError: The driver does not export this memory.
        """
        layers = [LayerPages(*self.memory.export(address), size, at) for at, (address, size) in self._layers.items()]
        return msgspec.msgpack.encode(Exported((os.getpid(), _namespace()), layers))

    def targets(self, pages: Sequence[int]) -> Targets:
        """Where the content of pages goes."""
        ids = np.array(pages, np.uint64)

        def addresses(at: int) -> Addresses:
            address, size = self._layers[at]
            return np.uint64(address) + ids * np.uint64(size)

        return addresses

    def fill(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Fills pages from the host's memory.

        Raises:
            RuntimeError: The copies failed.
        """
        sources, targets = host_targets(contents), self.targets(pages)
        for at, (_, size) in self._layers.items():
            self.memory.copy(targets(at), sources(at), np.full(len(pages), size, np.uint64), batched=False)


def host_targets(contents: Sequence[memoryview]) -> Targets:
    """Where the parts of pages' contents lie in the host's memory."""
    starts = np.array([np.frombuffer(content, np.uint8).ctypes.data for content in contents], np.uint64)
    return lambda at: starts + np.uint64(at)


def joined(targets: Addresses, sources: Addresses, size: int) -> tuple[Addresses, Addresses, Addresses]:
    """Joins copies of ``size`` bytes each, given in any order: those that follow each other on both sides become one.

    Returns the targets, the sources and the sizes.
    """
    order = np.argsort(sources)
    targets, sources = targets[order], sources[order]
    apart = (np.diff(targets) != np.uint64(size)) | (np.diff(sources) != np.uint64(size))
    first = np.concatenate(([True], apart))[: len(targets)]
    starts = np.flatnonzero(first)
    counts = np.diff(np.append(starts, len(targets))).astype(np.uint64)
    return targets[first], sources[first], counts * np.uint64(size)


class PeerPool:
    """Another process's device pool.

    Args:
        exported: The result of :meth:`OwnPool.export`.
        memory: Opens it.

    Attributes:
        process: A file descriptor that can be read once that process has ended.

    Raises:
        OSError, RuntimeError, msgspec.DecodeError: It cannot be opened.
    """

    def __init__(self, exported: bytes, memory: DeviceMemory) -> None:
        there = msgspec.msgpack.decode(exported, type=Exported)
        number, namespace = there.process
        if namespace != _namespace():
            raise RuntimeError("the other worker's process is not seen from here")
        self.process = os.pidfd_open(number)
        self._memory = memory
        self._layers = there.layers
        self._opened: dict[bytes, int] = {}
        try:
            for layer in self._layers:
                if layer.handle not in self._opened:
                    self._opened[layer.handle] = memory.open(layer.handle)
        except BaseException:
            self.close()
            raise

    def read(self, pages: Sequence[int], targets: Targets, start: int, end: int) -> None:
        """Reads the layers that lie between two places of a page's content.

        Args:
            pages: Which pages.
            targets: Where their content goes here.
            start, end: The places.

        Raises:
            RuntimeError: The copies failed.
        """
        ids = np.array(pages, np.uint64)
        pieces = [
            joined(
                targets(layer.at),
                np.uint64(self._opened[layer.handle] + layer.first) + ids * np.uint64(layer.size),
                layer.size,
            )
            for layer in self._layers
            if start <= layer.at and layer.at + layer.size <= end
        ]
        if pieces:
            self._memory.copy(*(np.concatenate(each) for each in zip(*pieces, strict=True)))

    def close(self) -> None:
        """Gives its memory back."""
        for address in self._opened.values():
            self._memory.close(address)
        self._opened.clear()
        os.close(self.process)


def _namespace() -> int:
    """Names the namespace of processes that this one is in."""
    return Path("/proc/self/ns/pid").stat().st_ino
