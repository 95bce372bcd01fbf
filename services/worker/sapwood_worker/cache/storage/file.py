"""The embedded store: one file an object, in a folder that any number of processes and machines may share.

An object is written beside its place and renamed, so that a reader sees all of it or nothing. Which object is used how
recently is its file's modification time. When the files outgrow the cap, one process at a time (a lock file sees to it)
removes the least recently used ones down to nine tenths of the cap. Each process counts what it writes itself and looks
at the whole folder each time it has written a sixteenth of the cap: n processes exceed it by n sixteenths at most.

Complexity: get, put and exists one or two file operations an object; a look at the folder is O(objects).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood_worker.cache.storage.backend import StorageError

_KEEP = 0.9
_TOUCH_SECONDS = 60.0
_STALE_SECONDS = 3600.0


class FileStorage:
    """Implements :class:`~sapwood_worker.cache.storage.backend.StorageBackend` in a folder.

    Args:
        folder: Made if it is not there.
        capacity: The most bytes of objects it is to hold.

    Raises:
        StorageError: The folder cannot be made.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = folder
        self._objects = folder / "objects"
        self._writing = folder / "writing"
        self._capacity = capacity
        self._guard = threading.Lock()
        self._unseen = 0
        try:
            for each in (self._objects, self._writing):
                each.mkdir(parents=True, exist_ok=True)
            self._total = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise StorageError(f"cannot use the folder {folder}: {error}") from error

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """See StorageBackend."""

    def exists(self, names: Sequence[str]) -> int:
        """See StorageBackend."""
        for count, name in enumerate(names):
            if not self._path(name).is_file():
                return count
        return len(names)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See StorageBackend."""
        try:
            return [self._read(self._path(name), buffer) for name, buffer in zip(names, buffers, strict=True)]
        except OSError as error:
            raise StorageError(str(error)) from error

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See StorageBackend."""
        try:
            written = sum(self._write(self._path(name), buffer) for name, buffer in zip(names, buffers, strict=True))
            self._account(written)
        except OSError as error:
            raise StorageError(str(error)) from error
        return [True] * len(names)

    def remove(self, names: Sequence[str]) -> None:
        """See StorageBackend."""
        for name in names:
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def clear(self, namespace: str) -> None:
        """See StorageBackend."""
        shutil.rmtree(self._objects / namespace, ignore_errors=True)

    def close(self) -> None:
        """See StorageBackend."""

    def _path(self, name: str) -> Path:
        namespace, _, key = name.rpartition("/")
        return self._objects / namespace / key[:2] / key

    def _read(self, path: Path, buffer: memoryview) -> bool:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(file)
            if status.st_size != len(buffer):
                return False
            done = 0
            while done < len(buffer):
                count = os.preadv(file, [buffer[done:]], done)
                if count == 0:
                    return False
                done += count
            if time.time() - status.st_mtime > _TOUCH_SECONDS:
                with contextlib.suppress(OSError):  # it may belong to somebody else, or be gone by now
                    os.utime(path)
        finally:
            os.close(file)
        return True

    def _write(self, path: Path, buffer: memoryview) -> int:
        """Writes one object, unless it is there; returns how many bytes that took."""
        if path.is_file():
            return 0
        beside = self._writing / uuid.uuid4().hex
        try:
            with beside.open("wb", buffering=0) as file:
                done = 0
                while done < len(buffer):
                    done += file.write(buffer[done:]) or 0
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        return len(buffer)

    def _account(self, written: int) -> None:
        with self._guard:
            self._total += written
            self._unseen += written
            if self._total <= self._capacity and self._unseen < self._capacity // 16:
                return
            self._unseen = 0
            with (self._folder / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # somebody else makes room just now
                    return
                self._total = self._make_room()

    def _make_room(self) -> int:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        if total > self._capacity:
            for _, size, path in files:
                if total <= _KEEP * self._capacity:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 -- a string here, as scandir gives it
                total -= size
        for left in os.scandir(self._writing):  # of processes that were killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    os.unlink(left.path)  # noqa: PTH108
        return total

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Modification time, size and path of every object."""
        folders = [str(self._objects)]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime, status.st_size, entry.path
            except FileNotFoundError:  # removed meanwhile
                continue
