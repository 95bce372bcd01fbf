"""``/v1/sessions``: opens (also as forks of others), shows and closes sessions. ``/v1/completions`` goes on with them."""

from __future__ import annotations

import asyncio

import msgspec

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.sessions import Session, SessionStore

PATH = "/v1/sessions"
_BELOW = f"{PATH}/"


class SessionRequest(msgspec.Struct):
    """``POST /v1/sessions``; ``fork_of`` is the id of another session, with whose tokens it begins."""

    ttl_seconds: float | None = None
    fork_of: str | None = None


class SessionObject(msgspec.Struct, kw_only=True):
    """A session.

    Attributes:
        id: Its id.
        model: The model that has answered; null: none has.
        tokens: How many it holds.
        pinned_tokens: How many of these the worker keeps cached.
        worker: The id of the worker that answered last; null: none has.
        turns, prompt_tokens, cached_tokens: Requests that were answered, their prompts' tokens, and how many were cached.
        moves: How often another worker than before answered.
        ttl_seconds: Seconds after its last use at which it ends.
        expires_in: Seconds until then.
    """

    id: str
    object: str = "session"
    model: str | None
    tokens: int
    pinned_tokens: int
    worker: str | None
    turns: int
    prompt_tokens: int
    cached_tokens: int
    moves: int
    ttl_seconds: float
    expires_in: float


class ClosedSession(msgspec.Struct):
    """A session that was closed."""

    id: str
    object: str = "session"
    deleted: bool = True


class SessionsApi:
    """The paths.

    Args:
        store: Has the sessions.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Post(PATH, self.open, summary="Opens a session", takes=(SessionRequest,), gives=SessionObject),
            Ask(_BELOW, self.show, summary="Shows a session", gives=SessionObject),
            Ask(_BELOW, self.close, method="DELETE", summary="Closes a session", gives=ClosedSession),
        ]

    async def open(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Opens a session. Raises as :meth:`SessionStore.open`."""
        request = convert(decode_object(body or b"{}"), SessionRequest, {}, left_out=exchange.left_out)
        session = await self._store.open(exchange.tenant, request.ttl_seconds, request.fork_of or "")
        await exchange.send_body(200, msgspec.json.encode(object_of(session, exchange.workers)))

    async def show(self, exchange: Exchange) -> None:
        """Shows a session. Raises NotFoundError where there is none."""
        session = await self._store.get(exchange.tenant, _id_in(exchange))
        await exchange.send_body(200, msgspec.json.encode(object_of(session, exchange.workers)))

    async def close(self, exchange: Exchange) -> None:
        """Closes a session. Raises NotFoundError where there is none."""
        session_id = _id_in(exchange)
        await self._store.close(exchange.tenant, session_id)
        await exchange.send_body(200, msgspec.json.encode(ClosedSession(session_id)))


def _id_in(exchange: Exchange) -> str:
    return exchange.path.removeprefix(_BELOW)


def object_of(session: Session, workers: WorkerNames) -> SessionObject:
    """The public description of a session."""
    return SessionObject(
        id=session.session_id,
        model=session.model or None,
        tokens=len(session.tokens),
        pinned_tokens=session.pinned,
        worker=workers.id_of(session.worker) or None,
        turns=session.turns,
        prompt_tokens=session.prompt_tokens,
        cached_tokens=session.cached_tokens,
        moves=session.moves,
        ttl_seconds=session.ttl,
        expires_in=max(0.0, session.expires - asyncio.get_running_loop().time()),
    )
