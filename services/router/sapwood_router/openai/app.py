"""The HTTP application: routes, and what all of them have in common."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.telemetry import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    is_valid_request_id,
    is_valid_traceparent,
    new_request_id,
    request_id_var,
    traceparent_var,
)
from sapwood_common.tracing import Tracing, child_span
from sapwood_router.guard import Guard
from sapwood_router.openai.body import read_body
from sapwood_router.openai.chat import chat
from sapwood_router.openai.completions import complete
from sapwood_router.openai.embeddings import embed
from sapwood_router.openai.errors import error_object
from sapwood_router.openai.exchange import Exchange
from sapwood_router.openai.models import get_model, list_models
from sapwood_router.openai.status_page import HEADERS, render
from sapwood_router.pipeline.pipeline import Pipeline
from sapwood_router.router_status import RouterState

logger = logging.getLogger(__name__)

_TRACEPARENT_HEADER = TRACEPARENT_KEY.encode()

Handler = Callable[[Exchange], Awaitable[None]]
Generate = Callable[[Exchange, bytes, Pipeline, float], Awaitable[None]]


class Endpoint:
    """An ASGI application around a handler: errors, request ids, the client's leaving, the count of what runs."""

    def __init__(self, front: OpenAIFront, handler: Handler, guard: Guard | None) -> None:
        self._front = front
        self._guard = guard
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        exchange = Exchange(scope, receive, send)
        self._front.begin()
        try:
            exchange.accept_request_id()
            request_id_var.set(exchange.request_id)
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
            logger.exception("%s failed", scope["path"])
            await exchange.send_error(InternalError("internal error; the router's log has the details"))
        finally:
            exchange.close()
            self._front.end()


class OpenAIFront:
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
        status: Callable[[], RouterState] | None = None,
    ) -> None:
        self._guard = guard
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
        self._direct: dict[tuple[str, str], ASGIApp] = {
            ("POST", path): Endpoint(self, self._generates(generate), guard)
            for path, generate in (
                ("/v1/completions", complete),
                ("/v1/chat/completions", chat),
                ("/v1/embeddings", embed),
            )
        }
        self._routed = Starlette(
            routes=[
                *(Route(path, endpoint, methods=[method]) for (method, path), endpoint in self._direct.items()),
                self._route("/v1/models", self._list_models, "GET"),
                self._route("/v1/models/{id:path}", self._get_model, "GET"),
                self._route("/health", self._health, "GET"),
                *([] if status is None else [Route("/status", _show_status(status), methods=["GET"])]),
                *([] if registry is None else [Route("/metrics", _show(registry), methods=["GET"])]),
            ],
            exception_handlers={HTTPException: _refuse},
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. What generates goes past the router: its coroutines would be resumed for each token."""
        endpoint = self._direct.get((scope.get("method", ""), scope.get("path", "")))
        await (endpoint or self._routed)(scope, receive, send)

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

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        guard = self._guard if path.startswith("/v1/") else None
        return Route(path, Endpoint(self, handler, guard), methods=[method])

    def _generates(self, generate: Generate) -> Handler:
        async def handle(exchange: Exchange) -> None:
            if self._draining.is_set():
                raise UnavailableError("this service is shutting down", retry_after=1.0)
            deadline = exchange.deadline(self._request_timeout)
            body = exchange.take_body(self._max_body_bytes)
            if body is None:
                try:
                    async with asyncio.timeout_at(deadline):
                        body = await read_body(exchange.receive, exchange.headers, self._max_body_bytes)
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
        await exchange.send_body(200, list_models(self._pipeline.registry, self._created))

    async def _get_model(self, exchange: Exchange) -> None:
        await exchange.send_body(200, get_model(self._pipeline.registry, self._created, exchange.path_params["id"]))

    async def _health(self, exchange: Exchange) -> None:
        problem = self._problem()
        if problem is None:
            await exchange.send_body(200, b'{"status":"ok"}')
        else:
            body = msgspec.json.encode({"status": "unavailable", "reason": problem})
            await exchange.send_body(503, body, [(b"retry-after", b"1")])


def _show_status(status: Callable[[], RouterState]) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:  # on the event loop, where the state changes
        return Response(render(status()), headers=HEADERS, media_type="text/html")

    return show


def _show(registry: CollectorRegistry) -> Callable[[Request], Response]:
    def show(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return show


async def _refuse(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, which Starlette finds, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    given = request.headers.get(REQUEST_ID_KEY, "")
    headers = dict(error.headers or {})
    headers[REQUEST_ID_KEY] = given if is_valid_request_id(given) else new_request_id()
    match error.status_code:
        case 404:
            message = f"there is no {request.url.path}"
        case 405:
            message = f"{request.url.path} does not take {request.method}"
        case _:
            message = error.detail
    body = msgspec.json.encode(error_object(error.status_code, message))
    return Response(body, error.status_code, headers, media_type="application/json")
