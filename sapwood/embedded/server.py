"""A cluster that others can reach, started from Python: what `sapwood up` starts."""

from __future__ import annotations

import weakref
from typing import Any, Self, TextIO

from sapwood.cli.local.background import BackgroundCluster
from sapwood.cli.local.cluster import Endpoints
from sapwood.client import Client
from sapwood.embedded.keywords import provide_model, read_keywords


class Server:
    """Tokenizer, workers and router on this machine: a ``with`` block, or :meth:`start` and :meth:`close`.

        with sapwood.Server("demo", workers=2) as server, server.client() as client:
            print(client.generate("The capital of France is", max_tokens=16).text())

    It answers once the block is entered, starts a tokenizer or worker that ends again, and lets running requests finish when the
    block is left. The processes end with this one, however it ends.

    Args:
        model: ``demo``, or what ``sapwood up --model`` takes.
        workers: How many.
        host: Address that the router listens on; 0.0.0.0 for all. The other services listen on 127.0.0.1.
        port: The router's gRPC port; 0 takes a free one.
        http_port: The router's HTTP port.
        logs: Gets the services' log lines; None: the lines are dropped.
        options: Settings of the services by their names, as for :class:`~sapwood.embedded.engine.Engine`.

    Raises:
        InvalidArgumentError: An option is wrong; ``field`` names it.
    """

    def __init__(
        self,
        model: str = "demo",
        workers: int = 2,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        http_port: int = 0,
        logs: TextIO | None = None,
        **options: Any,
    ) -> None:
        own = {"router_host": host, "router_port": port, "router_http_port": http_port, "model": model}
        self._services = read_keywords({**options, **own}, workers, {"tokenizer_port": 0, "worker_port": 0})
        self._background = BackgroundCluster(self._services, logs)
        self._places: Endpoints | None = None
        self._end = weakref.finalize(self, self._background.stop)  # also at the program's end

    def start(self) -> Self:
        """Starts it, and returns once it answers.

        Raises:
            InvalidArgumentError: There is no such model.
            UnavailableError: A part ended meanwhile; the message has its last lines.
        """
        try:
            provide_model(self._services)
            self._places = self._background.start()
        except BaseException:
            self._end()
            raise
        return self

    def close(self) -> None:
        """Lets running requests finish, for at most ``drain_timeout`` seconds, and stops it. May be called again."""
        self._end()

    @property
    def grpc_address(self) -> str:
        """``host:port`` of the router's gRPC port. Raises UnavailableError if the server does not run."""
        return self._running.grpc

    @property
    def http_url(self) -> str:
        """The URL of its HTTP port, without a path. Raises UnavailableError."""
        secure = self._services.router.config.tls_cert is not None
        return f"http{'s' * secure}://{self._running.http}"

    @property
    def openai_base_url(self) -> str:
        """What OpenAI's clients take as ``base_url``. Raises UnavailableError."""
        return f"{self.http_url}/v1"

    @property
    def workers(self) -> tuple[str, ...]:
        """``host:port`` of each worker. Raises UnavailableError."""
        return self._running.workers

    def client(self, **options: Any) -> Client:
        """A client of it, which the caller closes; ``options`` are those of :class:`~sapwood.client.Client`."""
        return Client(self.grpc_address, **options)

    @property
    def _running(self) -> Endpoints:
        self._background.check()
        assert self._places is not None
        return self._places

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
