"""Runs a store's operations in an SQLite file, or in memory, in a thread of its own.

What waits when the thread is free is run in one transaction, each operation within a savepoint: many writes cost one commit.
Several processes of one machine may share a file. What was committed outlives a killed process; after a loss of power the file is
whole, but its last moments may be missing (``synchronous=NORMAL`` in WAL mode).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError, UnavailableError
from sapwood_router.store.sql import MakeOperation, Operation, T, schema

logger = logging.getLogger(__name__)

MEMORY = ":memory:"
_MOST_AT_ONCE = 256
_BUSY_SECONDS = 30.0


@dataclass(slots=True)
class _Waiting:
    """An operation, and who waits for it."""

    make: MakeOperation[Any]
    writes: bool
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class SqliteDriver:
    """Implements :class:`Driver`.

    Args:
        path: The file, made where there is none, for its owner alone; ``:memory:`` keeps all in memory.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closed = False
        try:
            if path != MEMORY:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).touch(mode=0o600)
                if Path(path).stat().st_mode & 0o077:  # it was there before
                    logger.warning("--store: %s can be read by other users: chmod 600 keeps them out", path)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            for pragma in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=NORMAL"):
                self._connection.execute(f"PRAGMA {pragma}")
            for statement in schema("BLOB"):
                self._connection.execute(statement)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--store: cannot open {path}: {error}") from error
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    async def run(self, make: MakeOperation[T], *, writes: bool) -> T:
        if self._closed:
            raise UnavailableError("the store is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Waiting(make, writes, future))
        return await future

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        ends = False
        while not ends:
            taken = [self._queue.get()]
            while len(taken) < _MOST_AT_ONCE and not self._queue.empty():
                taken.append(self._queue.get())
            waiting = [each for each in taken if each is not None]
            ends = len(waiting) < len(taken)
            if waiting:
                self._run_all(waiting)
        self._connection.close()

    def _run_all(self, waiting: list[_Waiting]) -> None:
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE" if any(each.writes for each in waiting) else "BEGIN")
            for each in waiting:
                execute("SAVEPOINT one")
                try:
                    each.result = self._run(each.make())
                except Exception as error:
                    execute("ROLLBACK TO one")
                    each.error = error
                execute("RELEASE one")
            execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            for each in waiting:
                each.error = error
        loops: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
        for each in waiting:
            loops.setdefault(each.future.get_loop(), []).append(each)
        for loop, ours in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_tell, ours)

    def _run(self, operation: Operation[T]) -> T:
        execute: Callable[..., sqlite3.Cursor] = self._connection.execute
        try:
            statement, arguments = next(operation)
            while True:
                statement, arguments = operation.send(execute(statement, arguments).fetchall())
        except StopIteration as end:
            result: T = end.value
            return result


def _tell(waiting: list[_Waiting]) -> None:
    for each in waiting:
        if each.future.done():
            continue
        if each.error is None:
            each.future.set_result(each.result)
        elif isinstance(each.error, sqlite3.Error):
            logger.error("the store failed: %s", each.error)
            each.future.set_exception(UnavailableError(f"the store does not take it: {each.error}", retry_after=1.0))
        else:
            each.future.set_exception(each.error)
