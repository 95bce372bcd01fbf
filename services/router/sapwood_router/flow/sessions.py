"""Sessions: texts that grow from request to request, each cached at the worker that answers it.

A session's tokens are kept here, so a lost worker costs the cache and nothing else: the next request computes them on another.
What the worker has cached of them is pinned there. Nobody holds the cache for ever: a session ends when it was not used for its
time to live, the worker releases a pin a little later by itself, and a tenant's sessions and their tokens are limited.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sapwood_common.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SapwoodError,
    UnimplementedError,
)

logger = logging.getLogger(__name__)

DEFAULT_TTL = 300.0
"""Seconds."""
_MOST_FULL = 64
"""All tenants together may have at most this many tenants' limits."""
_PIN_OUTLASTS = 30.0
"""Seconds by which a pin outlasts its session's time to live, if it is not released."""


class Pins(Protocol):
    """Pins prefixes at workers; see :class:`~sapwood_router.fleet.control.WorkerPins`."""

    async def pin(
        self, address: str, name: str, token_ids: Sequence[int], cache_salt: str, seconds: float, lora: str = ""
    ) -> int: ...

    async def unpin(self, address: str, name: str) -> None: ...


class Counters(Protocol):
    """Called with each request of a session that has ended."""

    def __call__(self, prompt_tokens: int, cached_tokens: int, *, moved: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a tenant may have.

    Attributes:
        sessions: Most at a time.
        tokens: Most that its sessions hold together; the answer that goes beyond is the last.
        ttl: Longest time to live, in seconds.
    """

    sessions: int
    tokens: int
    ttl: float


@dataclass(slots=True, eq=False)
class Session:
    """A session.

    Attributes:
        session_id: Its id, which nobody guesses.
        tenant: Whose it is.
        ttl: Seconds after its last use at which it ends.
        expires: When that is, on the event loop's clock.
        tokens: Prompts and answers so far.
        model: The model that has answered; empty: none has.
        cache_salt, lora: The salt and the adapter of its last request.
        worker: The address of the worker that answered last; empty: none has.
        pinned: Tokens pinned there.
        turns, prompt_tokens, cached_tokens: Requests that were answered, their prompts' tokens, and how many were cached.
        moves: How often another worker than before answered.
        busy: Whether a request is under way.
    """

    session_id: str
    tenant: str
    ttl: float
    expires: float
    tokens: array[int] = field(default_factory=lambda: array("I"))
    model: str = ""
    cache_salt: str = ""
    lora: str = ""
    worker: str = ""
    pinned: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moves: int = 0
    busy: bool = False
    closed: bool = False
    pinning: asyncio.Lock = field(default_factory=asyncio.Lock)
    pinned_at: str = ""


class SessionStore:
    """The sessions of one router, in memory. Lives on one event loop.

    Args:
        limits: What a tenant may have.
        pins: Pins at workers.
        counters: Counts.
        clock: The event loop's.
    """

    def __init__(self, limits: SessionLimits, pins: Pins, counters: Counters, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._pins = pins
        self._counters = counters
        self._clock = clock
        self._tenants: dict[str, dict[str, Session]] = {}
        """By tenant and id; the least recently used first."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def open(self, tenant: str, ttl: float | None = None, fork_of: str = "") -> Session:
        """A new session: empty, or with all that another holds, which it shares in the cache.

        Args:
            tenant: Whose it is.
            ttl: Seconds that it lives unused; None: 300, or as long as it may.
            fork_of: The other's id.

        Raises:
            InvalidArgumentError: ``ttl_seconds`` is out of range.
            NotFoundError: There is no such other.
            ResourceExhaustedError: The tenant has as many as it may.
            UnimplementedError: There are to be none.
        """
        if not self._limits.sessions:
            raise UnimplementedError("this router has no sessions")
        if ttl is None:
            ttl = min(DEFAULT_TTL, self._limits.ttl)
        if not 0 < ttl <= self._limits.ttl or math.isnan(ttl):
            raise InvalidArgumentError(
                f"ttl_seconds must be over 0 and at most {self._limits.ttl:g}", field="ttl_seconds"
            )
        other = self.get(tenant, fork_of, "fork_of") if fork_of else None
        own = self._tenants.get(tenant, {})
        if len(own) >= self._limits.sessions or len(self) >= _MOST_FULL * self._limits.sessions:
            raise ResourceExhaustedError(f"there are {len(own)} sessions already: close some", retry_after=1.0)
        if other is not None:
            self._check_room(tenant, len(other.tokens))
        session = Session(f"sess-{secrets.token_hex(16)}", tenant, ttl, self._clock() + ttl)
        self._tenants.setdefault(tenant, own)[session.session_id] = session
        if other is not None:
            session.tokens, session.model = other.tokens[:], other.model
            session.worker, session.cache_salt, session.lora = other.worker, other.cache_salt, other.lora
            self._use(other)
            self._spawn(self._pin(session))
        self._arm(session)
        return session

    def get(self, tenant: str, session_id: str, field: str = "session") -> Session:
        """A tenant's session. Raises NotFoundError, which names ``field``, where it has none of this id, or no longer."""
        session = self._tenants.get(tenant, {}).get(session_id)
        if session is None:
            raise NotFoundError(f"there is no session {session_id[:100]!r} here, or no longer", field=field)
        return session

    def close(self, tenant: str, session_id: str, field: str = "session") -> None:
        """Ends a session and releases its pins; a request under way still gets its answer. Raises as :meth:`get`."""
        self._end(self.get(tenant, session_id, field))

    def begin(self, tenant: str, session_id: str, model: str | None) -> OpenTurn:
        """A request that continues a session.

        Args:
            tenant: Whose it is.
            session_id: The session's id.
            model: The model that the request names.

        Raises:
            NotFoundError: As :meth:`get`.
            InvalidArgumentError: The session was answered by another model.
            ResourceExhaustedError: Another request of it is under way, or the tenant's sessions hold as much as they may.
        """
        session = self.get(tenant, session_id)
        if session.model and model not in (None, "", session.model):
            raise InvalidArgumentError(f"the session is of the model {session.model!r}", field="model")
        if session.busy:
            raise ResourceExhaustedError("another request of this session is under way", retry_after=1.0)
        self._check_room(tenant, 1)
        session.busy = True
        self._use(session)
        return OpenTurn(self, session)

    async def stop(self) -> None:
        """Ends background tasks; workers release pins by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def grown(self, session: Session, prompt_tokens: int, cached_tokens: int, *, moved: bool) -> None:
        """A request of a session has been answered: counts it, and pins what there is now."""
        self._counters(prompt_tokens, cached_tokens, moved=moved)
        self._use(session)
        if not session.closed:
            self._spawn(self._pin(session))

    def _use(self, session: Session) -> None:
        session.expires = self._clock() + session.ttl
        own = self._tenants.get(session.tenant, {})
        if own.pop(session.session_id, None) is not None:
            own[session.session_id] = session

    def _arm(self, session: Session) -> None:
        asyncio.get_running_loop().call_later(max(0.0, session.expires - self._clock()), self._expire, session)

    def _expire(self, session: Session) -> None:
        if session.closed:
            return
        if session.busy:
            self._use(session)
        if session.expires > self._clock():
            self._arm(session)
        else:
            self._end(session)

    def _end(self, session: Session) -> None:
        session.closed = True
        own = self._tenants[session.tenant]
        del own[session.session_id]
        if not own:
            del self._tenants[session.tenant]
        self._spawn(self._unpin(session))

    async def _pin(self, session: Session) -> None:
        """Pins all that a session holds where it was answered last, and nowhere else."""
        async with session.pinning:
            if session.closed or not session.worker:
                return
            if session.pinned_at not in ("", session.worker):
                await self._let_go(session)
            session.pinned_at = session.worker
            try:
                session.pinned = await self._pins.pin(
                    session.worker,
                    session.session_id,
                    session.tokens,
                    session.cache_salt,
                    session.ttl + _PIN_OUTLASTS,
                    session.lora,
                )
            except SapwoodError as error:
                session.pinned = 0
                logger.info("session %s is not pinned at %s: %s", session.session_id, session.worker, error)

    def _check_room(self, tenant: str, wanted: int) -> None:
        held = [sum(len(each.tokens) for each in own.values()) for own in self._tenants.values()]
        mine = sum(len(each.tokens) for each in self._tenants.get(tenant, {}).values())
        if mine + wanted > self._limits.tokens or sum(held) + wanted > _MOST_FULL * self._limits.tokens:
            raise ResourceExhaustedError(
                f"the sessions hold {mine} tokens of at most {self._limits.tokens}: close some", retry_after=1.0
            )

    async def _unpin(self, session: Session) -> None:
        async with session.pinning:
            await self._let_go(session)

    async def _let_go(self, session: Session) -> None:
        address, session.pinned_at, session.pinned = session.pinned_at, "", 0
        if not address:
            return
        try:
            await self._pins.unpin(address, session.session_id)
        except SapwoodError as error:
            logger.info("session %s is not unpinned at %s: %s", session.session_id, address, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class OpenTurn:
    """Implements :class:`~sapwood_router.request.context.SessionTurn`.

    Args:
        store: Has the session.
        session: The session.
    """

    def __init__(self, store: SessionStore, session: Session) -> None:
        self._store = store
        self._session = session
        self._over = False
        self.tokens: Sequence[int] = session.tokens
        self.worker = session.worker

    @property
    def model(self) -> str | None:
        """The session's model; None: it has none yet."""
        return self._session.model or None

    def commit(
        self,
        token_ids: Sequence[int],
        prompt_tokens: int,
        cached_tokens: int,
        model: str,
        worker: str,
        cache_salt: str,
        lora: str = "",
    ) -> None:
        if self._over:
            return
        session = self._session
        moved = session.worker not in ("", worker)
        session.tokens, session.model, session.worker = array("I", token_ids), model, worker
        session.cache_salt, session.lora = cache_salt, lora
        session.turns += 1
        session.prompt_tokens += prompt_tokens
        session.cached_tokens += cached_tokens
        session.moves += moved
        self.release()
        self._store.grown(session, prompt_tokens, cached_tokens, moved=moved)

    def release(self) -> None:
        if not self._over:
            self._over = True
            self._session.busy = False
