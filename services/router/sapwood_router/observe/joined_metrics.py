"""Other services' metrics on the router's own page, where one address is all that can be reached of them."""

from __future__ import annotations

import http.client
import logging
import socket
from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sapwood_net.sockets.unix_socket import is_unix

logger = logging.getLogger(__name__)

_SECONDS = 2.0
"""For each of the services: the page waits for them one after the other."""
_PREFIXES = ("sapwood_tokenizer_", "sapwood_worker_")
"""What all services have (``process_``, ``sapwood_rpc_``) is the router's on its page."""


class JoinedMetrics(Collector):
    """For a registry: what a tokenizer and a worker show of themselves. One that does not answer is left out, and logged.

    Args:
        addresses: Where their /metrics are: ``host:port`` or ``unix:PREFIX:NUMBER``. The first of two workers is shown.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def collect(self) -> Iterable[Metric]:
        """Asks them; blocks, so it is called in a thread."""
        families: dict[str, Metric] = {}
        for address in self._addresses:
            try:
                for family in text_string_to_metric_families(_page(address)):
                    if family.name.startswith(_PREFIXES):
                        families.setdefault(family.name, family)
            except (OSError, http.client.HTTPException, ValueError) as error:
                logger.warning("metrics of %s: %s", address, error)
        return families.values()


def _page(address: str) -> str:
    connection = _UnixConnection(address) if is_unix(address) else http.client.HTTPConnection(address, timeout=_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = address.removeprefix("unix:")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)
