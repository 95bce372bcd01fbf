"""The gRPC server of a fake, which can be killed and started again on its port."""

from __future__ import annotations

import os
from collections.abc import Callable

import grpc

from sapwood_common.serving.server import Implementation, ServiceServer
from sapwood_testing.ports import port_of_its_own


class FakeServer:
    """A real server.

    Args:
        service: The service's short name, such as ``worker``.
        full_name: The name of its gRPC service.
        uncounted: Full names of its long-lived methods.

    Attributes:
        port: Where it listens; 0 before its first start.
    """

    def __init__(self, service: str, full_name: str, uncounted: frozenset[str]) -> None:
        self._service = service
        self._full_name = full_name
        self._uncounted = uncounted
        self._server: ServiceServer | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.port}"

    async def start(self, add: Callable[[grpc.aio.Server], None]) -> None:
        """Listens and serves at once; ``add`` adds the servicer."""
        self.port = self.port or port_of_its_own()
        self._server = ServiceServer(
            "127.0.0.1",
            self.port,
            [self._full_name],
            uncounted=self._uncounted,
            implementation=_implementation(self._service),
        )
        add(self._server.grpc)
        await self._server.start()
        await self._server.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health it reports."""
        assert self._server is not None
        await self._server.set_serving(serving)

    async def kill(self) -> None:
        """Cuts every connection without a goodbye."""
        if self._server is not None:
            await self._server.stop(0)
        self._server = None


def _implementation(service: str) -> Implementation:
    """What ``SAPWOOD_<SERVICE>_GRPC_SERVER`` says, as for the service itself."""
    return "grpcio" if os.environ.get(f"SAPWOOD_{service.upper()}_GRPC_SERVER") == "grpcio" else "sapwood"
