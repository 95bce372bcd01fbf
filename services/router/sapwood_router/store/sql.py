"""A store's operations in SQL, for SQLite and Postgres alike.

An operation is a generator: it yields statements, is given their rows, and returns its result. A driver runs all of it in one
transaction, in a thread (:mod:`sqlite`) or on the event loop (:mod:`postgres`). ``?`` stands for an argument.

Invariant: ``sapwood_totals`` has the count and the bytes of each tenant's records by group; each statement that adds or deletes
records is followed, in the same transaction, by one that counts it. So room is made without counting rows: to write a record
takes O(log records + tenants), and as much for each that gives way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from sapwood_router.store.records import (
    CHILDREN,
    COUNTED,
    GROUPS,
    KEPT,
    MOST_AT_ONCE,
    PARENTS,
    Record,
    Retention,
    can_be_key,
)

Row = Sequence[Any]
T = TypeVar("T")
Operation = Generator[tuple[str, tuple[Any, ...]], Sequence[Row], T]
MakeOperation = Callable[[], Operation[T]]

_KEPT_KINDS = "('response', 'conversation')"
"""Those that give way by themselves; items go with their conversation."""
_COLUMNS = "kind, tenant, key, body, parent, position, expires, version"
_KEY = "kind = ? AND tenant = ? AND key = ?"
_SWEPT_AT_ONCE = 1000


def schema(blob: str) -> tuple[str, ...]:
    """The statements that make the tables where there are none; ``blob`` is the type of bytes."""
    return (
        "CREATE TABLE IF NOT EXISTS sapwood_records (kind TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, "
        f"body {blob} NOT NULL, parent TEXT NOT NULL, position BIGINT NOT NULL, expires BIGINT NOT NULL, "
        "version BIGINT NOT NULL, used BIGINT NOT NULL, PRIMARY KEY (kind, tenant, key))",
        "CREATE INDEX IF NOT EXISTS sapwood_below ON sapwood_records (kind, tenant, parent, position, key)",
        f"CREATE INDEX IF NOT EXISTS sapwood_used ON sapwood_records (tenant, used) WHERE kind IN {_KEPT_KINDS}",
        f"CREATE INDEX IF NOT EXISTS sapwood_unused ON sapwood_records (used) WHERE kind IN {_KEPT_KINDS}",
        "CREATE INDEX IF NOT EXISTS sapwood_expires ON sapwood_records (expires) WHERE expires > 0",
        "CREATE TABLE IF NOT EXISTS sapwood_totals (tenant TEXT NOT NULL, grouped TEXT NOT NULL, count BIGINT NOT NULL, "
        "bytes BIGINT NOT NULL, PRIMARY KEY (tenant, grouped))",
    )


class Driver(Protocol):
    """Runs operations."""

    async def run(self, make: MakeOperation[T], *, writes: bool) -> T:
        """Runs an operation in a transaction. Raises UnavailableError where that fails."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


class SqlStore:
    """Implements :class:`Store`.

    Args:
        driver: Runs the operations.
        retention: What goes when.
        clock: Seconds since 1970.
    """

    def __init__(self, driver: Driver, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        self._driver = driver
        self._retention = retention
        self._clock = clock
        self._latest = 0

    async def put(self, records: Sequence[Record]) -> bool:
        return await self._driver.run(partial(self._put, records), writes=True)

    async def add(self, record: Record) -> bool:
        return await self._driver.run(partial(self._add, record), writes=True)

    async def swap(self, record: Record) -> bool:
        return await self._driver.run(partial(self._swap, record), writes=True)

    async def get(self, kind: str, tenant: str, key: str) -> Record | None:
        if not can_be_key(key):
            return None
        rows = await self._rows(f"SELECT {_COLUMNS} FROM sapwood_records WHERE {_KEY}", kind, tenant, key)
        return _record(rows[0]) if rows else None

    async def chain(self, kind: str, tenant: str, key: str, most: int) -> list[Record]:
        if not can_be_key(key):
            return []
        return await self._driver.run(partial(self._chain, kind, tenant, key, most), writes=True)

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
        if not can_be_key(parent):
            return []
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        beyond, place = (f" AND (position, key) {sign} (?, ?)", after) if after is not None else ("", ())
        # Lengths are looked at before any body is read.
        sizes = (
            "SELECT key, position, length(body) AS size FROM sapwood_records WHERE kind = ? AND tenant = ? AND parent = ?"
            f"{beyond} ORDER BY position {order}, key {order} LIMIT ?"
        )
        page = f"SELECT key, SUM(size) OVER (ORDER BY position {order}, key {order}) - size AS earlier FROM ({sizes}) AS sizes"
        columns = ", ".join(f"sapwood_records.{name}" for name in _COLUMNS.split(", "))
        rows = await self._rows(
            f"SELECT {columns} FROM ({page}) AS page JOIN sapwood_records ON sapwood_records.kind = ? AND "
            "sapwood_records.tenant = ? AND sapwood_records.key = page.key WHERE page.earlier < ? "
            f"ORDER BY sapwood_records.position {order}, sapwood_records.key {order}",
            *(kind, tenant, parent, *place, limit, kind, tenant, MOST_AT_ONCE),
        )
        return [_record(row) for row in rows]

    async def positions(self, kind: str, tenant: str, parent: str) -> list[int]:
        if not can_be_key(parent):
            return []
        statement = (
            "SELECT position FROM sapwood_records WHERE kind = ? AND tenant = ? AND parent = ? ORDER BY position"
        )
        return [int(row[0]) for row in await self._rows(statement, kind, tenant, parent)]

    async def every(self, kind: str, *, after: tuple[str, str] | None = None, limit: int = 100) -> list[Record]:
        beyond = "" if after is None else " AND (tenant, key) > (?, ?)"
        rows = await self._rows(
            f"SELECT {_COLUMNS} FROM sapwood_records WHERE kind = ?{beyond} ORDER BY tenant, key LIMIT ?",
            *(kind, *(after or ()), limit),
        )
        return [_record(row) for row in rows]

    async def delete(self, kind: str, tenant: str, key: str) -> bool:
        if not can_be_key(key):
            return False
        return await self._driver.run(partial(self._delete, kind, tenant, key), writes=True)

    async def empty(self, kind: str, tenant: str, parent: str) -> None:
        await self._driver.run(partial(self._empty, kind, tenant, parent), writes=True)

    async def forget(self, tenant: str) -> int:
        return await self._driver.run(partial(self._forget, tenant), writes=True)

    async def total(self, tenant: str, group: str) -> tuple[int, int]:
        rows = await self._rows(
            "SELECT count, bytes FROM sapwood_totals WHERE tenant = ? AND grouped = ?", tenant, group
        )
        return (int(rows[0][0]), int(rows[0][1])) if rows else (0, 0)

    async def sweep(self) -> None:
        while await self._driver.run(partial(self._sweep), writes=True) == _SWEPT_AT_ONCE:
            pass

    async def close(self) -> None:
        await self._driver.close()

    async def _rows(self, statement: str, *arguments: Any) -> Sequence[Row]:
        def operation() -> Operation[Sequence[Row]]:
            return (yield statement, arguments)

        return await self._driver.run(operation, writes=False)

    def _now(self) -> int:
        """Microseconds, later than any before."""
        self._latest = max(self._latest + 1, int(self._clock() * 1e6))
        return self._latest

    def _put(self, records: Sequence[Record]) -> Operation[bool]:
        left_out = False
        for record in records:
            if not (yield from _has_place(record)):
                left_out = True
                continue
            rows = yield f"SELECT length(body) FROM sapwood_records WHERE {_KEY}", _key_of(record)
            if rows:
                earlier = record.size - len(record.body) + int(rows[0][0])
                yield (
                    "UPDATE sapwood_records SET body = ?, parent = ?, position = ?, expires = ?, version = version + 1, "
                    f"used = ? WHERE {_KEY}",
                    (*_content_of(record), self._now(), *_key_of(record)),
                )
                yield from _count(record.tenant, record.kind, 0, record.size - earlier)
            else:
                yield from self._insert(record)
        for tenant in dict.fromkeys(record.tenant for record in records if GROUPS[record.kind] == KEPT):
            yield from self._make_room(tenant)
        return not left_out

    def _insert(self, record: Record) -> Operation[bool]:
        rows = yield (
            "INSERT INTO sapwood_records (kind, tenant, key, body, parent, position, expires, version, used) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?) ON CONFLICT DO NOTHING RETURNING 1",
            (*_key_of(record), *_content_of(record), self._now()),
        )
        if rows:
            yield from _count(record.tenant, record.kind, 1, record.size)
        return bool(rows)

    def _add(self, record: Record) -> Operation[bool]:
        added = (yield from _has_place(record)) and (yield from self._insert(record))
        if added and GROUPS[record.kind] == KEPT:
            yield from self._make_room(record.tenant)
        return added

    def _swap(self, record: Record) -> Operation[bool]:
        rows = yield f"SELECT length(body) FROM sapwood_records WHERE {_KEY}", _key_of(record)
        if not rows or not (yield from _has_place(record)):
            return False
        earlier = record.size - len(record.body) + int(rows[0][0])
        changed = yield (
            "UPDATE sapwood_records SET body = ?, parent = ?, position = ?, expires = ?, version = version + 1, used = ? "
            f"WHERE {_KEY} AND version = ? RETURNING 1",
            (*_content_of(record), self._now(), *_key_of(record), record.version),
        )
        if changed:
            yield from _count(record.tenant, record.kind, 0, record.size - earlier)
        return bool(changed)

    def _chain(self, kind: str, tenant: str, key: str, most: int) -> Operation[list[Record]]:
        found: list[Record] = []
        seen: set[str] = set()
        held = 0
        while key and key not in seen and len(found) < most and held < MOST_AT_ONCE:
            seen.add(key)
            rows = yield f"SELECT {_COLUMNS} FROM sapwood_records WHERE {_KEY}", (kind, tenant, key)
            if not rows:
                break
            found.append(_record(rows[0]))
            held += len(found[-1].body)
            key = found[-1].parent
        for record in found:  # the oldest last: those that go on from it are of no use without it
            yield f"UPDATE sapwood_records SET used = ? WHERE {_KEY}", (self._now(), *_key_of(record))
        return found

    def _delete(self, kind: str, tenant: str, key: str) -> Operation[bool]:
        rows = yield f"DELETE FROM sapwood_records WHERE {_KEY} RETURNING length(body)", (kind, tenant, key)
        if not rows:
            return False
        yield from _count(tenant, kind, -1, -_bytes_of(rows))
        if (child := CHILDREN.get(kind)) is not None:
            yield from self._empty(child, tenant, key)
        return True

    def _empty(self, kind: str, tenant: str, parent: str) -> Operation[None]:
        rows = yield (
            "DELETE FROM sapwood_records WHERE kind = ? AND tenant = ? AND parent = ? RETURNING length(body)",
            (kind, tenant, parent),
        )
        yield from _count(tenant, kind, -len(rows), -_bytes_of(rows))

    def _forget(self, tenant: str) -> Operation[int]:
        rows = yield "DELETE FROM sapwood_records WHERE tenant = ? RETURNING 1", (tenant,)
        yield "DELETE FROM sapwood_totals WHERE tenant = ?", (tenant,)
        return len(rows)

    def _make_room(self, tenant: str) -> Operation[None]:
        """Drops what was used least lately, until tenant and store are within their bounds."""
        asked = "SELECT count FROM sapwood_totals WHERE tenant = ? AND grouped = ?"
        while (rows := (yield asked, (tenant, KEPT))) and int(rows[0][0]) > self._retention.most:
            if not (yield from self._drop_oldest(tenant)):
                break
        while int((yield "SELECT SUM(bytes) FROM sapwood_totals WHERE grouped = ?", (KEPT,))[0][0] or 0) > (
            self._retention.most_bytes
        ):
            (largest,) = yield (
                "SELECT tenant FROM sapwood_totals WHERE grouped = ? ORDER BY bytes DESC, tenant LIMIT 1",
                (KEPT,),
            )
            if not (yield from self._drop_oldest(largest[0])):
                break

    def _drop_oldest(self, tenant: str) -> Operation[bool]:
        rows = yield (
            f"SELECT kind, key FROM sapwood_records WHERE tenant = ? AND kind IN {_KEPT_KINDS} ORDER BY used LIMIT 1",
            (tenant,),
        )
        if not rows:
            return False
        return (yield from self._delete(rows[0][0], tenant, rows[0][1]))

    def _sweep(self) -> Operation[int]:
        now = self._clock()
        gone = list(
            (
                yield (
                    "SELECT kind, tenant, key FROM sapwood_records WHERE expires > 0 AND expires <= ? LIMIT ?",
                    (int(now), _SWEPT_AT_ONCE),
                )
            )
        )
        if self._retention.seconds and len(gone) < _SWEPT_AT_ONCE:
            before = int((now - self._retention.seconds) * 1e6)
            gone += yield (
                f"SELECT kind, tenant, key FROM sapwood_records WHERE kind IN {_KEPT_KINDS} AND used <= ? LIMIT ?",
                (before, _SWEPT_AT_ONCE - len(gone)),
            )
        for kind, tenant, key in gone:
            yield from self._delete(kind, tenant, key)
        return len(gone)


def _has_place(record: Record) -> Operation[bool]:
    """Whether the record that it is below is there; True where it is below none."""
    if (kind := PARENTS.get(record.kind)) is None:
        return True
    return bool((yield f"SELECT 1 FROM sapwood_records WHERE {_KEY}", (kind, record.tenant, record.parent)))


def _count(tenant: str, kind: str, records: int, size: int) -> Operation[None]:
    """Notes that records came or went."""
    counted = records if kind in COUNTED else 0
    if not counted and not size:
        return
    yield (
        "INSERT INTO sapwood_totals (tenant, grouped, count, bytes) VALUES (?, ?, ?, ?) ON CONFLICT (tenant, grouped) "
        "DO UPDATE SET count = sapwood_totals.count + excluded.count, bytes = sapwood_totals.bytes + excluded.bytes",
        (tenant, GROUPS[kind], counted, size),
    )


def _bytes_of(rows: Iterable[Row]) -> int:
    return sum(Record("", "", "", b"").size + int(row[0]) for row in rows)


def _key_of(record: Record) -> tuple[str, str, str]:
    return record.kind, record.tenant, record.key


def _content_of(record: Record) -> tuple[bytes, str, int, int]:
    return record.body, record.parent, record.position, record.expires


def _record(row: Row) -> Record:
    kind, tenant, key, body, parent, position, expires, version = row
    return Record(kind, tenant, key, bytes(body), parent, position, expires, version)
