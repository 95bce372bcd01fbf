"""Sessions: texts that grow from request to request, each cached at the worker that answers it.

A session's tokens are kept in the router's store, so a lost worker costs the cache and nothing else: the next request computes
them on another. Routers that share a store continue each other's sessions, and so does a router that restarts. What the worker
has cached of them is pinned there. Nobody holds the cache for ever: a session ends when it was not used for its time to live, the
worker releases a pin a little later by itself, and a tenant's sessions and their tokens are limited.

Invariants: the record in the store is the session; what a router has of it in memory is a copy, which is read again where the
record's version is another. A turn is in the store before its client gets the end of the answer. A turn replaces only the version
that it began with: of two requests that continue a session on two routers at a time, the one that ends second fails.

Complexity: a turn reads the record twice at most and writes it once, O(tokens of the session).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from sapwood_common.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
    UnimplementedError,
)
from sapwood_router.store.records import Record, Store

KIND = "session"
_TOKEN_BITS = 21
"""A record's position is when it ends, in seconds since 1970, with its tokens in so many bits after that: so a tenant's sessions
and their tokens are counted without reading them."""
_MOST_COUNTED = (1 << _TOKEN_BITS) - 1
_AGAIN_SECONDS = 5.0
"""After this the store is asked again, if it does not answer whether a session has ended."""

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
        version: Of the record that this is a copy of.
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
    version: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    pinning: asyncio.Lock = field(default_factory=asyncio.Lock)
    pinned_at: str = ""


class _Kept(msgspec.Struct, frozen=True):
    """A session as the store has it; ``until`` in seconds since 1970."""

    ttl: float
    until: float
    tokens: bytes
    model: str
    cache_salt: str
    lora: str
    worker: str
    turns: int
    prompt_tokens: int
    cached_tokens: int
    moves: int


class SessionStore:
    """The sessions. Lives on one event loop.

    Args:
        limits: What a tenant may have.
        pins: Pins at workers.
        counters: Counts.
        clock: The event loop's.
        store: Has the records.
        wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        limits: SessionLimits,
        pins: Pins,
        counters: Counters,
        clock: Callable[[], float],
        store: Store,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._pins = pins
        self._counters = counters
        self._clock = clock
        self._store = store
        self._wall_clock = wall_clock
        self._tenants: dict[str, dict[str, Session]] = {}
        """By tenant and id those that this router has met; the least recently used first."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    async def open(self, tenant: str, ttl: float | None = None, fork_of: str = "") -> Session:
        """A new session: empty, or with all that another holds, which it shares in the cache.

        Args:
            tenant: Whose it is.
            ttl: Seconds that it lives unused; None: 300, or as long as it may.
            fork_of: The other's id.

        Raises:
            InvalidArgumentError: ``ttl_seconds`` is out of range.
            NotFoundError: There is no such other.
            ResourceExhaustedError: The tenant has as many as it may.
            UnavailableError: The store does not answer.
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
        other = await self.get(tenant, fork_of, "fork_of") if fork_of else None
        await self._check_room(tenant, 0 if other is None else len(other.tokens), opens=True)
        session = Session(f"sess-{secrets.token_hex(16)}", tenant, ttl, self._clock() + ttl)
        if other is not None:
            session.tokens, session.model = other.tokens[:], other.model
            session.worker, session.cache_salt, session.lora = other.worker, other.cache_salt, other.lora
        await self._store.add(self._record(session))
        self._meet(session)
        if other is not None:
            self.stay(other)
            self._spawn(self._pin(session))
        return session

    async def get(self, tenant: str, session_id: str, field: str = "session") -> Session:
        """A tenant's session.

        Raises:
            NotFoundError: It has none of this id, or no longer; names ``field``.
            UnavailableError: The store does not answer.
        """
        record = await self._store.get(KIND, tenant, session_id)
        session = self._tenants.get(tenant, {}).get(session_id)
        kept = None if record is None else msgspec.msgpack.decode(record.body, type=_Kept)
        if record is None or kept is None or kept.until <= self._wall_clock():
            if session is not None:
                self._end(session)
            raise NotFoundError(f"there is no session {session_id[:100]!r} here, or no longer", field=field)
        if session is None:
            session = Session(session_id, tenant, kept.ttl, 0.0, version=-1)
            self._read(session, record, kept)
            self._meet(session)
        elif session.version != record.version and not session.busy:
            self._read(session, record, kept)
        return session

    async def close(self, tenant: str, session_id: str, field: str = "session") -> None:
        """Ends a session and releases its pins; a request under way still gets its answer. Raises as :meth:`get`."""
        session = await self.get(tenant, session_id, field)
        await self._store.delete(KIND, tenant, session_id)
        self._end(session)

    async def begin(self, tenant: str, session_id: str, model: str | None) -> OpenTurn:
        """A request that continues a session.

        Args:
            tenant: Whose it is.
            session_id: The session's id.
            model: The model that the request names.

        Raises:
            NotFoundError, UnavailableError: As :meth:`get`.
            InvalidArgumentError: The session was answered by another model.
            ResourceExhaustedError: Another request of it is under way, or the tenant's sessions hold as much as they may.
        """
        session = await self.get(tenant, session_id)
        if session.model and model not in (None, "", session.model):
            raise InvalidArgumentError(f"the session is of the model {session.model!r}", field="model")
        if session.busy:
            raise ResourceExhaustedError("another request of this session is under way", retry_after=1.0)
        session.busy = True
        try:
            await self._check_room(tenant, 1)
            if session.expires - self._clock() < session.ttl / 2:
                await self._stay(session)
        except BaseException:
            session.busy = False
            raise
        return OpenTurn(self, session)

    async def stop(self) -> None:
        """Ends background tasks; workers release pins by themselves, and the store keeps the sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def grow(self, session: Session, grown: _Kept) -> bool:
        """A request of a session is answered: writes it.

        Args:
            session: The session.
            grown: What it is with the answer.

        Returns:
            False: it has ended meanwhile.

        Raises:
            ResourceExhaustedError: Another router's request of it was answered meanwhile.
            UnavailableError: The store does not answer.
        """
        async with session.writing:
            if session.closed:
                return False
            record = self._record_of(session, grown)
            if not await self._store.swap(record):
                if await self._store.get(KIND, session.tenant, session.session_id) is not None:
                    raise ResourceExhaustedError("the session went on with another request meanwhile", retry_after=1.0)
                self._end(session)
                return False
            moved, before = session.worker not in ("", grown.worker), session
            prompt, cached = grown.prompt_tokens - before.prompt_tokens, grown.cached_tokens - before.cached_tokens
            pinned_at = session.pinned_at
            self._read(session, msgspec.structs.replace(record, version=record.version + 1), grown)
            session.pinned_at = pinned_at
        self._counters(prompt, cached, moved=moved)
        if not session.closed:
            self._spawn(self._pin(session))
        return True

    def grown(self, session: Session, tokens: Sequence[int], **changed: Any) -> _Kept:
        """A session as it is with ``tokens`` and what else has changed."""
        held = array("I", tokens).tobytes()
        return msgspec.structs.replace(self._kept(session), tokens=held, **changed)

    async def _stay(self, session: Session) -> None:
        """The session is used: it lives as long as if it began now."""
        async with session.writing:
            kept = self._kept(session)
            if not session.closed and await self._store.swap(self._record_of(session, kept)):
                session.version += 1
                session.expires = self._clock() + session.ttl

    def stay(self, session: Session) -> None:
        """Has it live on, soon."""

        async def stay() -> None:
            try:
                await self._stay(session)
            except UnavailableError as error:
                logger.warning("the session %s may end early: %s", session.session_id, error.message)

        self._spawn(stay())

    def _kept(self, session: Session) -> _Kept:
        return _Kept(
            session.ttl,
            self._wall_clock() + session.ttl,
            session.tokens.tobytes(),
            session.model,
            session.cache_salt,
            session.lora,
            session.worker,
            session.turns,
            session.prompt_tokens,
            session.cached_tokens,
            session.moves,
        )

    def _record(self, session: Session) -> Record:
        return self._record_of(session, self._kept(session))

    @staticmethod
    def _record_of(session: Session, kept: _Kept) -> Record:
        ends = math.ceil(kept.until)
        return Record(
            KIND,
            session.tenant,
            session.session_id,
            msgspec.msgpack.encode(kept),
            position=(ends << _TOKEN_BITS) + min(_MOST_COUNTED, len(kept.tokens) // session.tokens.itemsize),
            expires=ends,
            version=session.version,
        )

    def _read(self, session: Session, record: Record, kept: _Kept) -> None:
        """Makes the copy what the record says."""
        session.tokens = array("I", kept.tokens)
        session.expires = self._clock() + kept.until - self._wall_clock()
        session.version = record.version
        session.model, session.worker, session.pinned_at = kept.model, kept.worker, kept.worker
        session.cache_salt, session.lora = kept.cache_salt, kept.lora
        session.turns, session.moves = kept.turns, kept.moves
        session.prompt_tokens, session.cached_tokens = kept.prompt_tokens, kept.cached_tokens
        own = self._tenants.get(session.tenant, {})
        if own.pop(session.session_id, None) is not None:
            own[session.session_id] = session

    def _meet(self, session: Session) -> None:
        self._tenants.setdefault(session.tenant, {})[session.session_id] = session
        self._arm(session, session.expires - self._clock())

    def _arm(self, session: Session, seconds: float) -> None:
        asyncio.get_running_loop().call_later(max(0.0, seconds), self._look, session)

    def _look(self, session: Session) -> None:
        if not session.closed:
            if session.expires > self._clock():
                self._arm(session, session.expires - self._clock())
            else:
                self._spawn(self._expire(session))

    async def _expire(self, session: Session) -> None:
        """Its time is over, unless another router has used it, or a request of it is under way."""
        try:
            if session.busy:
                await self._stay(session)
            else:
                await self.get(session.tenant, session.session_id)
        except NotFoundError:
            return
        except UnavailableError as error:
            logger.warning("whether the session %s has ended is not known: %s", session.session_id, error.message)
        self._arm(session, max(session.expires - self._clock(), min(_AGAIN_SECONDS, session.ttl)))

    def _end(self, session: Session) -> None:
        if session.closed:
            return
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

    async def _check_room(self, tenant: str, wanted: int, *, opens: bool = False) -> None:
        """Raises ResourceExhaustedError where a tenant's sessions, on all routers, leave no room for so many more tokens."""
        now = self._wall_clock()
        living = [each for each in await self._store.positions(KIND, tenant, "") if each >> _TOKEN_BITS >= now]
        limits = self._limits
        if opens and (len(living) >= limits.sessions or len(self) >= _MOST_FULL * limits.sessions):
            raise ResourceExhaustedError(f"there are {len(living)} sessions already: close some", retry_after=1.0)
        mine = sum(each & _MOST_COUNTED for each in living)
        held = sum(len(each.tokens) for own in self._tenants.values() for each in own.values())
        if wanted and (mine + wanted > limits.tokens or held + wanted > _MOST_FULL * limits.tokens):
            raise ResourceExhaustedError(
                f"the sessions hold {mine} tokens of at most {limits.tokens}: close some", retry_after=1.0
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
        self._timer = asyncio.get_running_loop().call_later(session.ttl / 2, self._goes_on)

    @property
    def model(self) -> str | None:
        """The session's model; None: it has none yet."""
        return self._session.model or None

    async def commit(
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
        grown = self._store.grown(
            session,
            token_ids,
            model=model,
            worker=worker,
            cache_salt=cache_salt,
            lora=lora,
            turns=session.turns + 1,
            prompt_tokens=session.prompt_tokens + prompt_tokens,
            cached_tokens=session.cached_tokens + cached_tokens,
            moves=session.moves + (session.worker not in ("", worker)),
        )
        try:
            await self._store.grow(session, grown)
        finally:
            self.release()

    def release(self) -> None:
        if not self._over:
            self._over = True
            self._timer.cancel()
            self._session.busy = False

    def _goes_on(self) -> None:
        """The request runs for long: the session lives on."""
        if not self._over:
            self._store.stay(self._session)
            self._timer = asyncio.get_running_loop().call_later(self._session.ttl / 2, self._goes_on)
