"""Many copies by the copy engines in one call of the driver: ``cuMemcpyBatchAsync`` of CUDA 12.8 and later."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, the first field of CUmemcpyAttributes
_ATTRIBUTES_BYTES = 64  # the structure has 24; hints and flags stay zero


class MemcpyBatch:
    """The driver's call.

    Raises:
        OSError: There is no CUDA driver.
        AttributeError: The driver is older than the call.
    """

    def __init__(self) -> None:
        self._call: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
        self._call.restype = ctypes.c_int
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
        self._attributes = np.zeros(_ATTRIBUTES_BYTES // 4, np.uint32)
        self._attributes[0] = _IN_STREAM_ORDER
        self._first = np.zeros(1, np.uint64)

    def copy(self, targets: Addresses, sources: Addresses, size: int | Addresses, stream: int) -> None:
        """Queues copies from each source to its target; their order is undefined.

        Args:
            targets: uint64 [N]: addresses of device memory or of pinned host memory.
            sources: uint64 [N]: addresses of device memory or of pinned host memory.
            size: Bytes of each copy: one number for all, or uint64 [N].
            stream: Handle of a stream of the current device, not the default one.

        Raises:
            RuntimeError: The driver reports an error.
        """
        if not len(targets):
            return
        sizes = np.ascontiguousarray(np.broadcast_to(np.asarray(size, np.uint64), targets.shape))
        failed = np.zeros(1, np.uint64)
        targets, sources = np.ascontiguousarray(targets, np.uint64), np.ascontiguousarray(sources, np.uint64)
        error = self._call(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(targets),
            self._attributes.ctypes.data, self._first.ctypes.data, 1, failed.ctypes.data, stream,
        )  # fmt: skip
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {error} at copy {int(failed[0])} of {len(targets)}")
