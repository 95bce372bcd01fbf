"""Memory that the processes of one machine share. The kernel frees it with the last of them, however they end."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import ConfigError


class SharedMemory:
    """Memory without a name (Linux's memfd), claimed as it is used.

    Args:
        descriptor: The file that stands for it; closed with this object.

    Attributes:
        path: By which other processes of this user open it while this object lives.
        identity: The file's device and inode: of all that is open on this machine only this memory has them.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        found = os.fstat(descriptor)
        self.identity = found.st_dev, found.st_ino
        weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(size: int) -> SharedMemory:
        """New memory of so many bytes.

        Raises:
            ConfigError: The system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--host-cache: processes share the host cache on Linux only")
        memory = SharedMemory(os.memfd_create("sapwood-host-cache", os.MFD_CLOEXEC))
        os.truncate(memory._descriptor, size)
        return memory

    @staticmethod
    def open(path: str) -> SharedMemory:
        """The memory that another process has created."""
        return SharedMemory(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def array(self) -> npt.NDArray[np.uint8]:
        """All of its bytes; they stay while the array does."""
        return np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8)
