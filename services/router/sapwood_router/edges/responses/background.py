"""Responses that nobody waits for: each is made in a task, kept at its end, and may be cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sapwood_common.errors import InternalError, SapwoodError
from sapwood_common.tenants.api_keys import until_revoked
from sapwood_router.edges.guard import tenant_var
from sapwood_router.edges.sending import Reader, collect
from sapwood_router.flow.generation import Generation, Pipeline
from sapwood_router.request.context import Finish, RequestContext
from sapwood_router.request.output import Output

logger = logging.getLogger(__name__)


class Background:
    """The responses that are being made."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], tuple[asyncio.Task[None], list[Generation]]] = {}
        """Tenant and id -> the task, and the run once there is one."""

    def begin(
        self,
        tenant: str,
        response_id: str,
        pipeline: Pipeline,
        context: RequestContext,
        ended: Callable[[Output, Finish], object],
        failed: Callable[[SapwoodError], None],
        reader: Reader | None,
    ) -> None:
        """Begins to make one.

        Args:
            tenant: Whose it is.
            response_id: Its id.
            pipeline: Runs it.
            context: The request.
            ended: Takes its output at its end.
            failed: Takes the error if it has none.
            reader: Sees the output first.
        """
        runs: list[Generation] = []
        key = tenant_var.get()

        async def make() -> None:
            try:
                with until_revoked(key):
                    runs.extend(await pipeline.open_all([context]))
                    (whole,) = await collect(runs)
                    assert whole.finish is not None, "a run ends with a finish or an error"
                    if reader is not None:
                        await reader.read(whole)
                    ended(whole.output, whole.finish)
            except SapwoodError as error:
                failed(error)
            except Exception:
                logger.exception("response %s failed", response_id)
                failed(InternalError("internal error; the router's log has the details"))
            finally:
                pipeline.close_all(runs)
                del self._made[tenant, response_id]

        self._made[tenant, response_id] = asyncio.create_task(make(), name=f"response {response_id}"), runs

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Ends one early and returns once it is kept; does nothing if it has ended."""
        made = self._made.get((tenant, response_id))
        if made is None:
            return
        task, runs = made
        if not runs:
            await asyncio.sleep(0)  # it begins with the next turn of the event loop
        for run in runs:
            run.abort()
        await asyncio.wait([task])
