"""The requests of OpenAI's Responses API that are understood; names and shapes are OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sapwood_router.edges.openai.types import AnyRequest
from sapwood_router.request.cache_hint import CacheHint

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Part(msgspec.Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(msgspec.Struct):
    """An item of the input, of whatever type; one without a type is a message."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: str | list[Part] | None = None
    encrypted_content: str | None = None
    server_label: str | None = None
    error: Any = None
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None


class Tool(msgspec.Struct, omit_defaults=True):
    """A tool on offer: a function, or the tools of an MCP server, to which the fields from ``server_label`` on belong."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    server_label: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    server_url: str | None = None
    server_description: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: Any = None
    require_approval: Any = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What the answer's text must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    """What the answer's text is to be like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    """How much the model should reason; its reasoning is returned unchanged, without a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ConversationId(msgspec.Struct):
    """The conversation that a request goes on with."""

    id: str


class ResponsesRequest(AnyRequest, kw_only=True):
    """``POST /v1/responses``; ``chat_template_kwargs`` and those after it are extensions, named as in chats."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    cache_hint: CacheHint | None = None  # ours
    tools: list[Tool] | None = None
    tool_choice: Any = None  # a string or an object: told apart in tools.py
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: Any = None
