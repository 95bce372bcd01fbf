"""Files in a store: the facts of each, and its content in chunks, which are written and read one at a time.

A file that is being written expires within a day; it stays once it is finished. So an upload that a client or a router breaks off
leaves nothing for long. Memory: one chunk for each file that is written or read.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from sapwood_router.store.records import FILES, Record, Store

_CHUNK = 256 * 1024
_UNFINISHED_SECONDS = 86400
_READ_AT_ONCE = 500
MOST_FILE_BYTES = 512 * 1024 * 1024
"""Bytes of one file, as with OpenAI."""


class FileObject(msgspec.Struct, omit_defaults=True):
    """A file, as clients see it. ``expires_at``: seconds since 1970; None: it stays."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: int | None = None
    object: str = msgspec.field(default_factory=lambda: "file")


class FileStore:
    """The files of all tenants.

    Args:
        store: Where.
        most_bytes: Bytes that a tenant's files and batches may have; 0: there are none.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self._most_bytes = most_bytes

    async def begin(
        self, tenant: str, filename: str, purpose: str, *, file_id: str = "", bounded: bool = True
    ) -> FileWriter:
        """Begins to write a file.

        Args:
            tenant: Whose.
            filename: Its name.
            purpose: What it is for.
            file_id: Its id; an unfinished file of that id is written again. "": a new one.
            bounded: Whether it must fit into what the tenant may have.

        Raises:
            ResourceExhaustedError: The tenant has no room left.
        """
        made = FileObject(
            file_id or f"file-{secrets.token_hex(16)}", 0, int(time.time()), filename, purpose, "uploaded"
        )
        if bounded:
            await self.check_room(tenant, 1)
        if file_id:
            await self._store.delete("file", tenant, file_id)
        unfinished = int(time.time()) + _UNFINISHED_SECONDS
        await self._store.put([_record(tenant, made, unfinished)])
        return FileWriter(self if bounded else None, self._store, tenant, made)

    async def check_room(self, tenant: str, more: int) -> None:
        """Refuses what is more than the tenant may have.

        Raises:
            ResourceExhaustedError: There is no room.
        """
        _, used = await self._store.total(tenant, FILES)
        if used + more > self._most_bytes or not self._most_bytes:
            raise ResourceExhaustedError(f"files and batches may have {self._most_bytes} bytes: delete some")

    async def get(self, tenant: str, file_id: str, field: str | None = None) -> FileObject:
        """A finished file.

        Raises:
            NotFoundError: There is none.
        """
        found = await self._store.get("file", tenant, file_id)
        known = None if found is None else msgspec.json.decode(found.body, type=FileObject)
        if known is None or known.status != "processed":
            raise NotFoundError(f"there is no file {file_id[:100]!r} here, or no longer", field=field)
        return known

    async def page(
        self, tenant: str, limit: int, *, newest_first: bool, after: str | None, purpose: str | None
    ) -> list[FileObject] | None:
        """Some finished files in order of their making; None: there is none that is called ``after``.

        Args:
            tenant: Whose.
            limit: Most of them.
            newest_first: The order.
            after: The file before them; None: they are the first.
            purpose: What they are for; None: anything.
        """
        place: tuple[int, str] | None = None
        if after is not None:
            record = await self._store.get("file", tenant, after)
            if record is None:
                return None
            place = record.position, record.key
        found: list[FileObject] = []
        while len(found) < limit:
            records = await self._store.below(
                "file", tenant, "", after=place, limit=_READ_AT_ONCE, newest_first=newest_first
            )
            known = [msgspec.json.decode(record.body, type=FileObject) for record in records]
            found += [each for each in known if each.status == "processed" and purpose in (None, each.purpose)]
            if not records:
                break
            place = records[-1].position, records[-1].key
        return found[:limit]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Forgets a file.

        Raises:
            NotFoundError: There is none.
        """
        await self.get(tenant, file_id)
        await self._store.delete("file", tenant, file_id)

    async def read(self, tenant: str, file_id: str) -> AsyncIterator[bytes]:
        """The content, a chunk at a time."""
        after: tuple[int, str] | None = None
        while chunks := await self._store.below("chunk", tenant, file_id, after=after, limit=1):
            yield chunks[0].body
            after = chunks[0].position, chunks[0].key

    async def lines(self, tenant: str, file_id: str, longest: int) -> AsyncIterator[tuple[int, bytes]]:
        """The lines that are not blank, with their numbers from 1 on.

        Raises:
            InvalidArgumentError: A line has more bytes than ``longest``; the rest is not read.
        """
        rest, number = b"", 0
        async for chunk in self.read(tenant, file_id):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield number, line
            if len(rest) > longest:
                raise InvalidArgumentError(f"line {number + 1} has more than {longest} bytes")
        if rest.strip():
            yield number + 1, rest


class FileWriter:
    """A file that is being written. End it with :meth:`finish` or :meth:`discard`.

    Args:
        files: The files, among which it must fit; None: it need not.
        store: Where.
        tenant: Whose.
        made: The file.
    """

    def __init__(self, files: FileStore | None, store: Store, tenant: str, made: FileObject) -> None:
        self._files = files
        self._store = store
        self._tenant = tenant
        self._made = made
        self._buffer = bytearray()
        self._chunks = 0

    def describe(self, purpose: str, expires_at: int | None) -> None:
        """Says what the file is for, and when it goes, before it is finished."""
        self._made.purpose, self._made.expires_at = purpose, expires_at

    async def write(self, data: bytes) -> None:
        """Adds to the content.

        Raises:
            ResourceExhaustedError: The file or the tenant's files are too large.
            NotFoundError: The file is gone: it has taken more than a day, or all of the tenant's was forgotten.
        """
        self._buffer += data
        self._made.bytes += len(data)
        if self._files is not None and self._made.bytes > MOST_FILE_BYTES:
            raise ResourceExhaustedError(f"a file may have {MOST_FILE_BYTES} bytes")
        while len(self._buffer) >= _CHUNK:
            if self._files is not None:
                await self._files.check_room(self._tenant, _CHUNK)
            await self._put(bytes(self._buffer[:_CHUNK]))
            del self._buffer[:_CHUNK]

    async def finish(self) -> FileObject:
        """Ends the content; from now on the file is there.

        Raises:
            NotFoundError: As :meth:`write`.
        """
        if self._buffer:
            await self._put(bytes(self._buffer))
        self._made.status = "processed"
        record = _record(self._tenant, self._made, self._made.expires_at or 0)
        if not await self._store.swap(record) and await self._store.get("file", self._tenant, self._made.id) is None:
            raise _gone(self._made.id)
        return self._made

    async def discard(self) -> None:
        """Gives it up."""
        await self._store.delete("file", self._tenant, self._made.id)

    async def _put(self, chunk: bytes) -> None:
        key = f"{self._made.id}/{self._chunks:08x}"
        if not await self._store.put([Record("chunk", self._tenant, key, chunk, self._made.id, self._chunks)]):
            raise _gone(self._made.id)
        self._chunks += 1


def _gone(file_id: str) -> NotFoundError:
    return NotFoundError(f"the file {file_id} was deleted before it had come to its end")


def _record(tenant: str, made: FileObject, expires: int) -> Record:
    body = msgspec.json.encode(made)
    return Record("file", tenant, made.id, body, position=made.created_at, expires=expires)
