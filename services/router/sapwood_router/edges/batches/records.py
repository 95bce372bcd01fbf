"""Batches as they are kept and shown.

A batch has a record of kind ``batch``, which clients see and cancel, and while it is not finished one of kind ``job``: who runs
it, and until when nobody else may. Both are changed only by a swap of versions. A line's result is a record below the batch,
written once: it is added, never replaced.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sapwood_common.errors import NotFoundError
from sapwood_router.store.records import Record, Store

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of a batch that is not finished."""


class Counts(msgspec.Struct):
    """How many lines there are, and how they ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineProblem(msgspec.Struct):
    """Why a batch is not run: what is wrong in a line, counted from 1; ``param`` is the field at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Problems(msgspec.Struct):
    """The first of all problems."""

    data: list[LineProblem]
    object: str = "list"


class BatchObject(msgspec.Struct):
    """A batch, as clients see it. Times are seconds since 1970; None: not yet, or never."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    errors: Problems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None
    object: str = "batch"

    @property
    def is_open(self) -> bool:
        """Whether it is not finished."""
        return self.status in OPEN

    def enter(self, status: str) -> None:
        """Changes its state, and notes when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class Job(msgspec.Struct):
    """Who runs a batch, and until when nobody else may, in seconds since 1970."""

    owner: str = ""
    until: float = 0.0


class BatchStore:
    """The batches of all tenants.

    Args:
        store: Where.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    async def create(self, tenant: str, batch: BatchObject) -> None:
        """Keeps a new batch, for the runner of batches."""
        body = msgspec.json.encode(batch)
        position = int(time.time() * 1e6)
        await self.store.put(
            [
                Record("batch", tenant, batch.id, body, position=position),
                Record("job", tenant, batch.id, msgspec.json.encode(Job())),
            ]
        )

    async def get(self, tenant: str, batch_id: str) -> BatchObject:
        """A batch.

        Raises:
            NotFoundError: There is none.
        """
        return msgspec.json.decode((await self._record(tenant, batch_id)).body, type=BatchObject)

    async def page(self, tenant: str, limit: int, *, newest_first: bool, after: str | None) -> list[BatchObject] | None:
        """Some batches in order of their making; None: there is none that is called ``after``.

        Args:
            tenant: Whose.
            limit: Most of them.
            newest_first: The order.
            after: The batch before them; None: they are the first.
        """
        place: tuple[int, str] | None = None
        if after is not None:
            record = await self.store.get("batch", tenant, after)
            if record is None:
                return None
            place = record.position, record.key
        found = await self.store.below("batch", tenant, "", after=place, limit=limit, newest_first=newest_first)
        return [msgspec.json.decode(each.body, type=BatchObject) for each in found]

    async def count_open(self, tenant: str, most: int) -> int:
        """How many batches are not finished, counted up to ``most``."""
        return len(await self.store.below("job", tenant, "", limit=most))

    async def change(self, tenant: str, batch_id: str, change: Callable[[BatchObject], bool]) -> BatchObject:
        """Changes a batch as it is at this moment.

        Args:
            tenant: Whose.
            batch_id: Which.
            change: Changes it, or returns False and leaves it.

        Raises:
            NotFoundError: There is none.
        """
        while True:
            record = await self._record(tenant, batch_id)
            batch = msgspec.json.decode(record.body, type=BatchObject)
            if not change(batch):
                return batch
            if await self.store.swap(msgspec.structs.replace(record, body=msgspec.json.encode(batch))):
                return batch

    async def claim(self, record: Record, owner: str, seconds: float) -> Record | None:
        """Takes or keeps a job for some time; None: another router has it, or it is done.

        Args:
            record: The job, as it was read.
            owner: Who takes it.
            seconds: For how long.
        """
        now = time.time()
        job = msgspec.json.decode(record.body, type=Job)
        if job.owner != owner and job.until > now:
            return None
        body = msgspec.json.encode(Job(owner, now + seconds))
        if not await self.store.swap(msgspec.structs.replace(record, body=body)):
            return None
        return msgspec.structs.replace(record, body=body, version=record.version + 1)

    async def add_result(self, tenant: str, batch_id: str, line: int, result: dict[str, Any]) -> None:
        """Keeps what came of a line, unless there is a result already."""
        key = f"{batch_id}/{line:08x}"
        await self.store.add(Record("line", tenant, key, msgspec.json.encode(result), batch_id, line))

    async def finished_lines(self, tenant: str, batch_id: str) -> set[int]:
        """The lines that have a result."""
        return set(await self.store.positions("line", tenant, batch_id))

    async def fail(self, tenant: str, batch_id: str, problem: LineProblem) -> None:
        """Ends a batch that cannot be run."""

        def failed(known: BatchObject) -> bool:
            known.errors = Problems([problem])
            known.enter("failed")
            return True

        await self.change(tenant, batch_id, failed)
        await self.close(tenant, batch_id)

    async def close(self, tenant: str, batch_id: str) -> None:
        """Nobody needs to run a batch any more: the results of its lines are in its files."""
        await self.store.empty("line", tenant, batch_id)
        await self.store.delete("job", tenant, batch_id)

    async def _record(self, tenant: str, batch_id: str) -> Record:
        found = await self.store.get("batch", tenant, batch_id)
        if found is None:
            raise NotFoundError(f"there is no batch {batch_id[:100]!r} here, or no longer")
        return found


def new_batch_id() -> str:
    """A fresh id."""
    return f"batch_{secrets.token_hex(16)}"
