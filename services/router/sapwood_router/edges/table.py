"""All that the HTTP port serves; an API adds its routes here."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

import msgspec
from prometheus_client import CollectorRegistry

from sapwood_router.edges.anthropic.errors import AnthropicDialect
from sapwood_router.edges.anthropic.messages import count_tokens, create_message
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.metrics_page import MetricsPage
from sapwood_router.edges.http.status_page import HEADERS, render
from sapwood_router.edges.openai.chat import chat
from sapwood_router.edges.openai.completions import complete
from sapwood_router.edges.openai.embeddings import embed
from sapwood_router.edges.openai.models import get_model, list_models
from sapwood_router.edges.responses.create import PATH as RESPONSES
from sapwood_router.edges.responses.create import ResponsesApi
from sapwood_router.edges.responses.store import ResponseStore
from sapwood_router.edges.routes import Ask, Handler, Post, Route
from sapwood_router.edges.score.answers import rerank, score
from sapwood_router.edges.vllm.tokens import detokenize, tokenize
from sapwood_router.flow.pipeline import Pipeline
from sapwood_router.observe.status import RouterState

_MODEL = "/v1/models/"
"""Followed by a model's name, which may have slashes."""


def all_routes(
    pipeline: Pipeline,
    problem: Callable[[], str | None],
    responses: ResponseStore,
    registry: CollectorRegistry | None,
    status: Callable[[], RouterState] | None,
) -> list[Route]:
    """The routes.

    Args:
        pipeline: Knows the models.
        problem: Says why requests cannot be served now, or None.
        responses: Keeps what /v1/responses answers.
        registry: The metrics that /metrics shows; None: they are shown elsewhere.
        status: What /status shows; None: there is no such page.
    """
    created = int(time.time())

    async def show_models(exchange: Exchange) -> None:
        await exchange.send_body(200, list_models(pipeline.registry.context_lengths(), created))

    async def show_model(exchange: Exchange) -> None:
        contexts = pipeline.registry.context_lengths()
        await exchange.send_body(200, get_model(contexts, created, exchange.path.removeprefix(_MODEL)))

    anthropic, kept = AnthropicDialect(), ResponsesApi(responses)
    routes: list[Route] = [
        Post("/v1/completions", complete),
        Post("/v1/chat/completions", chat),
        Post("/v1/embeddings", embed),
        Ask("/v1/models", show_models),
        Ask(_MODEL, show_model),
        Post(RESPONSES, kept.create),
        Ask(f"{RESPONSES}/", kept.show),
        Ask(f"{RESPONSES}/", kept.delete, method="DELETE"),
        Post("/v1/messages", create_message, anthropic),
        Post("/v1/messages/count_tokens", count_tokens, anthropic),
        *(Post(path, score) for path in ("/score", "/v1/score")),
        *(Post(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        Post("/tokenize", tokenize),
        Post("/detokenize", detokenize),
        Ask("/version", _show_version),
        Ask("/health", _show_health(problem), public=True),
    ]
    if status is not None:
        routes.append(Ask("/status", _show_status(status), public=True))
    if registry is not None:
        routes.append(Ask("/metrics", _show_metrics(MetricsPage(registry)), public=True))
    return routes


async def _show_version(exchange: Exchange) -> None:
    await exchange.send_body(200, msgspec.json.encode({"version": version("sapwood")}))


def _show_health(problem: Callable[[], str | None]) -> Handler:
    async def show(exchange: Exchange) -> None:
        reason = problem()
        if reason is None:
            await exchange.send_body(200, b'{"status":"ok"}')
        else:
            body = msgspec.json.encode({"status": "unavailable", "reason": reason})
            await exchange.send_body(503, body, [(b"retry-after", b"1")])

    return show


def _show_status(status: Callable[[], RouterState]) -> Handler:
    async def show(exchange: Exchange) -> None:
        await exchange.send_page(200, HEADERS, render(status()))

    return show


def _show_metrics(page: MetricsPage) -> Handler:
    async def show(exchange: Exchange) -> None:
        body, content_type = await page.render(exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.send_page(200, [(b"content-type", content_type.encode())], body)

    return show
