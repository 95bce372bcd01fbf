"""Memory of this process in place of a GPU's, to try without one what reads a GPU of another process."""

from __future__ import annotations

import ctypes

from sapwood_kernels.memcpy_batch import Addresses


class ProcessMemory:
    """Implements :class:`~sapwood_worker.model.pools.peer_pages.DeviceMemory`: allocations are named by where they begin.

    Attributes:
        copied: Bytes that were copied.
        copies: In how many pieces.
        broken: Whether copies fail.
        open_now: Allocations that are open.
    """

    def __init__(self) -> None:
        self.copied = self.copies = 0
        self.broken = False
        self.open_now: list[int] = []

    def export(self, address: int) -> tuple[bytes, int]:
        return (address - 64).to_bytes(8, "little"), 64

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        if not address:
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA error 1")
        self.open_now.append(address)
        return address

    def close(self, address: int) -> None:
        self.open_now.remove(address)

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, batched: bool = True) -> None:
        if self.broken:
            raise RuntimeError("cuMemcpyAsync: CUDA error 719")
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
            self.copied += size
            self.copies += 1
