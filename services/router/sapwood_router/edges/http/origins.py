"""Web pages: browsers send what any page asks of them, also to this machine and this network, and say whose page it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sapwood_common.host_names import is_own_machine
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.head import Headers

_ORIGIN = b"origin"
_METHOD_ASKED = b"access-control-request-method"
_HEADERS_ASKED = b"access-control-request-headers"
_METHODS = b"GET, POST, DELETE"
_SHOWN = (
    b"x-request-id, x-sapwood-worker, x-sapwood-resumptions, x-sapwood-notice, x-sapwood-ignored, "
    b"x-sapwood-objective, retry-after, retry-after-ms"
)
"""Headers of answers that a page may read beside the usual ones."""
_REMEMBERED = b"600"
"""Seconds that a browser need not ask again."""
_NAMES = re.compile(rb"[A-Za-z0-9_\-]+( *, *[A-Za-z0-9_\-]+)*")
_JSON = b"application/json"


class Origins:
    """Whose pages may ask.

    Args:
        allowed: Origins, such as ``https://chat.example``; ``*`` is all.
        own_page: Whether the router has a page of its own, which then may ask, too.
        any_name: Whether it may do so under any host name. Else it may only at an IP address, ``localhost`` or an origin that
            is ``allowed``: the owner of a name can make the name point to this machine, and the browser takes the two
            for one. Where keys are asked for his page has none.
        local: Whether the router is reached from its own machine alone. Nothing is then answered under other names.
    """

    def __init__(
        self, allowed: Sequence[str], *, own_page: bool = False, any_name: bool = False, local: bool = False
    ) -> None:
        self._allowed = frozenset(origin.encode("latin-1") for origin in allowed)
        self._own_page = own_page
        self._any_name = any_name
        self._local = local

    def check(self, headers: Mapping[bytes, bytes]) -> Headers:
        """The headers of an answer to a browser; empty for other clients.

        Raises:
            HttpError: The page is of an origin that may not ask: 403.
        """
        origin = headers.get(_ORIGIN)
        if origin is None:
            return ()
        if b"*" in self._allowed:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _SHOWN))
        if origin not in self._allowed:
            if self._own_page and origin.partition(b"://")[2] == headers.get(b"host", b"").lower():
                self.check_host(headers)
                return ()
            shown = origin[:100].decode("latin-1")
            raise HttpError(403, f"pages of {shown} may not ask: it is not among --cors-origins", field="origin")
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _SHOWN),
            (b"vary", b"origin"),
        )

    def check_name(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuses what is asked of a local router under the name of another machine, as pages of that name's owner ask. Browsers
        always say the name, and no origin where a page only gets something.

        Raises:
            HttpError: 403.
        """
        if self._local and headers.get(b"host"):
            self.check_host(headers)

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Lets the router's own page ask, under the name that the request was sent to. Browsers name no origin where a page
        only gets something from where it is from.

        Raises:
            HttpError: It may not under that name: 403.
        """
        host = headers.get(b"host", b"").lower()
        origins = frozenset((b"*", b"http://" + host, b"https://" + host))
        if not (self._any_name or is_own_machine(host.decode("latin-1")) or origins & self._allowed):
            shown = host[:100].decode("latin-1")
            raise HttpError(
                403,
                f"nobody may ask as {shown} here: use an IP address or localhost, "
                f"or let the router know the name (--cors-origins http://{shown})",
                field="host",
            )

    def permission(self, headers: Mapping[bytes, bytes]) -> Headers | None:
        """The answer to a browser's preflight request; None if the request is not one."""
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
        HttpError: The body has another content type, or is compressed: 415.
    """
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"", b"identity"):
        shown = coding[:100].decode("latin-1")
        raise HttpError(415, f"content-encoding may only be identity, got {shown!r}", field="content-encoding")
    given = headers.get(b"content-type")
    if given is None:
        return
    kind = given.partition(b";")[0].strip().lower()
    if kind != _JSON:
        shown = kind[:100].decode("latin-1")
        raise HttpError(415, f"content-type must be application/json, got {shown!r}", field="content-type")
