"""Web pages: browsers send what any page asks of them, also to this machine and this network, and say whose page it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.head import Headers

_ORIGIN = b"origin"
_METHOD_ASKED = b"access-control-request-method"
_HEADERS_ASKED = b"access-control-request-headers"
_METHODS = b"GET, POST"
_SHOWN = b"x-request-id, x-sapwood-worker, x-sapwood-resumptions, retry-after, retry-after-ms"
"""Headers of answers that a page may read beside the usual ones."""
_REMEMBERED = b"600"
"""Seconds that a browser need not ask again."""
_NAMES = re.compile(rb"[A-Za-z0-9_\-]+( *, *[A-Za-z0-9_\-]+)*")
_JSON = b"application/json"


class Origins:
    """Whose pages may ask.

    Args:
        allowed: Origins, such as ``https://chat.example``; ``*`` is all.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.encode("latin-1") for origin in allowed)

    def check(self, headers: Mapping[bytes, bytes]) -> Headers:
        """What an answer says to the browser that asks; nothing for others than browsers.

        Raises:
            HttpError: The page is of an origin that may not ask: 403.
        """
        origin = headers.get(_ORIGIN)
        if origin is None:
            return ()
        if b"*" in self._allowed:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _SHOWN))
        if origin not in self._allowed:
            shown = origin[:100].decode("latin-1")
            raise HttpError(403, f"pages of {shown} may not ask: it is not among --cors-origins", field="origin")
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _SHOWN),
            (b"vary", b"origin"),
        )

    def permission(self, headers: Mapping[bytes, bytes]) -> Headers | None:
        """What is said to a browser that asks, before it asks for anything else, whether it may; None if this does not."""
        if _ORIGIN not in headers or _METHOD_ASKED not in headers:
            return None
        asked = headers.get(_HEADERS_ASKED, b"")
        allowed = ((b"access-control-allow-headers", asked),) if _NAMES.fullmatch(asked) else ()
        return (
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _REMEMBERED),
            *allowed,
        )


def check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """Lets JSON through, and what says nothing. Pages may send other types without asking first.

    Raises:
        HttpError: The body is said to be something else: 415.
    """
    given = headers.get(b"content-type")
    if given is None:
        return
    kind = given.partition(b";")[0].strip().lower()
    if kind != _JSON:
        shown = kind[:100].decode("latin-1")
        raise HttpError(415, f"content-type must be application/json, got {shown!r}", field="content-type")
