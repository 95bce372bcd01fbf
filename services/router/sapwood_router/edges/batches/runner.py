"""Runs the lines of batches, with the lowest priority, some at a time.

States of a batch: validating -> in_progress -> finalizing -> completed; from validating also failed, from in_progress expired or
(by cancelling) cancelled; failed also if the input is forgotten. A router that runs one holds its job, and says so each second. A
job that nobody holds is taken up by the next router that looks, which goes on behind the results that are there. So:

- no line is lost: a batch is finished only when each line has a result, or none was to come any more;
- no line is doubled: its result is added once, by whomever, and the output is written from these results in the order of lines.
  A line that was being answered when its router died is asked again;
- the output's files have ids that follow from the batch's, and are written again if their writer died.

Memory: the numbers of the finished lines, and the lines that are being answered. A line that is refused for now (429, 503) waits
as long as the server says, until the batch expires.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from sapwood_common.errors import NotFoundError, SapwoodError, UnauthenticatedError
from sapwood_common.tenants.tenant import Tenant
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_router.edges.batches.lines import check_lines, read_line
from sapwood_router.edges.batches.records import BatchObject, BatchStore, LineProblem, Problems
from sapwood_router.edges.files.store import FileStore, FileWriter
from sapwood_router.edges.http.inner_request import AskInner, InnerRequest
from sapwood_router.edges.routes import Post
from sapwood_router.request.caller import PRIORITY_KEY, TENANT_KEY
from sapwood_router.store.records import Record

logger = logging.getLogger(__name__)

LOWEST = b"-100"
_LOOK_SECONDS, _HOLD_SECONDS = 1.0, 15.0
"""How often somebody looks for jobs and for cancelled batches; and how long a job is held without another word."""
_TRIES = 3
"""How often a line is asked that fails with an error of the server's own making."""
_FOR_NOW = frozenset({408, 429, 503})
"""Statuses of answers that another time may be better."""
_LEAST_WAIT, _MOST_WAIT = 0.2, 30.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What there may be.

    Attributes:
        concurrency: Lines that are answered at a time; 0: this router runs no batches.
        lines: Lines of a batch.
        line_bytes: Bytes of a line.
        seconds: The longest window of a batch.
    """

    concurrency: int
    lines: int
    line_bytes: int
    seconds: float


class _LostError(Exception):
    """Another router runs the batch."""


class BatchRunner:
    """Takes up jobs and runs them, until it is cancelled.

    Args:
        batches, files: What is kept.
        routes: Who answers a path.
        ask: Answers a line.
        tenant_named: The tenant with an API key of this name, raises ``UnauthenticatedError``; None: no keys are asked for.
        heavy: Others have turns while lines are looked through.
        limits: What there may be.
        looks: Set when there may be a new job.
        draining: Set when nothing new is to begin.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        routes: dict[str, Post],
        ask: AskInner,
        tenant_named: Callable[[str], Tenant] | None,
        heavy: HeavyWork,
        limits: BatchLimits,
        looks: asyncio.Event,
        draining: asyncio.Event,
    ) -> None:
        self._batches = batches
        self._files = files
        self._routes = routes
        self._ask = ask
        self._tenant_named = tenant_named
        self._heavy = heavy
        self._limits = limits
        self._draining = draining
        self._owner = secrets.token_hex(8)
        self._places = asyncio.Semaphore(limits.concurrency)
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._looks = looks

    async def run(self) -> None:
        """Runs what there is, without end."""
        try:
            while True:
                self._looks.clear()
                if self._limits.concurrency and not self._draining.is_set():
                    try:
                        await self._take_up()
                    except SapwoodError as error:
                        logger.warning("batches are not looked for now: %s", error.message)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._looks.wait()
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_up(self) -> None:
        after: tuple[str, str] | None = None
        while page := await self._batches.store.every("job", after=after):
            for record in page:
                after = key = record.tenant, record.key
                if key not in self._running and (held := await self._batches.claim(record, self._owner, _HOLD_SECONDS)):
                    task = asyncio.create_task(self._guarded(held), name=f"batch {record.key}")
                    self._running[key] = task

    async def _guarded(self, held: Record) -> None:
        tenant, batch_id = held.tenant, held.key
        run = _Run(self, held)
        try:
            await run.run()
        except asyncio.CancelledError:
            with suppress(SapwoodError):  # the next router need not wait
                await run.let_go()
            raise
        except _LostError:
            logger.warning("batch %s: another router runs it", batch_id)
        except NotFoundError as error:  # its file was forgotten
            await self._batches.fail(tenant, batch_id, LineProblem("input_file_deleted", error.message))
        except Exception:
            logger.exception("batch %s waits", batch_id)
        finally:
            del self._running[tenant, batch_id]

    async def answer(self, tenant: str, path: str, body: bytes, expires: float) -> InnerRequest:
        """Asks until there is an answer that is more than a refusal for now.

        Raises:
            UnauthenticatedError: The tenant's keys were revoked.
            TimeoutError: There is none by ``expires``.
        """
        tries = 0
        while True:
            fields = {b"host": b"127.0.0.1", PRIORITY_KEY.encode(): LOWEST}
            account = None
            wait: float | None = None
            if self._tenant_named is not None:
                account = self._tenant_named(tenant)
                try:
                    account.begin_request()
                except SapwoodError as error:
                    wait = getattr(error, "retry_after", None) or 1.0
            elif tenant:
                fields[TENANT_KEY.encode()] = tenant.encode("latin-1")
            if wait is None:
                request = InnerRequest(path, fields, body)
                await self._ask(request, account)
                tries += 1
                if request.status not in _FOR_NOW and (request.status < 500 or tries >= _TRIES):
                    return request
                wait = float(request.headers.get(b"retry-after", b"0") or 0)
            wait = min(max(wait, _LEAST_WAIT), _MOST_WAIT) * random.uniform(1.0, 2.0)
            if time.time() + wait >= expires:
                raise TimeoutError
            await asyncio.sleep(wait)


class _Run:
    """One batch, while this router runs it."""

    def __init__(self, runner: BatchRunner, held: Record) -> None:
        self._runner = runner
        self._held = held
        self._tenant, self._batch_id = held.tenant, held.key
        self._batches, self._files = runner._batches, runner._files
        self._completed = self._failed = 0
        self._stops = asyncio.Event()
        """Set when no more lines are to begin: the batch was cancelled or expired."""

    async def run(self) -> None:
        batch = await self._batches.get(self._tenant, self._batch_id)
        work = asyncio.create_task(self._work(batch))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_LOOK_SECONDS)
                if not work.done():
                    await self._keep_hold()
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def let_go(self) -> None:
        """Others may run it at once."""
        await self._batches.claim(self._held, self._runner._owner, 0.0)

    async def _keep_hold(self) -> None:
        """Says that this router still runs it, tells how far it is, and sees whether it is to end early.

        Raises:
            _LostError: Another router has taken it up.
        """
        held = await self._batches.claim(self._held, self._runner._owner, _HOLD_SECONDS)
        if held is None:
            raise _LostError
        self._held = held
        batch = await self._batches.change(self._tenant, self._batch_id, self._count)
        if batch.status == "cancelling" or time.time() >= batch.expires_at:
            self._stops.set()

    def _count(self, batch: BatchObject) -> bool:
        counts = batch.request_counts
        if not batch.is_open or (counts.completed, counts.failed) == (self._completed, self._failed):
            return False
        counts.completed, counts.failed = self._completed, self._failed
        return True

    async def _work(self, batch: BatchObject) -> None:
        if batch.status == "validating" and not (batch := await self._check(batch)).is_open:
            await self._batches.close(self._tenant, self._batch_id)
            return
        if batch.status == "in_progress":
            await self._answer_lines(batch)
        if (await self._batches.get(self._tenant, self._batch_id)).is_open:
            await self._finalize()
        await self._batches.close(self._tenant, self._batch_id)

    async def _check(self, batch: BatchObject) -> BatchObject:
        runner, limits = self._runner, self._runner._limits
        await self._files.get(self._tenant, batch.input_file_id)
        count, problems = await check_lines(
            self._files, self._tenant, batch.input_file_id, batch.endpoint, runner._routes, runner._heavy,
            most=limits.lines, longest=limits.line_bytes,
        )  # fmt: skip

        def checked(known: BatchObject) -> bool:
            if problems:
                known.errors = Problems(problems)
                known.enter("failed")
                return True
            known.request_counts.total = count
            if known.status == "validating":
                known.enter("in_progress")
            return True

        return await self._batches.change(self._tenant, self._batch_id, checked)

    async def _answer_lines(self, batch: BatchObject) -> None:
        done = await self._batches.finished_lines(self._tenant, self._batch_id)
        await self._count_finished(done)
        places = self._runner._places
        stopping = asyncio.create_task(self._stops.wait())
        try:
            async with asyncio.TaskGroup() as group:
                async for number, line in self._lines(batch):
                    if number in done:
                        continue
                    place = asyncio.create_task(places.acquire())
                    await asyncio.wait([place, stopping], return_when=asyncio.FIRST_COMPLETED)
                    if stopping.done():
                        if not place.cancel():
                            places.release()
                        break
                    group.create_task(self._answer(batch, number, line))
        finally:
            stopping.cancel()

    def _lines(self, batch: BatchObject) -> AsyncIterator[tuple[int, bytes]]:
        return self._files.lines(self._tenant, batch.input_file_id, self._runner._limits.line_bytes)

    async def _count_finished(self, done: set[int]) -> None:
        """Counts what was finished before this router took the batch up."""
        failed = 0
        async for _, result in self._results(done):
            failed += _has_failed(result)
        self._failed, self._completed = failed, len(done) - failed

    async def _answer(self, batch: BatchObject, number: int, line: bytes) -> None:
        """Answers a line, and keeps what came of it. Leaves it without a result if it is too late, or no longer wanted."""
        runner = self._runner
        asking: asyncio.Task[dict[str, Any]] | None = None
        try:
            asking = asyncio.create_task(self._result(batch, number, line))
            stopping = asyncio.create_task(self._stops.wait())
            try:
                await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            if not asking.done():
                return
            try:
                result = asking.result()
            except TimeoutError:
                self._stops.set()
                return
            await self._batches.add_result(self._tenant, self._batch_id, number, result)
            if _has_failed(result):
                self._failed += 1
            else:
                self._completed += 1
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            runner._places.release()

    async def _result(self, batch: BatchObject, number: int, line: bytes) -> dict[str, Any]:
        read = read_line(line)
        made: dict[str, Any] = {"id": f"batch_req_{self._batch_id[-16:]}{number:06x}", "custom_id": read.custom_id}
        body = msgspec.json.encode(read.body)
        try:
            answered = await self._runner.answer(self._tenant, batch.endpoint, body, batch.expires_at)
        except UnauthenticatedError as error:
            refusal = {"error": {"message": error.message, "type": "authentication_error", "param": None, "code": None}}
            return {**made, "response": {"status_code": 401, "request_id": "", "body": refusal}, "error": None}
        response = {
            "status_code": answered.status,
            "request_id": answered.headers.get(b"x-request-id", b"").decode("latin-1"),
            "body": msgspec.Raw(answered.answer),
        }
        return {**made, "response": response, "error": None}

    async def _finalize(self) -> None:
        """Writes the files of results, and ends the batch."""

        def begun(known: BatchObject) -> bool:
            if known.status != "in_progress":
                return False
            known.enter("finalizing")
            return True

        batch = await self._batches.change(self._tenant, self._batch_id, begun)
        done = await self._batches.finished_lines(self._tenant, self._batch_id)
        cancelled = batch.status == "cancelling"
        secret = self._batch_id.partition("_")[2]
        outputs = _Output(self._files, self._tenant, f"file-{secret}o", f"{self._batch_id}_output.jsonl")
        errors = _Output(self._files, self._tenant, f"file-{secret}e", f"{self._batch_id}_error.jsonl")
        results = self._results(done)
        await self._files.get(self._tenant, batch.input_file_id)
        async for number, line in self._lines(batch):
            if number in done:
                _, result = await anext(results)
                await (errors if _has_failed(result) else outputs).write(result)
            elif not cancelled:
                await errors.write(_expired(line, self._batch_id, number))
        expired = not cancelled and len(done) < batch.request_counts.total
        output_id, error_id = await outputs.finish(), await errors.finish()

        def ended(known: BatchObject) -> bool:
            known.output_file_id, known.error_file_id = output_id, error_id
            self._count(known)
            known.enter("cancelled" if cancelled else "expired" if expired else "completed")
            return True

        await self._batches.change(self._tenant, self._batch_id, ended)

    async def _results(self, done: set[int]) -> AsyncIterator[tuple[int, bytes]]:
        """The results of lines in order, of those that are in ``done``."""
        after: tuple[int, str] | None = None
        while page := await self._batches.store.below("line", self._tenant, self._batch_id, after=after, limit=64):
            for record in page:
                if record.position in done:
                    yield record.position, record.body
            after = page[-1].position, page[-1].key


class _Output:
    """A file of results, made when there is a first one."""

    def __init__(self, files: FileStore, tenant: str, file_id: str, name: str) -> None:
        self._files = files
        self._tenant = tenant
        self._file_id = file_id
        self._name = name
        self._writer: FileWriter | None = None

    async def write(self, result: bytes) -> None:
        """Adds a result."""
        if self._writer is None:
            self._writer = await self._files.begin(
                self._tenant, self._name, "batch_output", file_id=self._file_id, bounded=False
            )
        await self._writer.write(result + b"\n")

    async def finish(self) -> str | None:
        """Ends the file. Returns its id; None: there are no results."""
        return None if self._writer is None else (await self._writer.finish()).id


class _Status(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    response: _Status | None = None


_RESULT = msgspec.json.Decoder(_Result)


def _has_failed(result: bytes | dict[str, Any]) -> bool:
    """Whether a line's result is an error."""
    if isinstance(result, dict):
        return bool(result["response"]["status_code"] != 200)
    response = _RESULT.decode(result).response
    return response is None or response.status_code != 200


def _expired(line: bytes, batch_id: str, number: int) -> bytes:
    message = "This request could not be executed before the completion window expired."
    answer = {
        "id": f"batch_req_{batch_id[-16:]}{number:06x}",
        "custom_id": read_line(line).custom_id,
        "response": None,
        "error": {"code": "batch_expired", "message": message},
    }
    return msgspec.json.encode(answer)
