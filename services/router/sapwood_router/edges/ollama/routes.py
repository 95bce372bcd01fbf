"""Ollama's paths."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.ollama.errors import OllamaDialect
from sapwood_router.edges.ollama.generate import chat, generate
from sapwood_router.edges.ollama.models import list_models, named, show_model
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
from sapwood_router.edges.openai.embeddings import inputs_of
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.embed_request import Embeddings, EmbedRequest

_IGNORED = frozenset({"keep_alive"})


async def embed(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers with a vector for each input.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    began = time.perf_counter()
    request = _request(exchange, body)
    if request.input == []:
        model = pipeline.registry.resolve(named(pipeline, request.model))
        await exchange.send_body(200, msgspec.json.encode(_answer(Embeddings(model, [], 0), began)))
        return
    found = await _embed(exchange, request, request.input, "input", pipeline, deadline)
    await exchange.send_body(200, msgspec.json.encode(_answer(found, began)))


async def embed_one(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers with the vector of ``prompt``.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    request = _request(exchange, body)
    if request.prompt is None:
        raise InvalidArgumentError("prompt is required", field="prompt")
    found = await _embed(exchange, request, request.prompt, "prompt", pipeline, deadline)
    await exchange.send_body(200, msgspec.json.encode({"embedding": list(found.vectors[0])}))


def _request(exchange: Exchange, body: bytes) -> OllamaEmbedRequest:
    request = convert(decode_object(body), OllamaEmbedRequest, {}, _IGNORED, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    return request


async def _embed(
    exchange: Exchange,
    request: OllamaEmbedRequest,
    given: str | list[str] | None,
    field: str,
    pipeline: Pipeline,
    deadline: float,
) -> Embeddings:
    inputs, names = inputs_of(given)
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=inputs,
        names=[name.replace("input", field, 1) for name in names],
        model=named(pipeline, request.model),
        normalize=True,
        dimensions=request.dimensions,
        max_tokens=None if request.truncate is False else -1,
        deadline=deadline,
        caller=exchange.caller(request, {}),
    )
    exchange.on_disconnect(lambda: None)
    return await pipeline.embedder.embed(wanted)


def _answer(found: Embeddings, began: float) -> OllamaEmbeddings:
    return OllamaEmbeddings(
        model=found.model,
        embeddings=[list(vector) for vector in found.vectors],
        total_duration=max(1, round((time.perf_counter() - began) * 1e9)),
        load_duration=0,
        prompt_eval_count=found.prompt_tokens,
    )


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
