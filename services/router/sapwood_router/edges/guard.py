"""Decides who may call what: API keys on the public port, and operators' methods on a port of their own."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence

from sapwood_common.errors import InvalidArgumentError, UnauthenticatedError, UnimplementedError
from sapwood_common.settings.flags import service_flag
from sapwood_common.tenants.api_keys import AUTHORIZATION_KEY, ApiKeys
from sapwood_common.tenants.tenant import Tenant
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_router.request.caller import PRIORITY_KEY, TENANT_KEY, priority_of

_AUTHORIZATION = AUTHORIZATION_KEY.encode()
_API_KEY = b"x-api-key"
"""Anthropic's header for a key, over HTTP; where both are there the other one counts."""
Headers = Sequence[tuple[bytes, bytes]]

tenant_var: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar("tenant", default=None)
"""The tenant whose API key the current task's HTTP request came with; None where no keys are asked for."""


class Guard:
    """Implements :class:`Gate` for the public ports, gRPC and HTTP.

    Args:
        keys: The API keys; None asks for none.
        public: Full names of the gRPC methods that are served here; None serves all.
    """

    def __init__(self, keys: ApiKeys | None, public: frozenset[str] | None = None) -> None:
        self._keys = keys
        self._public = public

    @property
    def asks_for_keys(self) -> bool:
        return self._keys is not None

    def let_in(self, method: str, headers: Headers) -> Tenant | None:
        """Lets in a caller with a known key.

        Raises:
            UnimplementedError: The method is for operators.
            SapwoodError: As :meth:`ApiKeys.check`.
        """
        if self._public is not None and method not in self._public:
            where = service_flag("router", "admin-port")
            raise UnimplementedError(f"{method} is for operators: it is served on {where} only, where one is set")
        if self._keys is None:
            return None
        given = [value for name, value in headers if name == _AUTHORIZATION]
        if len(given) > 1:
            raise UnauthenticatedError(f"{AUTHORIZATION_KEY} is given more than once")
        return self._keys.check(given[0].decode("latin-1") if given else "")

    def check_headers(self, headers: Mapping[bytes, bytes]) -> None:
        """Checks an HTTP request in its task. Raises SapwoodError as :meth:`ApiKeys.check`."""
        self._check(_authorization(headers) or b"")

    def recognise(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Checks an HTTP request that only looks: takes nothing from its key's rate. Raises as :meth:`ApiKeys.find`.

        Returns:
            The tenant whose key it has; None: no keys are asked for.
        """
        if self._keys is None:
            return None
        return self._keys.find(headers.get(_AUTHORIZATION, b"").decode("latin-1")).name

    def rank(self, headers: Headers, tenant: Tenant | None) -> Rank:
        """Calls begin by priority; among equals, tenants take turns."""
        fields = dict(headers)
        try:
            priority = priority_of(fields.get(PRIORITY_KEY.encode(), b"").decode("latin-1"))
        except InvalidArgumentError:
            priority = 0  # the handler will refuse it with the field's name
        if self._keys is None:
            return Rank(priority, fields.get(TENANT_KEY.encode(), fields.get(_AUTHORIZATION)))
        if tenant is None:
            return Rank(min(priority, 0), stranger=True)
        return Rank(min(priority, tenant.settings.priority), tenant.name)

    def rank_request(self, headers: Headers) -> Rank:
        """The rank of an HTTP request whose key was not checked yet. Counts nothing against the key's rates.

        Requests without a key, such as probes, share one turn, and those with an unknown key share another.
        """
        authorization = _authorization(dict(headers))
        if self._keys is None or authorization is None:
            return self.rank(headers, None)
        try:
            tenant = self._keys.find(authorization.decode("latin-1"))
        except UnauthenticatedError:
            return self.rank(headers, None)._replace(caller=UnauthenticatedError)
        return self.rank(headers, tenant)

    def _check(self, authorization: str | bytes) -> None:
        if self._keys is None:
            return
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        tenant_var.set(self._keys.check(authorization))


def _authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The ``authorization`` header of an HTTP request; None if it has no key."""
    given, key = headers.get(_AUTHORIZATION), headers.get(_API_KEY)
    return b"Bearer " + key if given is None and key is not None else given
