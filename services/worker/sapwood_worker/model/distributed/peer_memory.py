"""Memory of a GPU that the processes of the host's other GPUs read and write: CUDA IPC, by the driver's own calls.

torch's allocator would share whole blocks of its own. Memory of our own keeps out of its way, and out of the trials that measure
what memory is left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from sapwood_worker.model.distributed.group import Group

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class PeerMemory:
    """A region of each rank's GPU, zero at first, which lasts as long as the process; made by all ranks together.

    Args:
        group: The ranks, on one host; exchanges where the memory is.
        num_bytes: Bytes of a region.
        device: This rank's GPU, with its index.

    Attributes:
        addresses: Of each rank's region, as this process sees them.

    Raises:
        RuntimeError: Not all ranks can reach all regions; said by each rank.
    """

    def __init__(self, group: Group, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # makes the device's context the current one
        index = device.index
        handle, address, said = b"", ctypes.c_uint64(), ""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            torch.cuda.synchronize(device)
            own = _Handle()
            self._call("cuIpcGetMemHandle", ctypes.byref(own), address)
            handle = bytes(own.bytes)
        except (OSError, AttributeError, RuntimeError) as error:
            said = str(error)
        found = group.exchange((handle, index, said), tuple[bytes, int, str])
        _raise_first([fault for _, _, fault in found])
        self.addresses: list[int] = []
        try:
            for rank, (theirs, there, _) in enumerate(found):
                self.addresses.append(address.value if rank == group.rank else self._open(theirs, index, there))
        except RuntimeError as error:
            said = str(error)
        _raise_first(group.exchange(said, str))

    def _open(self, handle: bytes, here: int, there: int) -> int:
        """Another rank's region."""
        if here != there:
            native = ctypes.c_int()
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(native), _NATIVE_ATOMICS, here, there)
            if not native.value:
                raise RuntimeError(f"GPUs {here} and {there} have no link that signals can be written over")
        address = ctypes.c_uint64()
        content = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), content, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")


def _raise_first(said: Sequence[str]) -> None:
    for rank, fault in enumerate(said):
        if fault:
            raise RuntimeError(f"rank {rank}: {fault}")
