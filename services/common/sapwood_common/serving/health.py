"""The standard gRPC health service: Check, List and Watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_State = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The states of services by name; ``""`` is the server as a whole.

    grpcio-health-checking's own servicer holds a lock while it writes to a watcher: a watcher that reads nothing would keep a
    server from saying that it drains. It has no List either.
    """

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set at the next change; a new event then takes its place."""

    def set(self, name: str, serving: bool) -> None:
        """Sets a service's state; those who watch it are told."""
        self._states[name] = _State.SERVING if serving else _State.NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        """The state of one service; NOT_FOUND for a name that is none."""
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        return _State(status=self._states[request.service])

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        """The state of every service."""
        states = {name: _State(status=state) for name, state in self._states.items()}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:  # noqa: N802
        """The state of one service now and after each change; SERVICE_UNKNOWN for a name that is none yet."""
        told = None
        while True:
            changed, state = self._changed, self._states.get(request.service, _State.SERVICE_UNKNOWN)
            if state != told:
                told = state
                yield _State(status=state)
            await changed.wait()
