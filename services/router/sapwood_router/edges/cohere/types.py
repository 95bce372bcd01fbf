"""The requests of Cohere's API that are understood, and its responses; names and shapes are Cohere's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sapwood_router.edges.openai.types import AnyRequest, Tool, ToolCallObject


class CoherePart(msgspec.Struct):
    """A part of a message's content; of a tool's result it may be a document."""

    type: str
    text: str | None = None
    thinking: str | None = None
    document: dict[str, Any] | None = None


class CohereMessage(msgspec.Struct):
    """A message of a conversation; ``tool_plan`` is what the assistant reasoned before it called tools."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[CoherePart] | None = None
    tool_calls: list[ToolCallObject] | None = None
    tool_call_id: str | None = None
    tool_plan: str | None = None


class CohereThinking(msgspec.Struct):
    """Whether the model is to reason."""

    type: Literal["enabled", "disabled"]
    token_budget: int | None = None


class CohereFormat(msgspec.Struct):
    """What the answer must match; ``schema`` is the older name."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class CohereChatRequest(AnyRequest, kw_only=True):
    """``POST /v2/chat``."""

    messages: list[CohereMessage]
    tools: list[Tool] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    strict_tools: bool | None = None
    response_format: CohereFormat | None = None
    thinking: CohereThinking | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    k: int | None = None
    p: float | None = None
    stream: bool | None = None


class CohereAnswer(msgspec.Struct, kw_only=True):
    """The answer of ``/v2/chat``."""

    id: str
    finish_reason: str
    message: dict[str, Any]
    usage: dict[str, Any]


class CohereEmbedInput(msgspec.Struct):
    """Something to embed: parts that belong together."""

    content: list[CoherePart] | None = None


class CohereEmbedRequest(AnyRequest, kw_only=True):
    """``POST /v2/embed``."""

    texts: list[str] | None = None
    inputs: list[CohereEmbedInput] | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """The answer of ``/v2/embed``."""

    id: str
    response_type: str = "embeddings_by_type"
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
