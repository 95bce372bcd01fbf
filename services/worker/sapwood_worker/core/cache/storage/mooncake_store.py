"""Mooncake Store as the third tier: pages in the memory of other machines, by RDMA or TCP, without a copy on this side.

The engine consists of a master process that knows where objects are, and clients that may each lend it memory. Objects in a
client's memory are lost when the client ends, so a cluster that should start warm has clients that only lend memory
(docs/kv-cache.md).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from sapwood_common.python_process import python_command, python_environment
from sapwood_worker.core.cache.storage.backend import StorageError
from sapwood_worker.core.cache.storage.url import StorageUrl

_CONNECT_SECONDS = 2.0
_SETUP_SECONDS = 20.0
_BUFFER_BYTES = 16 << 20
"""Bytes of the client's own buffer, for calls without registered memory; Sapwood's calls all use registered memory."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """How to reach the store.

    Attributes:
        master: host:port of mooncake_master.
        metadata: URL of the metadata server.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas; empty: all.
        host: Address by which the other clients reach this one; empty: the local address of its connection to the master.
        lend_bytes: Memory that this client lends to the store.
    """

    master: str
    metadata: str
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    lend_bytes: int = 0


def parse_url(url: StorageUrl) -> Callable[[], MooncakeStorage]:
    """What opens ``mooncake://master:50051?metadata=http://host:8080/metadata&protocol=tcp&devices=&host=&lend_gb=0``.

    Raises:
        ConfigError: It is something else.
    """
    options = MooncakeOptions(
        master=url.host,
        metadata=url.take("metadata"),
        protocol=url.take("protocol", "tcp"),
        devices=url.take("devices"),
        host=url.take("host"),
        lend_bytes=url.take_bytes("lend_gb", "0"),
    )
    url.expect(bool(url.host), "name the master: mooncake://host:port")
    url.expect(bool(options.metadata), "metadata is missing: the URL of the metadata server")
    url.expect(options.protocol in ("tcp", "rdma"), "protocol must be tcp or rdma")
    return lambda: MooncakeStorage(options)


class MooncakeStorage:
    """Implements :class:`~sapwood_worker.core.cache.storage.backend.StorageBackend`.

    Args:
        options: How to reach it.
        patience: Seconds within which the store must take a client.

    Raises:
        StorageError: The package is not installed, or the store does not answer.
    """

    def __init__(self, options: MooncakeOptions, patience: float = _SETUP_SECONDS) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # below that it logs every connection
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise StorageError(
                f"Mooncake is not installed here ({error}): pip install 'sapwood[mooncake]', and libibverbs1, libcurl4, libnuma1"
            ) from error
        # Without an answer the engine would try for minutes, holding the interpreter's lock all the while.
        own_address = _expect_answer(options.master)
        metadata = urlsplit(options.metadata)
        if metadata.scheme in ("http", "https"):
            _expect_answer(f"{metadata.hostname}:{metadata.port or (443 if metadata.scheme == 'https' else 80)}")
        _try_out(options, own_address, patience)
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            options.host or own_address,
            options.metadata,
            options.lend_bytes,
            _BUFFER_BYTES,
            options.protocol,
            options.devices,
            options.master,
        )
        if code != 0:
            raise StorageError(f"the Mooncake store at {options.master} does not take us: error {code}")

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        code = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code != 0:
            raise StorageError(f"Mooncake does not take {memory.nbytes} bytes of buffers: error {code}")

    def exists(self, names: Sequence[str]) -> int:
        answers = self._store.batch_is_exist(list(names))
        if any(answer < 0 for answer in answers):
            raise StorageError(f"Mooncake: error {min(answers)}")
        return next((count for count, answer in enumerate(answers) if answer != 1), len(names))

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        sizes = [len(buffer) for buffer in buffers]
        read = self._store.batch_get_into(list(names), _addresses(buffers), sizes)
        if all(count < 0 and count != _NOT_FOUND for count in read):
            raise StorageError(f"Mooncake: error {min(read)}")
        return [count == size for count, size in zip(read, sizes, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        sizes = [len(buffer) for buffer in buffers]
        codes = self._store.batch_put_from(list(names), _addresses(buffers), sizes)
        if all(code < 0 for code in codes):
            raise StorageError(f"Mooncake: error {min(codes)}")
        return [code == 0 for code in codes]

    def remove(self, names: Sequence[str]) -> None:
        """Removes by force, because an object that was just read is leased and would stay otherwise."""
        self._store.batch_remove(list(names), True)

    def clear(self, namespace: str) -> None:
        code = self._store.remove_by_regex(f"^{namespace}/.*", True)
        if code < 0:
            raise StorageError(f"Mooncake: error {code}")

    def close(self) -> None:
        self._store.close()


_NOT_FOUND = -704


def _expect_answer(address: str) -> str:
    """The local address of a connection to ``address``. Raises StorageError if nobody answers there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:
        raise StorageError(f"nobody answers at {address}: {error}") from error


_TRIAL = """
import json, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, devices, master = json.load(sys.stdin)
store = MooncakeDistributedStore()
code = store.setup(host, metadata, 0, 1 << 20, protocol, devices, master)
store.close()
sys.exit(min(255, abs(code)))
"""


def _try_out(options: MooncakeOptions, own_address: str, patience: float) -> None:
    """Tries whether the store accepts a client, in a separate process that may hang.

    Raises:
        StorageError: It does not within ``patience`` seconds.
    """
    arguments = (own_address, options.metadata, options.protocol, options.devices, options.master)
    try:
        code = subprocess.run(
            python_command("-c", _TRIAL), env=python_environment(), input=json.dumps(arguments).encode(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=patience, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"the Mooncake store at {options.master} does not answer") from error
    if code != 0:
        raise StorageError(f"the Mooncake store at {options.master} does not take us: error {code}")


def _addresses(buffers: Sequence[memoryview]) -> list[int]:
    return [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
