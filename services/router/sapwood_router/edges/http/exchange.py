"""One HTTP request and its response: a body or events out, the client's leaving in."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import parse_qsl

from sapwood_common.contract.limits import MOST_PRIORITY
from sapwood_common.errors import InvalidArgumentError, RequestCancelledError, SapwoodError
from sapwood_common.telemetry.logs import REQUEST_ID_KEY, new_request_id, request_id_var
from sapwood_common.tenants.tenant import mint_salt
from sapwood_net.pacing.heavy_work import LARGE, HeavyWork, Stint
from sapwood_net.pacing.steps import ResultT, Steps, in_turns
from sapwood_router.edges.guard import tenant_var
from sapwood_router.edges.http.errors import Dialect, retry_headers
from sapwood_router.edges.http.json_size import SMALL, check_size, most_values, size_steps
from sapwood_router.edges.http.left_out import LEFT_OUT_HEADER, LeftOut, LeftOutLog
from sapwood_router.edges.http1.body import Body
from sapwood_router.edges.http1.head import Headers
from sapwood_router.edges.http1.request import Request
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.client import READER_SLACK
from sapwood_router.request.caller import NOBODY, PRIORITY_KEY, SESSION_KEY, TENANT_KEY, Caller, caller_of, in_session
from sapwood_router.request.context import accept_request_id
from sapwood_router.request.objective import EACH_TOKEN_KEY, FIRST_TOKEN_KEY

_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
"""Parameters of vLLM and OpenAI for routing. Requests with the same value are of one session or user, or share a beginning."""
_SESSIONS = frozenset(_SESSION_FIELDS)
_CALLER_HEADERS = frozenset(
    key.encode() for key in (TENANT_KEY, PRIORITY_KEY, SESSION_KEY, FIRST_TOKEN_KEY, EACH_TOKEN_KEY)
)
_REQUEST_ID_HEADER = REQUEST_ID_KEY.encode()
_PIECE_SECONDS = 60.0
_JSON = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would collect the events
]


class Said(Protocol):
    """Fields about the request itself, which every body may have."""

    request_id: str | None
    rid: str | None
    priority: int | None
    cache_salt: str | None


class Exchange:
    """A request being answered.

    Args:
        request: As it came.
        dialect: The format of its errors.
        log: Keeps what was left out of any request.
        path: What its route is found by; None: as it came.
        workers: Names workers for clients.

    Attributes:
        left_out: The ignored parameters; the answer's headers name them.
        workers: The argument.
        extra_headers: Headers of the response, whatever it is.
        stream_headers: Headers of a response of events.
        resumes: The id of the response that is made again; "": it is a new one.
        before_last: Done once, before the client has the last of its answer; if that fails, the answer does.
        writable: Says whether :attr:`write_events` may be called.
        write_events: Sends encoded events, in this turn of the loop. Only while no :meth:`send_events` is awaited, and after one
            was.
    """

    def __init__(
        self,
        request: Request,
        dialect: Dialect,
        log: LeftOutLog | None = None,
        path: str | None = None,
        workers: WorkerNames | None = None,
    ) -> None:
        self.dialect = dialect
        self.workers = workers or WorkerNames(b"")
        self.left_out = LeftOut(log or LeftOutLog())
        self.headers: dict[bytes, bytes] = request.head.fields
        self.method = request.head.method
        self.path = path or request.head.path
        self.request_id = new_request_id()
        self.client_left = False
        self.extra_headers: Headers = ()
        self.stream_headers: Headers = _EVENTS
        self.before_last: Callable[[], Awaitable[object]] | None = None
        self.resumes = request.resumes
        self.writable = request.writable
        self.write_events = request.write_chunk
        self._request = request
        self._watcher: Callable[[], None] | None = None
        self._deadline = math.inf
        self._stint: Stint | None = None
        """The work of a large request, or of one with many values: pieces of it have turns."""

    @property
    def query(self) -> dict[str, str]:
        """The query parameters by name; if a name is repeated, the last value."""
        return dict(parse_qsl(self._request.head.query))

    @property
    def started(self) -> bool:
        """Whether the response has begun."""
        return self._request.started

    def accept_request_id(self) -> None:
        """Takes the client's id over.

        Raises:
            InvalidArgumentError: It is unfit for headers and logs.
        """
        given = self.headers.get(_REQUEST_ID_HEADER, b"").decode("latin-1")
        if given:
            self.request_id = accept_request_id(given, REQUEST_ID_KEY)

    def accept_body_id(self, request: Said) -> None:
        """Takes over the id that the body names, unless a header did.

        Raises:
            InvalidArgumentError: It is unfit for headers and logs.
        """
        for field, given in (("request_id", request.request_id), ("rid", request.rid)):
            if given and not self.headers.get(_REQUEST_ID_HEADER):
                self.request_id = accept_request_id(given, field)
                request_id_var.set(self.request_id)

    def take_body(self, limit: int) -> bytes | None:
        """The request's body of JSON, if it is small, no larger than ``limit`` bytes, and all here; else it is to be received."""
        return self._request.take_body(min(limit, SMALL - 1))

    async def receive_body(self, limit: int, heavy: HeavyWork, longest_context: Callable[[], int]) -> bytes:
        """The request's body of JSON, which may have ``limit`` bytes.

        Args:
            limit: The most bytes.
            heavy: A large one, or one with many values, is looked at and parsed in its turns.
            longest_context: The longest of all models, in tokens: the size limit of a body depends on it.

        Raises:
            SapwoodError: It does not come as it should, or has far too many values.
        """
        stint = heavy.stint(self.tenant, begun=False)

        async def look_at(body: Body) -> None:
            if body.size < LARGE:
                if body.size >= SMALL and check_size(body.whole):
                    self._stint = stint
                    await stint.turn()
                return
            self._stint = stint
            await stint.turn()
            for _ in size_steps(body.whole, most_values(longest_context())):
                await stint.pause()
                if body.error is not None:  # it was given up, and is to leave the memory
                    raise body.error
            await stint.turn()

        return await self._request.receive_body(limit, look_at)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The request's body of any kind, piece by piece as it comes.

        Raises:
            SapwoodError: It does not come as it should.
        """
        while piece := await self._request.read_body():
            yield piece

    async def pause(self) -> None:
        """Lets others continue where the request is large, or has many values, unless the piece of work so far was short."""
        if self._stint is not None:
            await self._stint.pause()

    async def in_turns(self, steps: Steps[ResultT]) -> ResultT:
        """Does what can be cut anywhere: others continue now and then where the request is a large one. Raises what it does."""
        return await in_turns(steps, self._stint)

    def deadline(self, most: float) -> float:
        """When the answer has to be there, on the event loop's clock: as the client asks, at the latest in ``most`` seconds.

        Raises:
            InvalidArgumentError: What it asks is no time.
        """
        self._deadline = asyncio.get_running_loop().time() + min(most, asked_timeout(self.headers))
        return self._deadline

    def sooner(self, deadline: float) -> float:
        """The deadline of an answer in one piece: ``deadline``, or earlier if the client says when it leaves, as OpenAI's do.

        To be called after the body was read.
        """
        timeout = client_timeout(self.headers)
        if timeout == math.inf:
            return deadline
        return min(deadline, asyncio.get_running_loop().time() + timeout + CLIENT_SLACK)

    def caller(self, request: Said, given: Mapping[str, Any]) -> Caller:
        """The caller, as the headers say, or the body where they say nothing.

        Args:
            request: The body; its ``cache_salt`` keeps what is cached for it apart within the tenant.
            given: The same as it came.

        Raises:
            InvalidArgumentError: A header or a field makes no sense.
        """
        named = tenant_var.get() is not None or request.priority is not None or bool(request.cache_salt)
        if not named and _SESSIONS.isdisjoint(given) and _CALLER_HEADERS.isdisjoint(self.headers):
            return NOBODY  # the usual case, in a tenth of the time
        # vLLM's priorities count the other way: the lowest goes first.
        priority = None if request.priority is None else str(min(max(-request.priority, -MOST_PRIORITY), MOST_PRIORITY))

        def said(key: str) -> str | None:
            return self._header(key) or (priority if key == PRIORITY_KEY else "")

        caller = caller_of(said, tenant_var.get())
        if request.cache_salt:
            # No tenant has such a name: without API keys a salt would else be that of the tenant who is called so.
            caller = replace(caller, cache_salt=mint_salt(f"\0{request.cache_salt}", caller.cache_salt))
        if not caller.session:
            for field in _SESSION_FIELDS:
                if session := given.get(field):
                    if not isinstance(session, str):
                        raise InvalidArgumentError(f"{field} must be a string", field=field)
                    return in_session(caller, session)
        return caller

    @property
    def tenant(self) -> str:
        """The tenant whose request it is; "" where nothing says so."""
        return caller_of(self._header, tenant_var.get()).tenant

    def _header(self, key: str) -> str:
        return self.headers.get(key.encode(), b"").decode("latin-1")

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Calls back as soon as the client leaves, and then cancels the current task. Only after the body was read."""
        task = asyncio.current_task()
        assert task is not None

        def left() -> None:
            self.client_left = True
            callback()
            task.cancel()

        self._watcher = left
        self._request.watch(left)

    def close(self) -> None:
        """Stops watching the client."""
        if self._watcher is not None:
            self._request.unwatch(self._watcher)
            self._watcher = None

    async def send_body(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """A complete JSON response."""
        await self.send_page(status, [_JSON, *headers], body)

    async def send_page(self, status: int, headers: Headers, body: bytes) -> None:
        """A complete response of any kind."""
        await self._do_before_last()
        await self._send_first(status, headers, body, chunked=False, last=True)

    async def send_pieces(self, headers: Headers, pieces: AsyncIterator[bytes]) -> None:
        """A response of any kind and length, as its pieces come. Waits for the client to read.

        Raises:
            RequestCancelledError: The client has left, or takes too long to read a piece.
        """
        await self._send_first(200, headers, b"", chunked=True, last=False)
        try:
            async for piece in pieces:
                async with asyncio.timeout(_PIECE_SECONDS):
                    await self._request.send(piece, last=False)
                    if not self._request.writable():
                        await self._request.drained()
        except TimeoutError:
            self._request.abort()
            raise RequestCancelledError("the client does not read its answer") from None
        await self._request.send(b"", last=True)

    async def send_error(self, error: SapwoodError, headers: Headers = ()) -> None:
        """An error response; within a stream of events an error event, after which the stream ends."""
        error = self.workers.for_client(error)
        if not self.started:
            status, body = self.dialect.status(error), self.dialect.body(error, self.request_id)
            await self.send_body(status, body, [*retry_headers(error), *headers])
            return
        with contextlib.suppress(RequestCancelledError):  # nobody is there to be told
            await self.send_events(self.dialect.event(error, self.request_id), last=True)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Encoded events; the first call starts the response.

        Raises:
            RequestCancelledError: As :meth:`drained`.
        """
        if last:
            await self._do_before_last()
        if not self.started:
            await self._send_first(200, self.stream_headers, events, chunked=True, last=last)
            return
        if not self._request.writable():
            await self.drained()
        await self._request.send(events, last=last)

    async def drained(self) -> None:
        """Returns once :attr:`writable`.

        Raises:
            RequestCancelledError: The client has left, or read nothing until the deadline: nobody else would end its request.
        """
        try:
            async with asyncio.timeout_at(self._deadline + READER_SLACK):
                await self._request.drained()
        except TimeoutError:
            self.client_left = True
            self._request.abort()
            raise RequestCancelledError("the client does not read its answer") from None

    async def _do_before_last(self) -> None:
        waiting, self.before_last = self.before_last, None
        if waiting is not None:
            await waiting()

    async def _send_first(self, status: int, headers: Headers, body: bytes, *, chunked: bool, last: bool) -> None:
        request_id = self.request_id.encode("ascii")
        headers = (*headers, *self.extra_headers, (_REQUEST_ID_HEADER, request_id))
        if names := self.left_out.header():
            headers = (*headers, (LEFT_OUT_HEADER, names))
        if self.dialect.id_header is not None:
            headers = (*headers, (self.dialect.id_header, request_id))
        await self._request.respond(status, headers, body, chunked=chunked, last=last)


TIMEOUT_KEY = "x-request-timeout"
"""Seconds from the request's arrival to the last of its answer."""
_TIMEOUT_HEADER = TIMEOUT_KEY.encode()
_CLIENT_HEADERS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""The header of OpenAI's own clients, in Python and in JavaScript: seconds until they leave without an answer."""
CLIENT_SLACK = 1.0
"""Seconds beyond these: the client leaves first, and its program sees the client's own error for that and no 504."""


def asked_timeout(headers: Mapping[bytes, bytes]) -> float:
    """Seconds that the request may take; infinite if it does not say.

    Raises:
        InvalidArgumentError: What it says is no time.
    """
    given = headers.get(_TIMEOUT_HEADER)
    if not given:
        return math.inf
    seconds = _seconds(given)
    if seconds is None:
        raise InvalidArgumentError(
            f"{TIMEOUT_KEY} must be a number of seconds above 0, got {given[:20].decode('latin-1')!r}",
            field=TIMEOUT_KEY,
        )
    return seconds


def client_timeout(headers: Mapping[bytes, bytes]) -> float:
    """Seconds after which OpenAI's client leaves if it has read nothing; infinite for others.

    For an answer in one piece that is all the time there is; of a stream it says nothing but when the first event is due.
    """
    for name in _CLIENT_HEADERS:
        if given := headers.get(name):
            return _seconds(given) or math.inf  # not a client's user's to mend
    return math.inf


def _seconds(given: bytes) -> float | None:
    try:
        seconds = float(given)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
