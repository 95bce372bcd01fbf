"""All that the HTTP port serves; an API adds its routes here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
from prometheus_client import CollectorRegistry

from sapwood_router.edges.anthropic.errors import AnthropicDialect
from sapwood_router.edges.anthropic.messages import count_tokens, create_message
from sapwood_router.edges.anthropic.types import CountRequest, MessageResponse, MessagesRequest, TokenCount
from sapwood_router.edges.batches.api import BatchesApi
from sapwood_router.edges.batches.records import BatchStore
from sapwood_router.edges.cohere.chat import CohereDialect
from sapwood_router.edges.cohere.chat import chat as cohere_chat
from sapwood_router.edges.cohere.chat import embed as cohere_embed
from sapwood_router.edges.cohere.types import CohereAnswer, CohereChatRequest, CohereEmbeddings, CohereEmbedRequest
from sapwood_router.edges.files.api import FilesApi
from sapwood_router.edges.files.store import FileStore
from sapwood_router.edges.http.errors import Dialects
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.origins import Origins
from sapwood_router.edges.http.status_page import HEADERS, MetricsPage, render
from sapwood_router.edges.loras import LorasApi
from sapwood_router.edges.ollama.errors import OllamaDialect
from sapwood_router.edges.ollama.routes import ollama_routes
from sapwood_router.edges.openai.chat import chat
from sapwood_router.edges.openai.completions import complete
from sapwood_router.edges.openai.embeddings import EmbeddingRequest, EmbeddingResponse, embed
from sapwood_router.edges.openai.models import get_model, list_models
from sapwood_router.edges.openai.parameters import SAMPLING, TEXT_SAMPLING
from sapwood_router.edges.openai.relay import or_relay
from sapwood_router.edges.openai.types import ChatRequest, ChatResponse, CompletionRequest, CompletionResponse
from sapwood_router.edges.openapi.routes import ApiPages
from sapwood_router.edges.responses.background import PATH as RESPONSES
from sapwood_router.edges.responses.background import Background
from sapwood_router.edges.responses.conversations import ConversationsApi
from sapwood_router.edges.responses.create import ResponsesApi
from sapwood_router.edges.responses.store import ConversationStore, ResponseStore
from sapwood_router.edges.responses.types import ResponsesRequest
from sapwood_router.edges.routes import Ask, Handler, Post, Route
from sapwood_router.edges.score.answers import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse, rerank, score
from sapwood_router.edges.score.classify import ClassifyRequest, ClassifyResponse, classify
from sapwood_router.edges.score.tree import ScoreTreeRequest, ScoreTreeResponse, score_tree
from sapwood_router.edges.sessions import SessionsApi
from sapwood_router.edges.sglang.routes import sglang_routes
from sapwood_router.edges.tei.embed import TeiEmbedRequest, tei_embed
from sapwood_router.edges.training.calls import TrainingCalls
from sapwood_router.edges.vllm.pooling import Pooled, pool
from sapwood_router.edges.vllm.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
    detokenize,
    tokenize,
)
from sapwood_router.flow.adapters import Adapters, adapter_states
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.steering import Steering
from sapwood_router.flow.training import Training
from sapwood_router.observe.status import RouterState
from sapwood_router.tools.mcp_servers import McpServers

_MODEL = "/v1/models/"
"""Followed by a model's name, which may have slashes."""


DIALECTS = Dialects(
    (("/v1/messages", AnthropicDialect()), ("/api/", OllamaDialect()), ("/v2/", CohereDialect())),
    {b"anthropic-version": AnthropicDialect()},
)
"""The answer to a request for an unknown path."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What outlives requests.

    Attributes:
        responses, conversations, files, batches: By what they are.
        longest_batch: The longest window of a batch, in seconds.
        look_for_batches: Tells the runner of batches that there is something new.
        servers: MCP servers, whose tools answers may use.
        background: Makes responses that nobody waits for.
    """

    responses: ResponseStore
    conversations: ConversationStore
    files: FileStore
    batches: BatchStore
    longest_batch: float
    look_for_batches: Callable[[], None]
    servers: McpServers
    background: Background


def all_routes(
    pipeline: Pipeline,
    problem: Callable[[], str | None],
    kept: Kept,
    steering: Steering | None,
    loras: Adapters | None,
    registry: CollectorRegistry | None,
    status: Callable[[], RouterState] | None,
    origins: Origins,
    training: Training | None = None,
) -> list[Route]:
    """The routes.

    Args:
        pipeline: Knows the models.
        problem: Says why requests cannot be served now, or None.
        kept: What outlives requests.
        steering: The routes by which clients affect all clients' requests; None: only operators may.
        loras: The routes by which clients load and unload adapters; None: only operators may.
        registry: The metrics that /metrics shows; None: they are shown elsewhere.
        status: The content of /status; None: there is no such page.
        origins: Under which names /status may be.
        training: What trainers ask workers for; None: there are no keys, so no operator's.
    """
    created = int(time.time())

    async def show_models(exchange: Exchange) -> None:
        registry = pipeline.registry
        await exchange.send_body(200, list_models(registry.context_lengths(), created, adapter_states(registry.loras)))

    async def show_model(exchange: Exchange) -> None:
        contexts, loras = pipeline.registry.context_lengths(), adapter_states(pipeline.registry.loras)
        await exchange.send_body(200, get_model(contexts, created, exchange.path.removeprefix(_MODEL), loras))

    anthropic = AnthropicDialect()
    answers = ResponsesApi(kept.responses, kept.conversations, kept.servers, kept.background)
    routes: list[Route] = [
        Post(
            "/v1/completions",
            or_relay("completion", complete),
            summary="Goes on with texts",
            takes=(CompletionRequest,),
            gives=CompletionResponse,
            settings=SAMPLING,
            streams=True,
        ),
        Post(
            "/v1/chat/completions",
            or_relay("chat", chat),
            summary="Answers a conversation",
            takes=(ChatRequest,),
            gives=ChatResponse,
            settings=SAMPLING,
            streams=True,
        ),
        Post(
            "/v1/embeddings",
            embed,
            summary="Turns texts into vectors",
            takes=(EmbeddingRequest,),
            gives=EmbeddingResponse,
        ),
        Ask("/v1/models", show_models, summary="Lists the models"),
        Ask(_MODEL, show_model, summary="Describes a model"),
        Post(
            RESPONSES,
            answers.create,
            summary="Answers a conversation, OpenAI's newer way",
            takes=(ResponsesRequest,),
            settings=TEXT_SAMPLING,
            streams=True,
        ),
        Post(
            f"{RESPONSES}/input_tokens",
            answers.count,
            summary="Counts a conversation's tokens",
            takes=(ResponsesRequest,),
        ),
        Post(
            f"{RESPONSES}/compact", answers.compact, summary="Writes a conversation in short", takes=(ResponsesRequest,)
        ),
        Post(f"{RESPONSES}/", answers.cancel, summary="ID/cancel: ends an answer that is made in the background"),
        Ask(
            f"{RESPONSES}/", answers.show, summary="Shows an answer that was kept, or by ID/input_items what was asked"
        ),
        Ask(f"{RESPONSES}/", answers.delete, method="DELETE", summary="Forgets an answer that was kept"),
        Post(
            "/v1/messages",
            create_message,
            anthropic,
            summary="Answers a conversation, Anthropic's way",
            takes=(MessagesRequest,),
            gives=MessageResponse,
            settings=TEXT_SAMPLING,
            streams=True,
        ),
        Post(
            "/v1/messages/count_tokens",
            count_tokens,
            anthropic,
            summary="Counts a conversation's tokens",
            takes=(CountRequest,),
            gives=TokenCount,
        ),
        *(
            Post(path, score, summary="Tells how well texts fit each other", takes=(ScoreRequest,), gives=ScoreResponse)
            for path in ("/score", "/v1/score")
        ),
        Post(
            "/v1/score_tree",
            score_tree,
            summary="Tells how likely continuations of a prompt are",
            takes=(ScoreTreeRequest,),
            gives=ScoreTreeResponse,
        ),
        *(
            Post(path, rerank, summary="Orders documents by a query", takes=(RerankRequest,), gives=RerankResponse)
            for path in ("/rerank", "/v1/rerank")
        ),
        Post(
            "/v2/rerank",
            rerank,
            CohereDialect(),
            summary="Orders documents by a query, Cohere's way",
            takes=(RerankRequest,),
            gives=RerankResponse,
        ),
        *(
            Post(path, classify, summary="Tells which label fits", takes=(ClassifyRequest,), gives=ClassifyResponse)
            for path in ("/classify", "/v1/classify")
        ),
        Post(
            "/tokenize",
            tokenize,
            summary="Turns a text or a conversation into tokens",
            takes=(TokenizeTextRequest, TokenizeChatRequest),
            gives=TokenizeResponse,
        ),
        Post(
            "/detokenize",
            detokenize,
            summary="Turns tokens into text",
            takes=(DetokenizeRequest,),
            gives=DetokenizeResponse,
        ),
        Post("/pooling", pool, summary="Turns texts into vectors, vLLM's way", takes=(EmbeddingRequest,), gives=Pooled),
        Ask("/load", _show_load(pipeline), summary="Tells how many requests are being answered, vLLM's way"),
        Post(
            "/embed",
            tei_embed,
            summary="Turns texts into vectors, as text-embeddings-inference",
            takes=(TeiEmbedRequest,),
        ),
        Post(
            "/v2/chat",
            cohere_chat,
            CohereDialect(),
            summary="Answers a conversation, Cohere's way",
            takes=(CohereChatRequest,),
            gives=CohereAnswer,
            settings=TEXT_SAMPLING,
            streams=True,
        ),
        Post(
            "/v2/embed",
            cohere_embed,
            CohereDialect(),
            summary="Turns texts into vectors, Cohere's way",
            takes=(CohereEmbedRequest,),
            gives=CohereEmbeddings,
        ),
        Ask("/version", _show_version, summary="Tells the version"),
        *(
            Ask(path, _show_health(problem), public=True, summary="Tells whether requests are served")
            for path in ("/health", "/ping")
        ),
    ]
    routes += ConversationsApi(kept.conversations).routes()
    routes += FilesApi(kept.files).routes()
    routes += BatchesApi(kept.batches, kept.files, kept.longest_batch, kept.look_for_batches).routes()
    routes += SessionsApi(pipeline.sessions).routes()
    routes += sglang_routes(pipeline, steering, status)
    routes += ollama_routes(pipeline)
    if loras is not None:
        routes += LorasApi(loras).routes()
    if training is not None:
        served = frozenset(("POST" if isinstance(each, Post) else each.method, each.path) for each in routes)
        routes += TrainingCalls(training).routes(served)
    routes += ApiPages(tuple(routes)).routes()
    if status is not None:
        routes.append(Ask("/status", _show_status(status, origins), public=True))
    if registry is not None:
        routes.append(Ask("/metrics", _show_metrics(MetricsPage(registry)), public=True))
    return routes


async def _show_version(exchange: Exchange) -> None:
    await exchange.send_body(200, msgspec.json.encode({"version": version("sapwood")}))


def _show_load(pipeline: Pipeline) -> Handler:
    async def show(exchange: Exchange) -> None:
        await exchange.send_body(200, msgspec.json.encode({"server_load": pipeline.running.count}))

    return show


def _show_health(problem: Callable[[], str | None]) -> Handler:
    async def show(exchange: Exchange) -> None:
        reason = problem()
        if reason is None:
            await exchange.send_body(200, b'{"status":"ok"}')
        else:
            body = msgspec.json.encode({"status": "unavailable", "reason": exchange.workers.hide(reason)})
            await exchange.send_body(503, body, [(b"retry-after", b"1")])

    return show


def _show_status(status: Callable[[], RouterState], origins: Origins) -> Handler:
    async def show(exchange: Exchange) -> None:
        origins.check(exchange.headers)
        origins.check_host(exchange.headers)
        await exchange.send_page(200, HEADERS, render(status(), exchange.workers))

    return show


def _show_metrics(page: MetricsPage) -> Handler:
    async def show(exchange: Exchange) -> None:
        body, content_type = await page.render(exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.send_page(200, [(b"content-type", content_type.encode())], body)

    return show
