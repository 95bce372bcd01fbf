"""Responses that are made in the background, also if their router ends meanwhile.

While one is made there is a record of kind ``rerun`` with its request. The router that makes it says so every few seconds; a
record that nobody holds is taken up by the next router that looks, which asks the request again under the response's id, unless
the response has its end. So a response is made at least once, and one end of it is kept. A router whose record is gone, because
another one cancelled the response, ends its run and keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from sapwood_common.errors import InternalError, NotFoundError, SapwoodError, UnauthenticatedError
from sapwood_common.tenants.api_keys import until_revoked
from sapwood_common.tenants.tenant import Tenant
from sapwood_router.edges.guard import tenant_var
from sapwood_router.edges.http.inner_request import AskInner, InnerRequest
from sapwood_router.edges.responses.store import ResponseStore
from sapwood_router.edges.sending import Reader, collect
from sapwood_router.flow.generation import Generation, Pipeline
from sapwood_router.request.caller import TENANT_KEY
from sapwood_router.request.context import Finish, RequestContext
from sapwood_router.request.output import Output
from sapwood_router.store.records import Record, Store

logger = logging.getLogger(__name__)

PATH = "/v1/responses"
_HOLD_SECONDS, _LOOK_SECONDS = 15.0, 5.0
_READ_AT_ONCE = 4
"""Requests: each may have as many bytes as a body."""


class _Rerun(msgspec.Struct):
    """A request that is being answered: its body, and who answers it until when (seconds since 1970)."""

    body: bytes
    owner: str
    until: float


_DECODER = msgspec.msgpack.Decoder(_Rerun)


class Background:
    """The responses that this router makes.

    Args:
        store: Has the records.
        responses: Has the responses.
    """

    def __init__(self, store: Store, responses: ResponseStore) -> None:
        self._store = store
        self._responses = responses
        self._owner = secrets.token_hex(8)
        self._made: dict[tuple[str, str], tuple[asyncio.Task[None], list[Generation]]] = {}
        """Tenant and id -> the task, and the run once there is one."""

    async def begin(
        self,
        tenant: str,
        response_id: str,
        body: bytes,
        pipeline: Pipeline,
        context: RequestContext,
        ended: Callable[[Output, Finish], Awaitable[None]],
        failed: Callable[[SapwoodError], Awaitable[None]],
        reader: Reader | None,
    ) -> None:
        """Begins to make one.

        Args:
            tenant: Whose it is.
            response_id: Its id.
            body: The request.
            pipeline: Runs it.
            context: The request.
            ended: Takes its output at its end.
            failed: Takes the error if it has none.
            reader: Sees the output first.
        """
        runs: list[Generation] = []
        key = tenant_var.get()
        kept = False
        await self._store.put([self._record(tenant, response_id, body, _HOLD_SECONDS)])

        async def make() -> None:
            nonlocal kept
            holding = asyncio.create_task(self._hold(tenant, response_id, body, runs))
            try:
                try:
                    with until_revoked(key):
                        runs.extend(await pipeline.open_all([context]))
                        (whole,) = await collect(runs)
                        assert whole.finish is not None, "a run ends with a finish or an error"
                        if reader is not None:
                            await reader.read(whole)
                        if not holding.done():
                            await ended(whole.output, whole.finish)
                except SapwoodError as error:
                    if not holding.done():
                        await failed(error)
                except Exception:
                    logger.exception("response %s failed", response_id)
                    await failed(InternalError("internal error; the router's log has the details"))
                kept = True
                await self._store.delete("rerun", tenant, response_id)
            except SapwoodError as error:
                logger.error("response %s is not kept: %s", response_id, error.message)
            except asyncio.CancelledError:  # the router ends: another one need not wait
                with suppress(SapwoodError):
                    if kept:
                        await self._store.delete("rerun", tenant, response_id)
                    else:
                        await self._store.put([self._record(tenant, response_id, body, 0.0)])
                raise
            finally:
                holding.cancel()
                pipeline.close_all(runs)
                del self._made[tenant, response_id]

        self._made[tenant, response_id] = asyncio.create_task(make(), name=f"response {response_id}"), runs

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """Ends one early and returns once it is kept; does nothing if it has ended.

        Returns:
            Whether another router made it: then nothing is kept of it yet.
        """
        made = self._made.get((tenant, response_id))
        if made is None:
            return await self._store.delete("rerun", tenant, response_id)
        task, runs = made
        if not runs:
            await asyncio.sleep(0)  # it begins with the next turn of the event loop
        for run in runs:
            run.abort()
        await asyncio.wait([task])
        return False

    async def take_up(self, ask: AskInner, tenant_named: Callable[[str], Tenant] | None) -> None:
        """Makes responses again whose routers have ended, without end.

        Args:
            ask: Answers a request that no client sent.
            tenant_named: The tenant with an API key of this name, raises ``UnauthenticatedError``; None: no keys are asked for.
        """
        while True:
            try:
                await self._look(ask, tenant_named)
            except SapwoodError as error:
                logger.warning("responses in the background are not looked for now: %s", error.message)
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> None:
        """Ends what is made; the next router makes it again."""
        tasks = [task for task, _ in self._made.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, ask: AskInner, tenant_named: Callable[[str], Tenant] | None) -> None:
        after: tuple[str, str] | None = None
        while page := await self._store.every("rerun", after=after, limit=_READ_AT_ONCE):
            for record in page:
                after = record.tenant, record.key
                found = _DECODER.decode(record.body)
                if found.until > time.time() or after in self._made:
                    continue
                taken = self._record(record.tenant, record.key, found.body, _HOLD_SECONDS)
                if not await self._store.swap(msgspec.structs.replace(record, body=taken.body)):
                    continue
                if await self._is_done(record.tenant, record.key):
                    await self._store.delete("rerun", record.tenant, record.key)
                    continue
                fields = {b"host": b"127.0.0.1"}
                account = None
                if tenant_named is None and record.tenant:
                    fields[TENANT_KEY.encode()] = record.tenant.encode("latin-1")
                try:
                    account = None if tenant_named is None else tenant_named(record.tenant)
                except UnauthenticatedError:
                    await self._store.delete("rerun", record.tenant, record.key)
                    continue
                again = InnerRequest(PATH, fields, found.body, resumes=record.key)
                await asyncio.create_task(ask(again, account))
                if again.status >= 500 or again.status == 429:
                    continue  # it is taken up again
                if again.status != 200:
                    logger.warning("response %s cannot be made again: %d", record.key, again.status)
                    await self._store.delete("rerun", record.tenant, record.key)

    async def _is_done(self, tenant: str, response_id: str) -> bool:
        """Whether a response has its end, or is gone."""
        try:
            return (await self._responses.get(tenant, response_id)).done
        except NotFoundError:
            return True

    async def _hold(self, tenant: str, response_id: str, body: bytes, runs: list[Generation]) -> None:
        """Says now and then that it is made here; ends it once somebody has cancelled it elsewhere."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with suppress(SapwoodError):
                known = await self._store.get("rerun", tenant, response_id)
                if known is None:
                    for run in runs:
                        run.abort()
                    return
                held = self._record(tenant, response_id, body, _HOLD_SECONDS)
                await self._store.swap(msgspec.structs.replace(known, body=held.body))

    def _record(self, tenant: str, response_id: str, body: bytes, seconds: float) -> Record:
        encoded = msgspec.msgpack.encode(_Rerun(body, self._owner, time.time() + seconds))
        return Record("rerun", tenant, response_id, encoded)
