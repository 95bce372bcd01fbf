"""NIXL as the third tier: NVIDIA's transfer library moves host records to and from files or an object store, in place.

Two of its plugins are stores. ``POSIX`` moves bytes between memory and open files, many at once through the kernel's
asynchronous interface; Sapwood chooses the files' paths and removes files (:class:`ObjectFolder`), so a folder may be shared
with the ``file`` store. ``OBJ`` speaks S3; the bucket decides how long objects live.

One agent serves all threads: NIXL locks it. Its calls release the interpreter's lock while they work. A transfer is over only
when NIXL says so; no caller gives up earlier, since NIXL may write to its buffers until then. Otherwise a late answer could
overwrite a page that has a new owner.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sapwood_worker.core.cache.storage.backend import StorageError
from sapwood_worker.core.cache.storage.file import FileStorage
from sapwood_worker.core.cache.storage.url import StorageUrl

Plugin = Literal["POSIX", "OBJ"]
Target = tuple[int, int, int, str]
"""A descriptor of NIXL's: offset, bytes, file descriptor or number, object's name."""

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3
_ASKED_AT_ONCE = 16


class NixlAgent:
    """An agent with one plugin. Its calls may come from several threads at once.

    Args:
        plugin: The plugin.
        settings: Its settings.

    Raises:
        StorageError: NIXL is not installed, or its plugin does not start.
    """

    def __init__(self, plugin: Plugin, settings: Mapping[str, str]) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are raised as well
        try:
            nixl = nixl_library()
        except ImportError as error:
            raise StorageError(f"NIXL is not installed here ({error}): pip install 'sapwood[nixl]'") from error
        self._plugin = plugin
        self._name = f"sapwood-{uuid.uuid4().hex}"
        try:
            config = nixl.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            self._agent: Any = nixl.nixl_agent(self._name, config)
            self._agent.create_backend(plugin, dict(settings))
        except Exception as error:  # NIXL's errors have no class in common
            raise StorageError(f"NIXL's plugin {plugin} does not start: {error}") from error

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Registers the memory in which the buffers of all moves lie. Raises StorageError."""
        try:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM", [self._plugin])
        except Exception as error:
            raise StorageError(f"NIXL does not take {memory.nbytes} bytes of buffers: {error}") from error

    def move(
        self, way: Literal["READ", "WRITE"], targets: Sequence[Target], buffers: Sequence[memoryview]
    ) -> list[bool]:
        """Moves bytes between targets and buffers of their size. When it returns, every transfer is over.

        Returns:
            Whether each target was moved. Files are moved together, all or none.

        Raises:
            StorageError: No target was moved.
        """
        # OBJ ends a transfer at its first error while other objects may still arrive, so each object gets its own transfer.
        # POSIX waits for all files of a transfer.
        size, kind = (len(targets), "FILE") if self._plugin == "POSIX" else (1, "OBJ")
        errors: list[Exception] = []
        try:
            there = self._agent.register_memory(list(targets), kind, [self._plugin])
        except Exception as error:
            raise StorageError(f"NIXL: {error}") from error
        begun = [
            self._begin(way, kind, targets[start : start + size], buffers[start : start + size], errors)
            for start in range(0, len(targets), size)
        ]
        moved = [self._end(transfer, errors) for transfer in begun]
        try:
            self._agent.deregister_memory(there, [self._plugin])
        except Exception as error:
            errors.append(error)
        if not any(moved):
            raise StorageError(f"NIXL: {errors[0] if errors else 'nothing was moved'}")
        return [each for each in moved for _ in range(size)]

    def are_there(self, names: Sequence[str]) -> list[bool]:
        """Whether each object is in the object store.

        Raises:
            StorageError: The store does not answer.
        """
        try:
            found = self._agent.query_memory([(0, 0, 0, name) for name in names], self._plugin, "OBJ")
        except Exception as error:
            raise StorageError(f"NIXL: {error}") from error
        return [each is not None for each in found]

    def _begin(
        self,
        way: Literal["READ", "WRITE"],
        kind: str,
        targets: Sequence[Target],
        buffers: Sequence[memoryview],
        errors: list[Exception],
    ) -> Any:
        """Begins a transfer; returns None, and adds to ``errors``, if that failed."""
        agent = self._agent
        try:
            here = agent.get_xfer_descs([(_address(buffer), len(buffer), 0) for buffer in buffers], "DRAM")
            there = agent.get_xfer_descs([(offset, count, number) for offset, count, number, _ in targets], kind)
            transfer = agent.initialize_xfer(way, here, there, self._name, backends=[self._plugin])
        except Exception as error:
            errors.append(error)
            return None
        try:
            agent.transfer(transfer)
        except Exception as error:
            errors.append(error)
            self._release(transfer, errors)
            return None
        return transfer

    def _end(self, transfer: Any, errors: list[Exception]) -> bool:
        """Waits until a transfer is over; returns whether all of it was moved, and adds to ``errors`` if not."""
        if transfer is None:
            return False
        nap, state = _SHORTEST_NAP, "PROC"
        try:
            while (state := self._agent.check_xfer_state(transfer)) == "PROC":
                time.sleep(nap)
                nap = min(_LONGEST_NAP, 2 * nap)
        except Exception as error:
            errors.append(error)
            state = "ERR"
        self._release(transfer, errors)
        return state == "DONE"

    def _release(self, transfer: Any, errors: list[Exception]) -> None:
        try:
            self._agent.release_xfer_handle(transfer)
        except Exception as error:
            errors.append(error)


def parse_url(url: StorageUrl) -> Callable[[], NixlFileStorage | NixlObjectStorage]:
    """What opens ``nixl://posix/folder?size_gb=10`` or ``nixl://obj/bucket?endpoint=http://host:9000&region=us-east-1``.

    Raises:
        ConfigError: It is something else.
    """
    if url.host == "posix":
        folder, size = url.take_folder("nixl://posix/folder")
        return lambda: NixlFileStorage(folder, size)
    url.expect(url.host == "obj", "it must begin with nixl://posix/ or nixl://obj/")
    bucket, endpoint = url.path.strip("/"), url.take("endpoint")
    url.expect(bool(bucket) and "/" not in bucket, "name a bucket: nixl://obj/bucket")
    settings = {"region": url.take("region", "us-east-1")}
    if endpoint:
        scheme = endpoint.partition("://")[0]
        url.expect(scheme in ("http", "https"), "endpoint must be a URL: http://host:port")
        settings |= {"endpoint_override": endpoint, "scheme": scheme}
    return lambda: NixlObjectStorage(bucket, settings)


class NixlFileStorage(FileStorage):
    """Moves the bytes of a folder's files by NIXL's plugin POSIX.

    Raises:
        StorageError: The folder cannot be made, or NIXL is not installed.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        super().__init__(folder, capacity)
        self._agent = NixlAgent("POSIX", {})

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        self._agent.register(memory)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        with self._folder.reading(names, list(map(len, buffers))) as files:
            self._move("READ", files, buffers)
            return [file is not None for file in files]

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        with self._folder.writing(names, list(map(len, buffers))) as files:
            self._move("WRITE", files, buffers)
        return [True] * len(names)

    def _move(self, way: Literal["READ", "WRITE"], files: Sequence[int | None], buffers: Sequence[memoryview]) -> None:
        moved = [(file, buffer) for file, buffer in zip(files, buffers, strict=True) if file is not None]
        if moved:
            targets = [(0, len(buffer), file, "") for file, buffer in moved]
            self._agent.move(way, targets, [buffer for _, buffer in moved])


class NixlObjectStorage:
    """Implements :class:`~sapwood_worker.core.cache.storage.backend.StorageBackend` in a bucket, by NIXL's plugin OBJ.

    Args:
        bucket: The bucket, which must exist.
        settings: The plugin's settings, beyond the bucket. Credentials are found where AWS's own tools look for them.

    Raises:
        StorageError: NIXL is not there.
    """

    def __init__(self, bucket: str, settings: Mapping[str, str]) -> None:
        self._agent = NixlAgent("OBJ", {"bucket": bucket, **settings})
        self._numbers = itertools.count(1)

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        self._agent.register(memory)

    def exists(self, names: Sequence[str]) -> int:
        for start in range(0, len(names), _ASKED_AT_ONCE):
            there = self._agent.are_there(names[start : start + _ASKED_AT_ONCE])
            if not all(there):
                return start + there.index(False)
        return len(names)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """An object of another size than its buffer may count as read; the reader checks every byte anyway."""
        return self._agent.move("READ", self._targets(names, buffers), buffers)

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """An existing object is written again, with the same content."""
        return self._agent.move("WRITE", self._targets(names, buffers), buffers)

    def remove(self, names: Sequence[str]) -> None:
        """Removes nothing, since NIXL cannot: a bad object stays until the next put of its name."""

    def clear(self, namespace: str) -> None:
        """NIXL cannot list or remove objects.

        Raises:
            StorageError: Always.
        """
        raise StorageError("NIXL cannot remove objects; the bucket's own tools can, and its life cycle rules")

    def close(self) -> None:
        """Closes nothing: the agent ends with the last reference to it."""

    def _targets(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[Target]:
        """The objects' descriptors, each with a new number: NIXL identifies objects by it until the transfer has ended."""
        return [(0, len(buffer), next(self._numbers), name) for name, buffer in zip(names, buffers, strict=True)]


def nixl_library() -> Any:
    """NIXL's Python interface, from any of its packages that is installed: for host memory they work with any CUDA version.

    Raises:
        ImportError: No package is.
    """
    for package in ("nixl_cu12", "nixl_cu13"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{package}._api")
    return importlib.import_module("nixl._api")  # takes seconds: it imports torch to choose between them


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
