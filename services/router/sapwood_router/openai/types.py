"""The requests of OpenAI's API that are understood, and the responses; names and shapes are OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sapwood_router.openai.logprobs import CompletionLogprobs

Name = Annotated[str, msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """``stream_options``; the second, of vLLM and SGLang, tells the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat have in common, but for sampling settings that only pass through: ``parameters.py`` has those."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    response_format: Any = None  # told apart in response_format.py
    regex: str | None = None
    ebnf: str | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Any = None  # a string, strings, token ids or lists of token ids: told apart in completions.py
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None  # an extension, named as in vLLM; so is the next, there a sampling parameter
    detokenize: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """What a call calls; ``arguments`` is JSON as text."""

    name: str
    arguments: str


class ToolCallObject(msgspec.Struct):
    """A call in an assistant's message, as a client sends it and as it is answered; only functions are understood."""

    id: str
    function: CalledFunction
    type: str = "function"


class FunctionDefinition(msgspec.Struct):
    """A function on offer. What else the client says of it goes to the model's template as it came."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool on offer; only functions are understood."""

    type: str
    function: FunctionDefinition | None = None


class Message(msgspec.Struct):
    """A message of a conversation; ``reasoning_content`` is an extension, named as in DeepSeek's API, vLLM and SGLang."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # A client may send an answer back as it came, with these empty.
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None  # a string or an object: told apart in tools.py
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension, named as in vLLM and SGLang


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageObject(msgspec.Struct):
    """``usage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct):
    """A choice of a completion; the last two, if asked for, are named as in vLLM."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class AnswerMessage(msgspec.Struct):
    """The assistant's turn; ``content`` is None where there are calls and no text."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallObject] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """A choice of a chat completion."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
