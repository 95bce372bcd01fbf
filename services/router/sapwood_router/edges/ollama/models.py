"""Ollama's paths about models: which there are, and what is known of one."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.ollama.types import OllamaModels, OllamaShown, OllamaShowRequest
from sapwood_router.edges.routes import Handler
from sapwood_router.flow.generation import Pipeline

_LATEST = ":latest"
_SECONDS = 10.0
"""For the tokenizer to say what it knows of a model."""
_DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}
"""What the workers do not say."""


def named(pipeline: Pipeline, model: str | None) -> str | None:
    """The model that a client names: Ollama's have a tag, and clients add the usual one."""
    if model is not None and model.endswith(_LATEST) and model not in pipeline.registry.models():
        return model.removesuffix(_LATEST)
    return model


def list_models(pipeline: Pipeline, started: datetime) -> Handler:
    """Shows the models: all are loaded."""

    async def show(exchange: Exchange) -> None:
        found = [
            {
                "name": model,
                "model": model,
                "modified_at": _time(started),
                "size": 0,
                "digest": hashlib.sha256(model.encode()).hexdigest(),
                "details": _DETAILS,
                "context_length": pipeline.registry.context_length(model),
            }
            for model in sorted(pipeline.registry.models())
        ]
        await exchange.send_body(200, msgspec.json.encode(OllamaModels(found)))

    return show


async def show_model(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Shows one.

    Raises:
        NotFoundError: There is no such model.
    """
    request = convert(decode_object(body), OllamaShowRequest, {}, left_out=exchange.left_out)
    asked = request.model or request.name
    if not asked:
        raise InvalidArgumentError("model is required", field="model")
    registry = pipeline.registry
    model = registry.resolve_any(named(pipeline, asked))
    deadline = min(deadline, asyncio.get_running_loop().time() + _SECONDS)
    can = ["completion"] if registry.labels(model) is None else []
    if not registry.relays(model):
        try:
            info = await pipeline.tokenizers.of(model).client.info(exchange.request_id, deadline)
        except SapwoodError:
            info = None  # then nothing is known of it
        if info is not None and can:
            can += ["tools"] if info.tool_parser and not info.hides_tools else []
            can += ["thinking"] if info.reasoning_parser else []
    if registry.embeds(model):
        can.append("embedding")
    shown = OllamaShown(
        modified_at=_time(datetime.now(UTC)),
        parameters="",
        template="",
        details=_DETAILS,
        model_info={
            "general.architecture": "sapwood",
            "general.basename": model,
            "sapwood.context_length": registry.context_length(model),
        },
        capabilities=can,
    )
    await exchange.send_body(200, msgspec.json.encode(shown))


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
