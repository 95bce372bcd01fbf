"""The requests of Ollama's API that are understood, and its responses; names and shapes are Ollama's."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_router.edges.openai.types import AnyRequest, Tool


class OllamaFunction(msgspec.Struct):
    """What a call calls."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaCall(msgspec.Struct):
    """A call in an assistant's message."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(AnyRequest, kw_only=True):
    """What chats and texts have in common; ``options`` are told apart in options.py."""

    stream: bool | None = None
    format: Any = None  # "json" or a schema
    options: dict[str, Any] | None = None
    think: bool | str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """``POST /api/chat``."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """``POST /api/generate``."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class OllamaEmbedRequest(AnyRequest, kw_only=True):
    """``POST /api/embed``, and with ``prompt`` its older form ``POST /api/embeddings``."""

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class OllamaShowRequest(msgspec.Struct):
    """``POST /api/show``; ``name`` is the older name."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of an answer, or all of it. The counts are in the last one only; durations are nanoseconds."""

    model: str
    created_at: str
    message: dict[str, Any] | None = None
    response: str | None = None
    thinking: str | None = None
    done: bool | msgspec.UnsetType = msgspec.UNSET
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The answer of ``/api/embed``."""

    model: str
    embeddings: list[Any]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaModels(msgspec.Struct):
    """The answer of ``/api/tags`` and ``/api/ps``."""

    models: list[dict[str, Any]]


class OllamaShown(msgspec.Struct, kw_only=True):
    """The answer of ``/api/show``."""

    modified_at: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
