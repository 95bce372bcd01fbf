"""Runs a store's operations in a Postgres database, which routers of several machines share.

Reads run side by side. Writes of all routers have one order: each transaction of writes holds an advisory lock, and what waits
when a router's turn comes is run in one transaction. So no operation needs locks of its own, and none is ever tried twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import asyncpg

from sapwood_common.errors import ConfigError, UnavailableError
from sapwood_router.store.sql import MakeOperation, T, schema

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 256
_MOST_CONNECTIONS = 8
_SECONDS = 30.0
"""How long the database may take to answer a statement, or to be reached."""
_LOCK = 0x5A90_0D57
_FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


class PostgresDriver:
    """Implements :class:`Driver`.

    Args:
        url: ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``.

    Raises:
        ConfigError: The URL is malformed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()
        self._waiting: deque[tuple[MakeOperation[Any], asyncio.Future[Any]]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        if not url.partition("://")[2]:
            raise ConfigError("--store: a Postgres URL is postgresql://USER:PASSWORD@HOST:PORT/DATABASE")

    async def run(self, make: MakeOperation[T], *, writes: bool) -> T:
        if self._closed:
            raise UnavailableError("the store is closed")
        try:
            if not writes:
                async with (await self._connected()).acquire(timeout=_SECONDS) as connection:
                    return await _run(connection, make)
            future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            self._waiting.append((make, future))
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write(), name="writes to the store")
            return await future
        except _FAULTS as error:
            logger.error("the store failed: %s: %s", type(error).__name__, error)
            raise UnavailableError(f"the store does not answer: {type(error).__name__}", retry_after=1.0) from error

    async def close(self) -> None:
        self._closed = True
        if self._writer is not None:
            await asyncio.wait([self._writer])
        if self._pool is not None:
            await self._pool.close()

    async def _connected(self) -> asyncpg.Pool[asyncpg.Record]:
        async with self._opening:
            if self._pool is None:
                pool = await asyncpg.create_pool(
                    self._url, min_size=1, max_size=_MOST_CONNECTIONS, command_timeout=_SECONDS, timeout=_SECONDS
                )
                async with pool.acquire() as connection, connection.transaction():
                    await connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
                    for statement in schema("BYTEA"):
                        await connection.execute(statement)
                self._pool = pool
            return self._pool

    async def _write(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(_MOST_AT_ONCE, len(self._waiting)))]
            results: list[tuple[Any, Exception | None]] = []
            try:
                async with (await self._connected()).acquire(timeout=_SECONDS) as connection, connection.transaction():
                    await connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
                    for make, _ in taken:
                        results.append(await _tried(connection, make))
            except Exception as error:
                results = [(None, error)] * len(taken)
            for (_, future), (result, failure) in zip(taken, results, strict=True):
                if future.done():
                    continue
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(failure)


async def _tried(connection: Any, make: MakeOperation[T]) -> tuple[T | None, Exception | None]:
    """Runs an operation within a savepoint. Returns its result, or why it failed."""
    try:
        async with connection.transaction():
            return await _run(connection, make), None
    except Exception as error:
        if connection.is_closed():
            raise
        return None, error


async def _run(connection: Any, make: MakeOperation[T]) -> T:
    operation = make()
    try:
        statement, arguments = next(operation)
        while True:
            rows = await connection.fetch(_numbered(statement), *arguments)
            statement, arguments = operation.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def _numbered(statement: str) -> str:
    """The statement with ``$1``, ``$2``, ... for its arguments."""
    first, *others = statement.split("?")
    return first + "".join(f"${number}{text}" for number, text in enumerate(others, 1))
