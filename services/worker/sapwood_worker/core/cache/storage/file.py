"""The embedded store: one file an object, read and written with plain system calls."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood_worker.core.cache.storage.backend import StorageError
from sapwood_worker.core.cache.storage.url import StorageUrl

# Objects as files in a folder that any number of processes and machines may share. The backend that uses it moves the
# bytes.
# An object is written to a temporary file and renamed, so that a reader sees all of it or nothing. A file's modification time
# is the time of the object's last use. When the files outgrow the cap, one process at a time (by a lock file) removes the
# least recently used ones down to nine tenths of the cap. Each process counts the bytes that it writes, and looks at the whole
# folder whenever it has written a sixteenth of the cap. So n processes exceed the cap by n sixteenths at most.
# If the path of an object holds anything but a readable file of its size, writing the object replaces that. Missing folders
# are made again.
#
# Complexity: one or two file operations an object, besides its bytes; a look at the folder is O(objects).


_KEEP = 0.9
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO, errno.ELOOP)
"""The system's errors for one path that is no readable file; any other error concerns the whole folder."""
_TOUCH_SECONDS = 60.0
_STALE_SECONDS = 3600.0


class ObjectFolder:
    """The folder. May be called from several threads at once.

    Args:
        folder: The folder; made if it does not exist.
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
                self._make_folder(each)
            self._total = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise StorageError(f"cannot use the folder {folder}: {error}") from error

    def exists(self, names: Sequence[str]) -> int:
        """How many of the names have files, up to the first missing one."""
        return next((count for count, name in enumerate(names) if not self._path(name).is_file()), len(names))

    @contextlib.contextmanager
    def reading(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[int | None]]:
        """Opens objects for reading within the block; None: there is no object of that size.

        Raises:
            StorageError: The folder does not answer, or an OSError ended the block.
        """
        files: list[int | None] = []
        try:
            files += (self._open(self._path(name), size) for name, size in zip(names, sizes, strict=True))
            yield files
        except OSError as error:
            raise StorageError(str(error)) from error
        finally:
            for file in files:
                if file is not None:
                    os.close(file)

    @contextlib.contextmanager
    def writing(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[int | None]]:
        """Opens new objects for writing within the block; None: the object exists already.

        If the block ends without an error, all of the objects exist afterwards, else none of the new ones.

        Raises:
            StorageError: The folder does not answer or is full, or an OSError ended the block.
        """
        new: list[tuple[Path, Path, int] | None] = []
        try:
            try:
                for name, size in zip(names, sizes, strict=True):
                    new.append(self._create(self._path(name), size))
                yield [None if each is None else each[2] for each in new]
            finally:
                for each in new:
                    if each is not None:
                        os.close(each[2])
            for each in new:
                if each is not None:
                    self._make_folder(each[1].parent)
                    each[0].replace(each[1])
            self._account(sum(size for each, size in zip(new, sizes, strict=True) if each is not None))
        except BaseException as error:
            for each in new:
                if each is not None:
                    each[0].unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StorageError(str(error)) from error
            raise

    def remove(self, names: Sequence[str]) -> None:
        """Removes the objects that are there."""
        for name in names:
            with contextlib.suppress(OSError):
                _remove(self._path(name))

    def clear(self, namespace: str) -> None:
        """Removes all objects whose name begins with ``namespace/``."""
        shutil.rmtree(self._objects / namespace, ignore_errors=True)

    def _path(self, name: str) -> Path:
        namespace, _, key = name.rpartition("/")
        return self._objects / namespace / key[:2] / key

    def _open(self, path: Path, size: int) -> int | None:
        """A descriptor of an object; None: there is no readable file of that size."""
        try:
            # A pipe in the object's place must not keep us waiting.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            return None
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            os.close(file)
            return None
        if time.time() - status.st_mtime > _TOUCH_SECONDS:
            with contextlib.suppress(OSError):  # another user's, or gone by now
                os.utime(path)
        return file

    def _create(self, path: Path, size: int) -> tuple[Path, Path, int] | None:
        """A new file: its path, the path it will get, its descriptor; None: the object is there already."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size == size and os.access(path, os.R_OK):
                return None
            if stat.S_ISDIR(status.st_mode):  # a file does not replace it
                shutil.rmtree(path)
        beside = self._writing / uuid.uuid4().hex
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return beside, path, os.open(beside, flags, 0o666)
        except (FileNotFoundError, NotADirectoryError):
            self._make_folder(self._writing)
            return beside, path, os.open(beside, flags, 0o666)

    def _make_folder(self, path: Path) -> None:
        """Makes a folder and its parents within the store's folder; removes a file that is in the way."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            for each in (*reversed(path.parents), path):
                if self._folder in each.parents and not each.is_dir():
                    each.unlink(missing_ok=True)
            path.mkdir(parents=True, exist_ok=True)

    def _account(self, written: int) -> None:
        with self._guard:
            self._total += written
            self._unseen += written
            if self._total <= self._capacity and self._unseen < self._capacity // 16:
                return
            self._unseen = 0
            self._make_folder(self._writing)
            with (self._folder / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another process is making room
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


def _remove(path: Path) -> None:
    """Removes what is at a path. Raises OSError if it stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
        folder: The folder; made if it does not exist.
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
        """After an error no new object exists."""
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
