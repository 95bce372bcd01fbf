"""Requests of HTTP/1.1 as bytes, and a handler that reads their bodies."""

from __future__ import annotations

from sapwood_common.errors import RequestCancelledError, UnavailableError
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.request import Request

GET = b"GET /a HTTP/1.1\r\nHost: a\r\n"
"""A head without its last line."""
PLAIN = GET + b"\r\n"
KB, MB = 1024, 1024 * 1024


def post(length: int, headers: bytes = b"") -> bytes:
    """The head of a request whose body has so many bytes."""
    return b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n" % (length, headers)


async def wait_and_tell(request: Request) -> None:
    """A handler that reads the body, and tells the client why it cannot."""
    try:
        body = await request.receive_body(1 << 20)
    except (HttpError, UnavailableError) as error:
        await request.respond(503 if isinstance(error, UnavailableError) else error.status, [])
    except RequestCancelledError:
        return
    else:
        await request.respond(200, [], b"%d" % len(body))
