"""The HTTP front: finds who answers a path, and has what all answers have in common."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Iterable
from typing import cast

from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    SapwoodError,
    UnavailableError,
    forget_frames,
)
from sapwood_common.telemetry.logs import TRACEPARENT_KEY, is_valid_traceparent, request_id_var, traceparent_var
from sapwood_common.telemetry.tracing import Tracing, child_span
from sapwood_common.tenants.api_keys import until_revoked
from sapwood_common.tenants.tenant import Tenant
from sapwood_router.edges.guard import Guard, tenant_var
from sapwood_router.edges.http.errors import Dialect, Dialects
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.inner_request import InnerRequest
from sapwood_router.edges.http.left_out import LeftOutLog
from sapwood_router.edges.http.origins import Origins, check_content_type
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.request import Request
from sapwood_router.edges.routes import Handler, Post, Route
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.generation import Pipeline

logger = logging.getLogger(__name__)

_TRACEPARENT_HEADER = TRACEPARENT_KEY.encode()


_ALL_PATHS = "; /openapi.json lists what there is"
_LONGEST_COMPARED = 60
"""Characters of an unknown path up to which it is compared with the known ones."""


def _likely(path: str) -> tuple[str, ...]:
    """The intended path, if a client's base URL lacks /v1, has it twice, or if the URL or the path ends with a slash."""
    inner = path.removeprefix("/v1").replace("//", "/").rstrip("/")
    return f"/v1{inner}", inner


class Endpoint:
    """The wrapper of a handler: errors, request ids, clients that leave, the count of running requests."""

    def __init__(
        self,
        front: HttpFront,
        handler: Handler,
        guard: Guard | None,
        origins: Origins | None,
        dialect: Dialect | None = None,
    ) -> None:
        self._front = front
        self._guard = guard
        self._origins = origins
        self._handler = handler
        self.dialect = dialect
        """The format of errors; None: the format of the API that the request seems to use."""

    @property
    def public(self) -> bool:
        """Whether any page of any origin may ask."""
        return self._origins is None

    async def __call__(self, request: Request, path: str) -> None:
        """Answers a request for a path."""
        dialect = self.dialect or self._front.dialects.of(path, request.head.fields)
        exchange = Exchange(request, dialect, self._front.left_out, path, self._front.workers)
        self._front.begin()
        try:
            exchange.accept_request_id()
            request_id_var.set(exchange.request_id)
            self._front.origins.check_name(exchange.headers)
            if self._origins is not None:
                exchange.extra_headers = self._origins.check(exchange.headers)
            if self._guard is not None:
                self._guard.check_headers(exchange.headers)
            with until_revoked(tenant_var.get()):
                await self._handler(exchange)
        except RequestCancelledError as error:
            forget_frames(error)
            if not exchange.client_left:
                await exchange.send_error(error)
        except SapwoodError as error:
            forget_frames(error)
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
    """All HTTP APIs over a pipeline.

    Args:
        pipeline: Runs the requests.
        routes: What is served.
        draining: Set when new requests are to be refused.
        request_timeout: Seconds a request may take.
        max_body_bytes: Largest request body.
        tracing: Where spans go.
        guard: Asks for API keys, but not for what is public.
        origins: The origins whose web pages may call guarded routes.
        strict: Whether a request with what nothing here serves is refused.
        dialects: The formats of errors where no route names one.
        workers: Names workers for clients.

    Attributes:
        workers: The argument.
        left_out: The parameters that were ignored in any request.
        dialects, origins: As given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        routes: Iterable[Route],
        draining: asyncio.Event,
        *,
        request_timeout: float,
        max_body_bytes: int,
        tracing: Tracing,
        guard: Guard,
        origins: Origins,
        strict: bool = False,
        dialects: Dialects | None = None,
        workers: WorkerNames | None = None,
    ) -> None:
        self.dialects = dialects or Dialects()
        self.workers = workers
        self.left_out = LeftOutLog(strict=strict)
        self._guard = guard
        self.origins = origins
        self._pipeline = pipeline
        self._draining = draining
        self._request_timeout = request_timeout
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        routes = tuple(routes)
        self._inner = {route.path: route for route in routes if isinstance(route, Post)}
        self._endpoints = dict(map(self._endpoint, routes))
        self._folders = tuple(route.path for route in routes if route.is_folder)
        self._paths = frozenset(path for _, path in self._endpoints)
        self._prefixes = tuple({path for _, path in self._endpoints if path.endswith("/")} - {"/"})
        self._unknown = Endpoint(self, self._refuse, None, None)
        self._options = Endpoint(self, self._permit, None, origins)

    async def serve(self, request: Request) -> None:
        """Answers a request."""
        method, path = request.head.method, self._known(request.head.path)
        endpoint = self._endpoints.get(("GET" if method == "HEAD" else method, self._route(path)), self._unknown)
        if method == "OPTIONS" and not all(known.public for known in self._methods(path).values()):
            endpoint = self._options
        await endpoint(request, path)

    async def answer_inner(self, request: InnerRequest, tenant: Tenant | None) -> None:
        """Answers a request that no client sent, for a tenant, as if it had come with the tenant's key."""
        tenant_var.set(tenant)
        path = request.head.path
        route = self._inner[path]
        await Endpoint(self, self._takes_json(route), None, None, route.dialect)(cast(Request, request), path)

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

    def _endpoint(self, route: Route) -> tuple[tuple[str, str], Endpoint]:
        if isinstance(route, Post):
            return ("POST", route.path), Endpoint(
                self, self._takes_json(route), self._guard, self.origins, route.dialect
            )
        guard, origins = (None, None) if route.public else (self._guard, self.origins)
        return (route.method, route.path), Endpoint(self, route.handler, guard, origins, route.dialect)

    def _takes_json(self, route: Post) -> Handler:
        async def handle(exchange: Exchange) -> None:
            if self._draining.is_set():
                raise UnavailableError("this service is shutting down", retry_after=1.0)
            deadline = exchange.deadline(self._request_timeout)
            check_content_type(exchange.headers)
            body = exchange.take_body(self._max_body_bytes)
            if body is None:
                try:
                    async with asyncio.timeout_at(deadline):
                        body = await exchange.receive_body(
                            self._max_body_bytes, self._pipeline.heavy, self._pipeline.registry.longest_context
                        )
                except TimeoutError as error:
                    raise DeadlineExceededError("the body took too long to come") from error
            given = exchange.headers.get(_TRACEPARENT_HEADER, b"").decode("latin-1")
            traceparent_var.set(given if given and is_valid_traceparent(given) else None)
            answering = route.answer(exchange, body, self._pipeline, deadline)
            del body  # it may be large, and is of no use once it was parsed
            if not self._tracing.on:
                await answering
                return
            asked = {"http.request.method": "POST", "http.route": route.path}
            with child_span(self._tracing, f"POST {route.path}", kind="server", attributes=asked):
                await answering

        return handle

    async def _permit(self, exchange: Exchange) -> None:
        """A browser's question whether it may ask."""
        permission = self.origins.permission(exchange.headers)
        if permission is None:
            await self._refuse(exchange)
        else:
            await exchange.send_page(204, permission, b"")

    async def _refuse(self, exchange: Exchange) -> None:
        """Unknown paths and wrong methods."""
        methods = self._methods(exchange.path)
        if not methods:
            meant = next((path for path in _likely(exchange.path) if path in self._paths), None)
            if meant is None and len(exchange.path) <= _LONGEST_COMPARED:
                meant = next(iter(difflib.get_close_matches(exchange.path, self._paths, n=1, cutoff=0.85)), None)
            reason = why_not(exchange.path) or why_not(f"/v1{exchange.path}")
            more = f": {reason}" if reason is not None else (f"; there is {meant}" if meant is not None else _ALL_PATHS)
            raise HttpError(404, f"there is no {exchange.path}{more}")
        reason = why_not(f"{exchange.path}/")  # of what a GET would ask for, such as completions that are kept
        more = f": {reason}" if reason is not None else ""
        error = HttpError(405, f"{exchange.path} takes {' and '.join(methods)}, not {exchange.method}{more}")
        await exchange.send_error(error, [(b"allow", ", ".join(methods).encode())])

    def _methods(self, path: str) -> dict[str, Endpoint]:
        route = self._route(path)
        return {method: endpoint for (method, known), endpoint in self._endpoints.items() if known == route}

    def _known(self, path: str) -> str:
        """The path as a route has it: many clients' base URL lacks /v1, as some servers do without."""
        path = self._without_slash(path)
        if self._route(path) in self._paths or self._route(f"/v1{path}") not in self._paths:
            return path
        return f"/v1{path}"

    def _without_slash(self, path: str) -> str:
        """The path without a slash at its end, which some clients add to their base URL or to each path."""
        if not path.endswith("/") or path.startswith(self._folders):
            return path
        return path.rstrip("/") or "/"

    def _route(self, path: str) -> str:
        """The path as its route has it."""
        if path in self._paths:
            return path
        return next((prefix for prefix in self._prefixes if path.startswith(prefix)), path)


_NO_FILES = "nothing is kept here of that kind; there is /v1/files"
_NO_AGENTS = "agents are not run here; they are programs of yours, which ask for answers"
_NO_EVENTS = "nothing here calls clients back; a response in the background is asked for by its id"
_WHY = {
    "/v1/messages/batches": "Anthropic's batches are not run here; /v1/batches takes lines for /v1/messages",
    "/v1/uploads": _NO_FILES,
    "/v1/containers": _NO_FILES,
    "/v1/vector_stores": _NO_FILES,
    "/v1/skills": _NO_FILES,
    "/v1/images": "no model here makes images",
    "/v1/videos": "no model here makes videos",
    "/v1/audio": "no model here hears or speaks",
    "/v1/realtime": "no model here hears or speaks",
    "/v1/live": "no model here hears or speaks",
    "/v1/agents": _NO_AGENTS,
    "/v1/chatkit": _NO_AGENTS,
    "/v1/vaults": _NO_AGENTS,
    "/v1/decisions": _NO_AGENTS,
    "/v1/webhook_endpoints": _NO_EVENTS,
    "/v1/webhook_event_types": _NO_EVENTS,
    "/v1/safety": "requests are not looked through here",
    "/v1/content_provenance_checks": "no model here makes images",
    "/v1/projects": "there are no organizations here; `sapwood key` makes keys",
    "/v1/moderations": "no model here moderates; /classify asks a model with a head that classifies",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/evals": "evaluations are not run here; `sapwood eval` runs them",
    "/v1/assistants": "assistants and threads are not kept here; /v1/responses keeps conversations",
    "/v1/threads": "assistants and threads are not kept here; /v1/responses keeps conversations",
    "/v1/chat/completions/": "chat completions are not kept; /v1/responses keeps its answers",
    "/v1/organization": "there are no organizations here; `sapwood key` makes keys",
    "/v1/complete": "it is Anthropic's older API; there is /v1/messages",
    "/api/pull": "models are what the workers serve; clients do not change them",
    "/api/push": "models are what the workers serve; clients do not change them",
    "/api/create": "models are what the workers serve; clients do not change them",
    "/api/copy": "models are what the workers serve; clients do not change them",
    "/api/delete": "models are what the workers serve; clients do not change them",
    "/api/blobs": "models are what the workers serve; clients do not change them",
    "/v2/classify": "there is /classify",
}


def why_not(path: str) -> str | None:
    """Why a path is not there; None: nothing is known of it."""
    for known, reason in _WHY.items():
        if path == known or path.startswith(known.rstrip("/") + "/"):
            return reason
    return None
