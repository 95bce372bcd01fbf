"""Prompts that clients ask to keep cached between their turns: each is pinned where it was answered, for as long as it may be.

A lease holds the tokens of one request: its prompt and its answer. Of a conversation the latest is kept alone: a request whose
prompt begins with the prompt of a lease takes its place. A tenant's leases hold a bounded number of tokens; where a new one does
not fit, those go first that are worth least: their tokens, which would be computed again, divided by the time since their use. A
lease is a hint: it never changes an answer, and where a worker cannot pin there is none.

O(leases of the tenant) for a request that asks for one. A worker ends a pin by itself when its time is over.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import SapwoodError
from sapwood_router.flow.sessions import Pins
from sapwood_router.request.context import RequestContext

logger = logging.getLogger(__name__)

_MOST_FULL = 64
"""All tenants together may have at most this many tenants' tokens."""


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """What a tenant may have.

    Attributes:
        tokens: Most that its leases hold together; 0: there are none.
        seconds: The longest time; longer ones are cut to it.
    """

    tokens: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Lease:
    """A lease; ``prompt`` says how many of its tokens were the prompt. Times are of the event loop's clock."""

    name: str
    kind: tuple[str, str, str]
    """Model, salt and adapter: prompts of others share nothing with it."""
    tokens: array[int]
    prompt: int
    worker: str
    until: float
    used: float


class CacheLeases:
    """The leases of one router's requests. Lives on one event loop.

    Args:
        limits: What a tenant may have.
        pins: Pins at workers.
        page_size: The tokens of a page of a worker's cache, by its address; 0: it is not known.
        clock: The event loop's.
    """

    def __init__(
        self, limits: LeaseLimits, pins: Pins, page_size: Callable[[str], int], clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._pins = pins
        self._page_size = page_size
        self._clock = clock
        self._tenants: dict[str, list[_Lease]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def writes(self, context: RequestContext) -> int:
        """How many tokens of a prompt, beyond those that were cached, its lease would keep: whole pages. 0 if there is none."""
        page = self._page_size(context.worker)
        if not context.hint.keep_seconds or not page or len(context.token_ids) > self._limits.tokens:
            return 0
        return max(0, len(context.token_ids) // page * page - context.cached_tokens)

    def take(self, context: RequestContext) -> None:
        """A request that asked for it was answered: keeps what it has cached, or lets go of what its conversation has."""
        if not self._page_size(context.worker):
            return
        tokens = array("I", context.token_ids)
        tokens.extend(context.output_ids)
        tenant, now = context.caller.tenant, self._clock()
        kind = (context.model or "", context.caller.cache_salt, context.lora)
        prompt = len(context.token_ids)
        own = [each for each in self._tenants.get(tenant, ()) if each.until > now]
        before = max(
            (each for each in own if each.kind == kind and each.prompt <= prompt and _begins(tokens, each)),
            key=lambda each: each.prompt,
            default=None,
        )
        if before is not None:
            own.remove(before)
        if context.hint.demote:
            self._keep(tenant, own)
            if before is not None:
                self._spawn(self._unpin(before))
            return
        gone: list[_Lease] = []
        held = sum(len(each.tokens) for each in own)
        while own and held + len(tokens) > self._limits.tokens:
            least = min(own, key=lambda each: len(each.tokens) / (now - each.used + 1.0))
            own.remove(least)
            gone.append(least)
            held -= len(least.tokens)
        fits = held + len(tokens) <= self._limits.tokens and self._room(tenant, held + len(tokens))
        if before is not None and (not fits or before.worker != context.worker):
            gone.append(before)
        if fits:
            goes_on = before is not None and before.worker == context.worker
            name = before.name if before is not None and goes_on else f"lease-{secrets.token_hex(16)}"
            seconds = min(context.hint.keep_seconds, self._limits.seconds)
            made = _Lease(name, kind, tokens, prompt, context.worker, now + seconds, now)
            own.append(made)
            self._spawn(self._pin(made, seconds))
        for each in gone:
            self._spawn(self._unpin(each))
        self._keep(tenant, own)

    def _keep(self, tenant: str, own: list[_Lease]) -> None:
        if own:
            self._tenants[tenant] = own
        else:
            self._tenants.pop(tenant, None)

    def held(self, tenant: str) -> int:
        """The tokens of a tenant's leases."""
        now = self._clock()
        return sum(len(each.tokens) for each in self._tenants.get(tenant, ()) if each.until > now)

    async def stop(self) -> None:
        """Ends background tasks; workers release pins by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _room(self, tenant: str, held: int) -> bool:
        """Whether all tenants have room for what one of them then holds."""
        now = self._clock()
        for other in [name for name, leases in self._tenants.items() if all(each.until <= now for each in leases)]:
            del self._tenants[other]
        others = sum(self.held(name) for name in self._tenants if name != tenant)
        return others + held <= _MOST_FULL * self._limits.tokens

    async def _pin(self, lease: _Lease, seconds: float) -> None:
        _, salt, lora = lease.kind
        try:
            await self._pins.pin(lease.worker, lease.name, lease.tokens, salt, seconds, lora)
        except SapwoodError as error:
            lease.until = 0.0
            logger.info("a prompt is not kept at %s: %s", lease.worker, error)

    async def _unpin(self, lease: _Lease) -> None:
        try:
            await self._pins.unpin(lease.worker, lease.name)
        except SapwoodError as error:
            logger.info("a prompt is kept at %s for longer: %s", lease.worker, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _begins(tokens: array[int], lease: _Lease) -> bool:
    """Whether tokens begin with a lease's prompt."""
    return tokens[: lease.prompt] == lease.tokens[: lease.prompt]
