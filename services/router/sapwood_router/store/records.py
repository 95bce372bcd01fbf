"""Records, and what a store does with them.

A record belongs to a tenant and has a kind and a key. ``parent`` and ``position`` order the records of one list: the items of a
conversation, the chunks of a file, the lines of a batch. They go with the record that they are of.

Bounds: beyond ``most`` kept records of a tenant, or ``most_bytes`` of all tenants together, those used least lately go first; of
bytes the tenant that has most gives way. A kept record that nobody has used for ``seconds`` goes, too. Files and batches are not
dropped for room: the code that adds them asks for :meth:`Store.total` before, and refuses. Nor are sessions, which expire.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

KEPT, FILES, SESSIONS = "kept", "files", "sessions"
"""Groups of kinds: those that make room for others, and those that do not."""
GROUPS = {
    "response": KEPT,
    "conversation": KEPT,
    "item": KEPT,
    "file": FILES,
    "chunk": FILES,
    "batch": FILES,
    "line": FILES,
    "job": FILES,
    "rerun": FILES,
    "session": SESSIONS,
}
"""All kinds. A ``job`` is a batch that is not finished, a ``rerun`` the request of a background response that is not."""
CHILDREN = {"conversation": "item", "file": "chunk", "batch": "line"}
"""Kinds whose records have others below them, and the kind of those."""
PARENTS = {below: kind for kind, below in CHILDREN.items()}
"""Kinds whose records are below others, and the kind of those. None is there without its parent: nothing would make it go."""
COUNTED = frozenset(GROUPS) - frozenset(CHILDREN.values()) - {"job", "rerun"}
"""Kinds that count as records of their tenant; of the others only the bytes count."""
OVERHEAD = 512
"""Bytes that count for each record beside its body."""
MOST_AT_ONCE = 64 * 1024 * 1024
"""Bytes of bodies after which a store gives no further record in one call. No request takes a conversation of as many."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class Record(msgspec.Struct, frozen=True):
    """One record.

    Attributes:
        kind: One of ``GROUPS``.
        tenant: Whose it is; "" where nothing tells tenants apart.
        key: Unique within the kind and the tenant.
        body: The content.
        parent: The key of the record that it is below, or that it continues.
        position: Its place among records of one parent; at most 53 bits.
        expires: When it goes, whatever its use: seconds since 1970; 0: never.
        version: How often it was replaced.
    """

    kind: str
    tenant: str
    key: str
    body: bytes
    parent: str = ""
    position: int = 0
    expires: int = 0
    version: int = 0

    @property
    def size(self) -> int:
        """Bytes that count for it."""
        return len(self.body) + OVERHEAD


def can_be_key(text: str) -> bool:
    """Whether a record can have such a key, or such a parent: Postgres has no NUL in its texts, and UTF-8 no surrogates."""
    return "\0" not in text and not _SURROGATES.search(text)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept, and for how long.

    Attributes:
        most: Kept records of a tenant.
        most_bytes: Bytes of all tenants' kept records.
        seconds: How long a kept record lives unused; 0: without end.
    """

    most: int
    most_bytes: int
    seconds: int = 0


class Store(Protocol):
    """Keeps records. All methods raise ``UnavailableError`` if the store does not answer, is full or is closed."""

    async def put(self, records: Sequence[Record]) -> bool:
        """Writes records, all or none, in the place of others with their keys. One whose parent is not there, nor before it
        among these, is left out; returns whether none was."""
        ...

    async def add(self, record: Record) -> bool:
        """Writes a record unless there is one with its key, or its parent is not there; returns whether it did."""
        ...

    async def swap(self, record: Record) -> bool:
        """Replaces a record whose version is still ``record.version``, which grows by one, unless its parent is not there;
        returns whether it did."""
        ...

    async def get(self, kind: str, tenant: str, key: str) -> Record | None:
        """A record."""
        ...

    async def chain(self, kind: str, tenant: str, key: str, most: int) -> list[Record]:
        """A record, the one that is its ``parent``, and so on, at most so many; all count as used. Ends where one is missing, and
        where the bodies have ``MOST_AT_ONCE`` bytes."""
        ...

    async def below(
        self,
        kind: str,
        tenant: str,
        parent: str,
        *,
        after: tuple[int, str] | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Record]:
        """Records of a parent by position and key, those after a place. Fewer than ``limit`` are not all: the bodies may have
        ``MOST_AT_ONCE`` bytes. None: there are no more."""
        ...

    async def positions(self, kind: str, tenant: str, parent: str) -> list[int]:
        """The positions of a parent's records, in order."""
        ...

    async def every(self, kind: str, *, after: tuple[str, str] | None = None, limit: int = 100) -> list[Record]:
        """Records of a kind of all tenants, by tenant and key."""
        ...

    async def delete(self, kind: str, tenant: str, key: str) -> bool:
        """Deletes a record and those below it; returns whether there was one."""
        ...

    async def empty(self, kind: str, tenant: str, parent: str) -> None:
        """Deletes the records of a kind below a parent."""
        ...

    async def forget(self, tenant: str) -> int:
        """Deletes all of a tenant's records; returns how many there were."""
        ...

    async def total(self, tenant: str, group: str) -> tuple[int, int]:
        """How many records of a group a tenant has, and their bytes."""
        ...

    async def sweep(self) -> None:
        """Deletes what has expired. To be called now and then."""
        ...

    async def close(self) -> None:
        """Ends it; what was written stays."""
        ...
