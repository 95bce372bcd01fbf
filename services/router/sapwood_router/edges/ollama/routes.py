"""Ollama's paths."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

import msgspec

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.ollama.embed import embed, embed_one
from sapwood_router.edges.ollama.errors import OllamaDialect
from sapwood_router.edges.ollama.generate import chat, generate
from sapwood_router.edges.ollama.models import list_models, show_model
from sapwood_router.edges.ollama.types import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaShown,
    OllamaShowRequest,
)
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.flow.generation import Pipeline


def ollama_routes(pipeline: Pipeline) -> list[Route]:
    """The routes.

    Args:
        pipeline: Knows the models.
    """
    dialect, shown = OllamaDialect(), list_models(pipeline, datetime.now(UTC))
    return [
        Post(
            "/api/chat",
            chat,
            dialect,
            summary="Answers a conversation, Ollama's way",
            takes=(OllamaChatRequest,),
            gives=OllamaAnswer,
            streams=True,
        ),
        Post(
            "/api/generate",
            generate,
            dialect,
            summary="Goes on with a text, Ollama's way",
            takes=(OllamaGenerateRequest,),
            gives=OllamaAnswer,
            streams=True,
        ),
        Post(
            "/api/embed",
            embed,
            dialect,
            summary="Turns texts into vectors, Ollama's way",
            takes=(OllamaEmbedRequest,),
            gives=OllamaEmbeddings,
        ),
        Post("/api/embeddings", embed_one, dialect, summary="The same for one text", takes=(OllamaEmbedRequest,)),
        Post(
            "/api/show",
            show_model,
            dialect,
            summary="Describes a model, Ollama's way",
            takes=(OllamaShowRequest,),
            gives=OllamaShown,
        ),
        *(
            Ask(path, shown, dialect=dialect, summary="Lists the models, Ollama's way", gives=OllamaModels)
            for path in ("/api/tags", "/api/ps")
        ),
        Ask("/api/version", _show_version, dialect=dialect, summary="Tells the version"),
    ]


async def _show_version(exchange: Exchange) -> None:
    await exchange.send_body(200, msgspec.json.encode({"version": version("sapwood")}))
