"""The header of a host record. A reader checks the record by it.

The header names the object (page hash, proof of the tokens, namespace, length) and ends in a checksum over the header and the
content. A record that was cut short, changed, mixed up, or written by another model, another layout or
another tenant does not pass :func:`verify`. O(bytes), at the speed of xxh3.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import xxhash

from sapwood_worker.core.cache.host import HostPage
from sapwood_worker.core.cache.page_key import PageKey
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool

PAGE_FORMAT = 1
"""The version of a page's byte format for one model, dtype and layout. A version of Sapwood that changes the format (another
order, other rotary positions, scaled keys) raises this number: it then finds no pages of earlier versions, in stores or at
workers. ``tests/worker/tiers/test_page_format.py`` fails if that was forgotten."""
_MAGIC = b"SAPWKV%02d"
_FIELDS = struct.Struct("<8s16s32s16sQ")
_CHECKSUM_BYTES = 16


def page_namespace(identity: str, page_size: int, object_bytes: int) -> str:
    """The namespace of pages in stores.

    Args:
        identity: Everything besides tokens that pages depend on, from their runner.
        page_size: Tokens in a page.
        object_bytes: Bytes of a page's content.
    """
    return namespace_of(PAGE_FORMAT, identity, page_size, object_bytes)


def handoff_namespace(identity: str, page_size: int, object_bytes: int) -> str:
    """The namespace of pages in KV transfers between workers."""
    return namespace_of(f"handoff {PAGE_FORMAT}", identity, page_size, object_bytes)


def namespace_of(*parts: str | int) -> str:
    """A namespace's name, 32 hexadecimal digits: equal only if all parts are (model, dtype, layout, shard and so on)."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def object_name(namespace: str, key: PageKey) -> str:
    """The name of a page's object in the store."""
    return f"{namespace}/{key.hash.hex()}"


def seal(record: memoryview, key: PageKey, namespace: str) -> None:
    """Writes a record's header for its present content."""
    record[:HEADER_BYTES] = header_of(record, key, namespace)


def header_of(record: memoryview, key: PageKey, namespace: str) -> bytes:
    """The header for the content that is in a record now; the record stays as it is."""
    fields = _fields(record, key, namespace)
    return (fields + _checksum(record, fields)).ljust(HEADER_BYTES, b"\0")


class Sealer:
    """Makes a record's header while its content arrives.

    Args:
        record: The record.
        key, namespace: As for :func:`header_of`.
    """

    def __init__(self, record: memoryview, key: PageKey, namespace: str) -> None:
        self._record = record
        self._fields = _fields(record, key, namespace)
        self._state = xxhash.xxh3_128(self._fields)
        self._taken = HEADER_BYTES
        self._there: dict[int, int] = {}

    def take(self, start: int, end: int) -> memoryview:
        """Takes these bytes of the content, in any order; returns them."""
        self._there[HEADER_BYTES + start] = HEADER_BYTES + end
        while (following := self._there.pop(self._taken, None)) is not None:
            self._state.update(self._record[self._taken : following])
            self._taken = following
        return self._record[HEADER_BYTES + start : HEADER_BYTES + end]

    def header(self) -> bytes:
        """The header for the content, after all of it was taken."""
        assert self._taken == len(self._record) and not self._there, "not all was taken"
        return (self._fields + self._state.digest()).ljust(HEADER_BYTES, b"\0")


def verify(record: memoryview, key: PageKey, namespace: str) -> bool:
    """Whether a record is exactly what was sealed for this key in this namespace."""
    fields = _fields(record, key, namespace)
    end = len(fields)
    return record[:end] == fields and record[end : end + _CHECKSUM_BYTES] == _checksum(record, fields)


def take_good(
    pool: HostPool, batch: Sequence[HostPage], read: Sequence[bool], records: Sequence[memoryview], namespace: str
) -> list[bool]:
    """Turns the objects that were read and pass their check into pages; returns which ones passed.

    Args:
        pool: The pages' memory.
        batch: The pages.
        read: For each page, whether an object was read.
        records: What.
        namespace: Of all.
    """
    good = [
        there and verify(record, entry.key, namespace)
        for there, record, entry in zip(read, records, batch, strict=True)
    ]
    pages, objects = [], []
    for entry, record, fine in zip(batch, records, good, strict=True):
        if fine:
            pages.append(entry.page)
            objects.append(record)
    if pages:
        pool.unpack(pages, objects)
    return good


def _fields(record: memoryview, key: PageKey, namespace: str) -> bytes:
    return _FIELDS.pack(_MAGIC % PAGE_FORMAT, key.hash, key.proof, bytes.fromhex(namespace), len(record))


def _checksum(record: memoryview, fields: bytes) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(record[HEADER_BYTES:])
    return state.digest()
