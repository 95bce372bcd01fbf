"""The gate of a service's port: health and reflection are for everybody, and who is refused is counted."""

from __future__ import annotations

import logging
import time

from sapwood_common.errors import SapwoodError
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.status import row_of
from sapwood_common.tenants.tenant import Tenant
from sapwood_net.http2.server.gate import Gate
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.http2.wire.header_reader import Headers
from sapwood_net.pacing.rate import Rate

logger = logging.getLogger(__name__)

FOR_EVERYBODY = ("/grpc.health.v1.", "/grpc.reflection.")
"""Beginnings of the names of methods that need no key and are not measured."""

_LINES_A_MINUTE = 120
"""Log lines about refused calls: a client that asks again and again must not fill the disk."""


class ServiceGate:
    """Implements :class:`Gate` around the gate that knows the service's keys.

    Args:
        gate: Asked about all other methods.
        telemetry: Counts the calls that it refuses.
    """

    def __init__(self, gate: Gate, telemetry: RpcTelemetry) -> None:
        self._gate = gate
        self._telemetry = telemetry
        self._lines = Rate(_LINES_A_MINUTE, time.monotonic)

    @property
    def asks_for_keys(self) -> bool:
        return self._gate.asks_for_keys

    def let_in(self, method: str, headers: Headers) -> Tenant | None:
        if method.startswith(FOR_EVERYBODY):
            return None
        try:
            return self._gate.let_in(method, headers)
        except SapwoodError as error:
            self._telemetry.refused(method, error)
            if not self._lines.wait():
                self._lines.take(1)
                logger.info("%s ends %s: %s", method, row_of(error).grpc.name, error.message)
            raise

    def rank(self, headers: Headers, tenant: Tenant | None) -> Rank:
        return self._gate.rank(headers, tenant)
