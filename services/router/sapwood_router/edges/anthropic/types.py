"""The requests of Anthropic's API that are understood, and its responses; names and shapes are Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sapwood_router.request.cache_hint import CacheHint

SIGNATURE = "unsigned"
"""The signature of thinking: no server checks it, but some clients send thinking back only if it is signed."""
Name = Annotated[str, msgspec.Meta(min_length=1)]


class Source(msgspec.Struct):
    """Where a picture is: in ``data`` as base64, or at ``url``."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class CacheControl(msgspec.Struct):
    """That the prompt is to be kept cached, for five minutes or an hour."""

    type: str
    ttl: Literal["5m", "1h"] = "5m"


class Block(msgspec.Struct):
    """A block of content of whatever type; what else it says changes no answer."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    thinking: str | None = None
    source: Source | None = None
    cache_control: CacheControl | None = None


class Message(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool on offer; those with a schema of the client's are understood."""

    name: Name | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    """Which tools the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """Whether the model is to reason first; how long it does so is its own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonFormat(msgspec.Struct):
    """What an answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """What the answer is to be like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct):
    """What the client says of its own user."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``; those after ``tools`` are extensions, named as in vLLM."""

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    thread: Any = None  # refused in words that clients know
    cache_hint: CacheHint | None = None  # ours


class CacheCreation(msgspec.Struct):
    """The tokens that were written to the cache, by how long they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(msgspec.Struct):
    """``usage``: the prompt's tokens are those computed, those read from the cache, and those written to it because the request
    asked for it.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation | msgspec.UnsetType = msgspec.UNSET


class MessageResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/messages``; events begin with one that is still empty."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(msgspec.Struct):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
