"""Who may call what: API keys on the public port, and operators' methods on their own."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping

from sapwood_common.api_keys import AUTHORIZATION_KEY, ApiKeys
from sapwood_common.errors import InvalidArgumentError, UnauthenticatedError, UnimplementedError
from sapwood_common.flags import service_flag
from sapwood_common.http2.turnstile import Rank
from sapwood_common.tenant import Tenant
from sapwood_router.caller import PRIORITY_KEY, TENANT_KEY, priority_of

tenant_var: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar("tenant", default=None)
"""The tenant whose API key the current task's request came with; None where no keys are asked for."""


class Guard:
    """Of the public ports, gRPC and HTTP.

    Args:
        keys: The API keys; None asks for none.
        public: Full names of the gRPC methods that are served here; None serves all.
    """

    def __init__(self, keys: ApiKeys | None, public: frozenset[str] | None = None) -> None:
        self._keys = keys
        self._public = public

    def check_call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Checks a gRPC call in its task.

        Raises:
            UnimplementedError: The method is for operators.
            SapwoodError: As :meth:`ApiKeys.check`.
        """
        if self._public is not None and method not in self._public:
            where = service_flag("router", "admin-port")
            raise UnimplementedError(f"{method} is for operators: it is served on {where} only, where one is set")
        values = [value for key, value in metadata if key == AUTHORIZATION_KEY]
        if len(values) > 1 and self._keys is not None:
            raise UnauthenticatedError("authorization is given more than once")
        self._check(values[0] if values else "")

    def check_headers(self, headers: Mapping[bytes, bytes]) -> None:
        """Checks an HTTP request in its task. Raises SapwoodError as :meth:`ApiKeys.check`."""
        self._check(headers.get(AUTHORIZATION_KEY.encode(), b""))

    def rank(self, headers: Iterable[tuple[bytes, bytes]]) -> Rank:
        """When a call begins that comes with many others: by its priority, and its tenant's in turn with others'. Takes nothing.

        Those without a key, such as probes, have a turn of their own, and so have those with one that is not known.
        """
        fields = dict(headers)
        authorization = fields.get(AUTHORIZATION_KEY.encode())
        try:
            priority = priority_of(fields.get(PRIORITY_KEY.encode(), b"").decode("latin-1"))
        except InvalidArgumentError:
            priority = 0  # it will be told so
        if self._keys is None:
            return priority, fields.get(TENANT_KEY.encode(), authorization)
        if authorization is None:
            return min(priority, 0), None
        try:
            tenant = self._keys.find(authorization.decode("latin-1"))
        except UnauthenticatedError:
            return min(priority, 0), UnauthenticatedError
        return min(priority, tenant.settings.priority), tenant.name

    def _check(self, authorization: str | bytes) -> None:
        if self._keys is None:
            return
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        tenant_var.set(self._keys.check(authorization))
