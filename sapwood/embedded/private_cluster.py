"""A cluster for one program alone: on Unix sockets in a folder that nobody else may enter, patient, and gone with its program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from sapwood.cli.local.background import BackgroundCluster
from sapwood.cli.local.cluster import Endpoints
from sapwood.embedded.batches import Batches
from sapwood.embedded.keywords import provide_model, read_keywords
from sapwood_common.network.socket_folder import SocketFolder

_WEEK = 7 * 24 * 3600.0
_LEAST_AT_ONCE, _MOST_QUEUED = 1024, 65_536
_MOST_RUNNING = 256
"""The most requests that a worker runs at once, if no setting says it."""


class PrivateCluster:
    """Life cycle: construct, :meth:`start`, :meth:`close`.

    Args:
        model: The model's name or path.
        workers: How many.
        options: Settings by name.
        logs: Gets the services' lines; None: the lines are dropped.

    Attributes:
        background: The cluster.

    Raises:
        InvalidArgumentError: An option is wrong.
    """

    def __init__(self, model: str, workers: int, options: Mapping[str, Any], logs: TextIO | None) -> None:
        folder = SocketFolder("sapwood-engine-")
        host = f"unix:{folder.path}/s"
        own = {
            "router_host": host,
            "tokenizer_host": host,
            "worker_host": host,
            "router_port": 0,
            "router_http_port": 0,
            "tokenizer_port": 0,
            "worker_port": 0,
            # A busy program is no reason to take a worker for lost, and one that was lost is started again.
            "worker_silence": 30.0,
            "most_resumptions": {"grace": 300.0},
            "tokenizer_grace": 300.0,
            "queue_size": {"size": _MOST_QUEUED, "wait": _WEEK},
            "request_timeout": _WEEK,
            "status_page": "off",
            "drain_timeout": 5.0,
        }
        try:
            self._services = read_keywords({**options, "model": model}, workers, own)
        except BaseException:
            folder.remove()
            raise
        self._folder = folder
        running = self._services.worker.config.max_running or _MOST_RUNNING
        of_each = self._services.router.config.requests_per_worker or 2 * running
        self._at_once = max(_LEAST_AT_ONCE, of_each * workers)
        self.background = BackgroundCluster(self._services, logs)

    def start(self) -> Endpoints:
        """Starts it, and returns once it answers.

        Raises:
            InvalidArgumentError: The model is not one, or not there.
            UnavailableError: A part of it ended meanwhile; the message has its last lines.
        """
        provide_model(self._services)
        return self.background.start()

    def connect(self, places: Endpoints, timeout: float | None) -> Batches:
        """A connection for the event loop that runs now; ``timeout``: seconds for each request."""
        return Batches(places.grpc, places.tokenizer, self._at_once, timeout, self.background.check)

    def close(self) -> None:
        """Stops it. May be called again."""
        try:
            self.background.stop()
        finally:
            self._folder.remove()
