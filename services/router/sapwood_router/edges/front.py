"""The HTTP application: routes, and what all of them have in common."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import CollectorRegistry

from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.telemetry.logs import TRACEPARENT_KEY, is_valid_traceparent, request_id_var, traceparent_var
from sapwood_common.telemetry.tracing import Tracing, child_span
from sapwood_router.edges.guard import Guard
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.metrics_page import MetricsPage
from sapwood_router.edges.http.origins import Origins, check_content_type
from sapwood_router.edges.http.status_page import HEADERS, render
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.request import Request
from sapwood_router.edges.openai.chat import chat
from sapwood_router.edges.openai.completions import complete
from sapwood_router.edges.openai.embeddings import embed
from sapwood_router.edges.openai.models import get_model, list_models
from sapwood_router.flow.pipeline import Pipeline
from sapwood_router.observe.status import RouterState

logger = logging.getLogger(__name__)

_MODEL = "/v1/models/"
"""Followed by a model's name, which may have slashes."""
_TRACEPARENT_HEADER = TRACEPARENT_KEY.encode()

Handler = Callable[[Exchange], Awaitable[None]]
Generate = Callable[[Exchange, bytes, Pipeline, float], Awaitable[None]]


class Endpoint:
    """What is around a handler: errors, request ids, the client's leaving, the count of what runs."""

    def __init__(self, front: HttpFront, handler: Handler, guard: Guard | None, origins: Origins | None) -> None:
        self._front = front
        self._guard = guard
        self._origins = origins
        self._handler = handler

    async def __call__(self, request: Request) -> None:
        """Answers a request."""
        exchange = Exchange(request)
        self._front.begin()
        try:
            exchange.accept_request_id()
            request_id_var.set(exchange.request_id)
            if self._origins is not None:
                exchange.extra_headers = self._origins.check(exchange.headers)
            if self._guard is not None:
                self._guard.check_headers(exchange.headers)
            await self._handler(exchange)
        except RequestCancelledError as error:
            if not exchange.client_left:
                await exchange.send_error(error)
        except SapwoodError as error:
            await exchange.send_error(error)
        except asyncio.CancelledError:
            if not exchange.client_left:
                logger.warning("cut off: the router stops")
        except Exception:
            logger.exception("%s failed", exchange.path)
            await exchange.send_error(InternalError("internal error; the router's log has the details"))
        finally:
            exchange.close()
            self._front.end()


class HttpFront:
    """OpenAI's API over a pipeline.

    Args:
        pipeline: Runs the requests.
        problem: Says why requests cannot be served now, or None.
        draining: Set when new requests are to be refused.
        request_timeout: Seconds a request may take.
        max_body_bytes: Largest request body.
        registry: The metrics that /metrics shows; None: they are shown elsewhere.
        tracing: Where spans go.
        guard: Asks for API keys, but not for /health, /metrics and /status.
        origins: Whose web pages may ask for what the guard guards.
        status: What /status shows; None: there is no such page.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        problem: Callable[[], str | None],
        draining: asyncio.Event,
        *,
        request_timeout: float,
        max_body_bytes: int,
        registry: CollectorRegistry | None,
        tracing: Tracing,
        guard: Guard,
        origins: Origins,
        status: Callable[[], RouterState] | None = None,
    ) -> None:
        self._guard = guard
        self._origins = origins
        self._pipeline = pipeline
        self._problem = problem
        self._draining = draining
        self._request_timeout = request_timeout
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing
        self._created = int(time.time())
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._endpoints = {
            ("POST", "/v1/completions"): self._guarded(self._generates(complete)),
            ("POST", "/v1/chat/completions"): self._guarded(self._generates(chat)),
            ("POST", "/v1/embeddings"): self._guarded(self._generates(embed)),
            ("GET", "/v1/models"): self._guarded(self._list_models),
            ("GET", _MODEL): self._guarded(self._get_model),
            ("GET", "/health"): Endpoint(self, self._health, None, None),
        }
        if status is not None:
            self._endpoints["GET", "/status"] = Endpoint(self, _show_status(status), None, None)
        if registry is not None:
            self._endpoints["GET", "/metrics"] = Endpoint(self, _show(MetricsPage(registry)), None, None)
        self._unknown = Endpoint(self, self._refuse, None, None)
        self._options = Endpoint(self, self._permit, None, origins)

    async def serve(self, request: Request) -> None:
        """Answers a request."""
        method, path = request.head.method, request.head.path
        endpoint = self._endpoints.get(("GET" if method == "HEAD" else method, _route(path)), self._unknown)
        if method == "OPTIONS" and path.startswith("/v1/"):
            endpoint = self._options
        await endpoint(request)

    def begin(self) -> None:
        """A request came."""
        self._running += 1
        self._idle.clear()

    def end(self) -> None:
        """A request was answered."""
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no request is being answered."""
        await self._idle.wait()

    def _guarded(self, handler: Handler) -> Endpoint:
        return Endpoint(self, handler, self._guard, self._origins)

    def _generates(self, generate: Generate) -> Handler:
        async def handle(exchange: Exchange) -> None:
            if self._draining.is_set():
                raise UnavailableError("this service is shutting down", retry_after=1.0)
            deadline = exchange.deadline(self._request_timeout)
            check_content_type(exchange.headers)
            body = exchange.take_body(self._max_body_bytes)
            if body is None:
                try:
                    async with asyncio.timeout_at(deadline):
                        body = await exchange.receive_body(self._max_body_bytes)
                except TimeoutError as error:
                    raise DeadlineExceededError("the body took too long to come") from error
            given = exchange.headers.get(_TRACEPARENT_HEADER, b"").decode("latin-1")
            traceparent_var.set(given if given and is_valid_traceparent(given) else None)
            if not self._tracing.on:
                await generate(exchange, body, self._pipeline, deadline)
                return
            asked = {"http.request.method": "POST", "http.route": exchange.path}
            with child_span(self._tracing, f"POST {exchange.path}", kind="server", attributes=asked):
                await generate(exchange, body, self._pipeline, deadline)

        return handle

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.send_body(200, list_models(self._pipeline.registry.context_lengths(), self._created))

    async def _get_model(self, exchange: Exchange) -> None:
        contexts = self._pipeline.registry.context_lengths()
        await exchange.send_body(200, get_model(contexts, self._created, exchange.path.removeprefix(_MODEL)))

    async def _health(self, exchange: Exchange) -> None:
        problem = self._problem()
        if problem is None:
            await exchange.send_body(200, b'{"status":"ok"}')
        else:
            body = msgspec.json.encode({"status": "unavailable", "reason": problem})
            await exchange.send_body(503, body, [(b"retry-after", b"1")])

    async def _permit(self, exchange: Exchange) -> None:
        """A browser's question whether it may ask."""
        permission = self._origins.permission(exchange.headers)
        if permission is None or not self._methods(exchange.path):
            await self._refuse(exchange)
        else:
            await exchange.send_page(204, permission, b"")

    async def _refuse(self, exchange: Exchange) -> None:
        """Unknown paths and wrong methods."""
        methods = self._methods(exchange.path)
        if not methods:
            raise HttpError(404, f"there is no {exchange.path}")
        error = HttpError(405, f"{exchange.path} does not take {exchange.method}")
        await exchange.send_error(error, [(b"allow", ", ".join(methods).encode())])

    def _methods(self, path: str) -> list[str]:
        return [method for method, known in self._endpoints if known == _route(path)]


def _route(path: str) -> str:
    return _MODEL if path.startswith(_MODEL) else path


def _show_status(status: Callable[[], RouterState]) -> Handler:
    async def show(exchange: Exchange) -> None:
        await exchange.send_page(200, HEADERS, render(status()))

    return show


def _show(page: MetricsPage) -> Handler:
    async def show(exchange: Exchange) -> None:
        body, content_type = await page.render(exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.send_page(200, [(b"content-type", content_type.encode())], body)

    return show
