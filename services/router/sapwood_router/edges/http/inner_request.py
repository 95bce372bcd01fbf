"""A request that no client sent: a line of a batch, or a response in the background that is made again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from sapwood_common.tenants.tenant import Tenant
from sapwood_router.edges.http1.body import Body
from sapwood_router.edges.http1.head import Headers


class InnerHead:
    """What such a request says before its body. Attributes as those of :class:`Head`."""

    def __init__(self, path: str, fields: dict[bytes, bytes]) -> None:
        self.method = "POST"
        self.path = path
        self.query = ""
        self.fields = fields
        self.headers = list(fields.items())


class InnerRequest:
    """Stands where a client's request does, and keeps its answer.

    Args:
        path: The path.
        fields: The headers.
        body: The body.
        resumes: The id of the response that is made again; "": none is.

    Attributes:
        status: Of the answer, once there is one.
        headers: Of the answer.
        answer: Its body.
    """

    def __init__(self, path: str, fields: dict[bytes, bytes], body: bytes, resumes: str = "") -> None:
        self.resumes = resumes
        self.head = InnerHead(path, fields)
        self.started = False
        self.over = False
        self.left = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.answer = b""
        self._body = body

    def take_body(self, limit: int) -> bytes | None:
        """The body: it was checked for its length before."""
        return self._body

    async def receive_body(self, limit: int, look_at: Callable[[Body], Awaitable[None]] | None = None) -> bytes:
        """The body."""
        return self._body

    async def read_body(self) -> bytes:
        """The body, once."""
        body, self._body = self._body, b""
        return body

    def writable(self) -> bool:
        """Nobody is slow to read."""
        return True

    async def drained(self) -> None:
        """Returns at once."""

    async def respond(
        self, status: int, headers: Headers, body: bytes = b"", *, chunked: bool = False, last: bool = True
    ) -> None:
        """Keeps the answer's head and the first of its body."""
        self.started = True
        self.status = status
        self.headers = dict(headers)
        self.answer = body
        self.over = last

    async def send(self, body: bytes, *, last: bool) -> None:
        """Keeps more of the body."""
        self.answer += body
        self.over = last

    def write_chunk(self, body: bytes) -> None:
        """Keeps more of the body."""
        self.answer += body

    def watch(self, watcher: Callable[[], None]) -> None:
        """Nobody leaves."""

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Undoes nothing."""

    def abort(self) -> None:
        """There is no connection to close."""


class AskInner(Protocol):
    """Answers a request that no client sent, for a tenant."""

    async def __call__(self, request: InnerRequest, tenant: Tenant | None) -> None: ...
