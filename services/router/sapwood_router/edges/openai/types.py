"""The requests of OpenAI's API that are understood, and the responses; names and shapes are OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sapwood_router.edges.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from sapwood_router.request.cache_hint import CacheHint
from sapwood_router.request.context import Finish

Name = Annotated[str, msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """``stream_options``; the second, of vLLM and SGLang, tells the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class AnyRequest(msgspec.Struct, kw_only=True):
    """What all requests have in common; all but the first are extensions, named as in vLLM (``rid``: as in SGLang)."""

    model: str | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class GenerationRequest(AnyRequest, kw_only=True):
    """The common fields of completions and chat, except sampling settings that only pass through: ``parameters.py`` has those."""

    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    bad_words: list[str] | None = None  # an extension, named as in vLLM
    cache_hint: CacheHint | None = None  # ours
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None  # named as in vLLM; SGLang's name of it is the next
    no_stop_trim: bool | None = None
    response_format: Any = None  # distinguished in response_format.py, as are these extensions
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structural_tag: str | None = None
    json_schema: Any = None  # named as in llama.cpp; so is the next, which is an object in TGI
    grammar: Any = None
    lora_path: str | None = None  # the name of an adapter, as in SGLang; `model` may name it, too
    return_token_ids: bool | None = None  # an extension, named as in vLLM; so is the next
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``; ``session`` is an extension of ours."""

    prompt: Any = None  # a string, strings, token ids or lists of token ids: distinguished in completions.py
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    detokenize: bool | None = None  # an extension, named as vLLM's sampling parameter
    session: str | None = None
    add_special_tokens: bool | None = None  # an extension, named as in vLLM


class ImageUrl(msgspec.Struct):
    """Where a picture or a video is, or the file itself as a ``data:`` URL."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content: text, a picture or a video."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    video_url: ImageUrl | str | None = None  # an extension, named as in vLLM and SGLang


class CalledFunction(msgspec.Struct):
    """What a call calls; ``arguments`` is JSON as text, and some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallObject(msgspec.Struct):
    """A call in an assistant's message, as a client sends it and as it is answered; only functions are understood."""

    id: str
    function: CalledFunction | None = None
    type: str = "function"


class FunctionDefinition(msgspec.Struct):
    """A function on offer. Other fields of it go unchanged to the model's template."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool on offer; only functions are understood."""

    type: str
    function: FunctionDefinition | None = None


class Message(msgspec.Struct):
    """A message of a conversation; the reasoning is an extension, ``reasoning_content`` in DeepSeek's API, vLLM and SGLang, and
    ``reasoning`` in newer versions of vLLM, Ollama and OpenRouter."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    # A client may send an answer back as it came, with these empty.
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None  # a string or an object: distinguished in tools.py
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # Extensions, named as in vLLM and SGLang.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    # As the servers of Qwen, DeepSeek and others take it; the second is a boolean or an object: distinguished in parameters.py.
    enable_thinking: bool | None = None
    thinking: Any = None


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from, and how many are kept in the cache now because the client asked for it."""

    cached_tokens: int
    cache_write_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct):
    """How the drafted tokens fared, and how many were reasoning."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0


class UsageObject(msgspec.Struct):
    """``usage``; the last are there if tokens were drafted, or are reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def stop_reason(finish: Finish) -> str | int | None:
    """The client's stop string or token at which a generation ended, in vLLM's form; None: it ended by itself."""
    return finish.stop_match if finish.stop_match is not None else finish.stop_token


class CompletionChoice(msgspec.Struct):
    """A choice of a completion; the last four are named as in vLLM. The first two of them are there if asked for."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | None = None
    stop_reason: str | int | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class AnswerMessage(msgspec.Struct):
    """The assistant's turn; ``content`` is None where there are calls and no text. Clients know the reasoning by either name."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallObject] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """A choice of a chat completion; the last two, the first of them if asked for, are named as in vLLM."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    stop_reason: str | int | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/chat/completions``; the last two are named as in vLLM, the first of them there if asked for."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | None = None
