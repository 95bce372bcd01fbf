"""The embedded store: one file an object (``object_folder.py``), read and written with plain system calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood_worker.core.cache.storage.object_folder import ObjectFolder
from sapwood_worker.core.cache.storage.url import StorageUrl


def parse_url(url: StorageUrl) -> Callable[[], FileStorage]:
    """What opens ``file:///folder?size_gb=10``.

    Raises:
        ConfigError: It is something else.
    """
    url.expect(not url.host, "name an absolute folder: file:///folder")
    folder, size = url.take_folder("file:///folder")
    return lambda: FileStorage(folder, size)


class FileStorage:
    """Implements :class:`~sapwood_worker.core.cache.storage.backend.StorageBackend` in a folder.

    Args:
        folder: Made if it is not there.
        capacity: The most bytes of objects it is to hold.

    Raises:
        StorageError: The folder cannot be made.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = ObjectFolder(folder, capacity)

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Needs nothing: the kernel reads and writes any memory."""

    def exists(self, names: Sequence[str]) -> int:
        return self._folder.exists(names)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        with self._folder.reading(names, list(map(len, buffers))) as files:
            return [file is not None and _read(file, buffer) for file, buffer in zip(files, buffers, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """On an error none of the objects is there that was not there before."""
        with self._folder.writing(names, list(map(len, buffers))) as files:
            for file, buffer in zip(files, buffers, strict=True):
                if file is not None:
                    _write(file, buffer)
        return [True] * len(names)

    def remove(self, names: Sequence[str]) -> None:
        self._folder.remove(names)

    def clear(self, namespace: str) -> None:
        self._folder.clear(namespace)

    def close(self) -> None:
        """Closes nothing: no file stays open between calls."""


def _read(file: int, buffer: memoryview) -> bool:
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], done)
        if count == 0:
            return False
        done += count
    return True


def _write(file: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        done += os.write(file, buffer[done:])
