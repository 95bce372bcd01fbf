"""One request in the pipeline: the fields that the API has parsed, and those that each stage adds."""

from __future__ import annotations

import base64
import binascii
import enum
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from sapwood_common.contract.json_text import decode
from sapwood_common.contract.pictures import PictureSpan
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.grammar.source import GrammarKind
from sapwood_common.random_bytes import random_bytes
from sapwood_common.telemetry.logs import is_valid_request_id, new_request_id
from sapwood_router.request.cache_hint import NO_HINT, CacheHint
from sapwood_router.request.caller import NOBODY, Caller
from sapwood_router.request.output import Output, OutputOptions
from sapwood_router.request.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What text must match. Fields as in ``Grammar`` of ``common.proto``."""

    kind: GrammarKind
    text: str
    any_whitespace: bool = True
    lenient: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls there must be.

    Attributes:
        required: There must be calls, and nothing else.
        name: The only tool that may be called, exactly once; "" for any.
    """

    required: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar as workers take it.

    Attributes:
        compiled: The grammar.
        tool_parser: Reads the calls in its outputs.
        left_out: What its schemas ask for and it does not enforce.
    """

    compiled: bytes
    tool_parser: str
    left_out: tuple[str, ...] = ()


def has_strict_tool(tools: str) -> bool:
    """Whether a JSON array of tools has one whose schema is to be enforced although no call is."""
    if '"strict"' not in tools:
        return False
    try:
        found: Any = decode(tools)
    except (msgspec.DecodeError, RecursionError):
        return False  # the tokenizer service says what is wrong
    return isinstance(found, list) and any(map(_is_strict, found))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


class Likelihoods(Protocol):
    """The logarithm of a token's probability, and the likeliest tokens in its place, the likeliest first (``worker.proto``)."""

    @property
    def logprob(self) -> float:
        """The token's own."""
        ...

    @property
    def top_ids(self) -> Sequence[int]:
        """The likeliest tokens."""
        ...

    @property
    def top_logprobs(self) -> Sequence[float]:
        """Theirs."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Implements :class:`Likelihoods` for a token of an answer.

    Facts about a prompt's tokens stay in the message that brought them: making an object for each would block the event loop.
    """

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


class SessionTurn(Protocol):
    """One request of a session; there is one at a time.

    Attributes:
        tokens: What the session holds so far.
        worker: The address of the worker that has it cached; empty: none.
    """

    tokens: Sequence[int]
    worker: str

    async def commit(
        self,
        token_ids: Sequence[int],
        prompt_tokens: int,
        cached_tokens: int,
        model: str,
        worker: str,
        cache_salt: str,
        lora: str = "",
    ) -> None:
        """The request has its whole answer: once this returns, other routers can continue it.

        Args:
            token_ids: All that the session holds now.
            prompt_tokens, cached_tokens: How many of them were the prompt, and how many of these were cached.
            model: The model.
            worker: The address of the worker that finished it.
            cache_salt: The request's salt.
            lora: The adapter; empty: none.
        """
        ...

    def release(self) -> None:
        """The request is over; without a commit the session is as it was before. May be called again."""
        ...


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made; ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


BETWEEN_PARTS = "\n"
"""What stands between the texts of one message where a template takes one text, as in vLLM and SGLang."""


class PictureSource(msgspec.Struct, frozen=True):
    """A picture, or a ``video``, as a client sent it: its ``url``, or the file as ``data``."""

    url: str = ""
    detail: str = ""
    data: bytes = b""
    video: bool = False


def picture_file(text: str, field: str) -> PictureSource:
    """A picture that came as base64.

    Raises:
        InvalidArgumentError: It is no base64; names the field.
    """
    try:
        return PictureSource(data=base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise InvalidArgumentError("a picture is base64", field=field) from None


class Picture(msgspec.Struct, frozen=True):
    """A picture that was prepared, at its place. Fields as in ``Picture`` of ``common.proto``."""

    span: PictureSpan
    shape: tuple[int, int, int]
    layout: tuple[int, ...]
    pixels: bytes


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation. Fields as in ``ChatMessage`` of ``common.proto``."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    parts: tuple[str, ...] = ()
    items: tuple[str | PictureSource, ...] = ()


class ScoreNode(msgspec.Struct, frozen=True):
    """A node of a tree of continuations to score. Fields as in ``ScoreNode`` of ``worker.proto``; -1: it continues the prompt."""

    parent: int
    token_ids: tuple[int, ...]


class TextPrompt(msgspec.Struct, frozen=True):
    """A prompt the tokenizer has to encode; with a suffix the model is to fill the gap between the two.

    ``add_special``: whether the model's own special tokens come before the text. ``pictures``: they go in the places of the
    model's marks for pictures in the text.
    """

    text: str
    suffix: str = ""
    add_special: bool = True
    pictures: tuple[PictureSource, ...] = ()


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation the tokenizer has to render and encode.

    Attributes:
        turns: What was said.
        tools: The tools on offer, a JSON array in the form of OpenAI's API; "" for none.
        template_variables: Further variables for the chat template, a JSON object; "" for none.
        add_generation_prompt: Whether to end with the opening of the assistant's turn; None: unless a message is continued.
        continue_final_message: Whether the answer continues the last turn.
    """

    turns: tuple[Turn, ...]
    tools: str = ""
    template_variables: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt that is tokens already."""

    token_ids: TokenIds


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class Truncation(msgspec.Struct, frozen=True):
    """A longer prompt is cut to ``tokens``, its last ones or its first; -1: to as many as leave room for the answer.

    ``drops_turns``: a conversation loses its oldest turns instead, and no turn is cut.
    """

    tokens: int
    keep_first: bool = False
    drops_turns: bool = False


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How an edge's callers spell the fields that an error may name.

    Attributes:
        prompt: The prompt as a whole, for example ``text`` or ``messages.messages``.
        sampling: Prefix of the sampling fields: ``sampling.`` or empty.
        max_tokens: The full name of the limit on new tokens.
        call: Prefix of a tool call's name and arguments within the call: ``function.`` or empty.
        reasoning: The name of a message's reasoning within the message.
        grammar: The full name of what the text must match; "" where it is named as in ``common.proto``.
        tool_name: The full name of the tool that is to be called.
        template_variables: The full name of further variables for the chat template.
        stop: The full name of the stop strings.
        turns: The full name of each of a conversation's turns; empty: they are the items of ``prompt``.
        tool: Prefix of the field names of a tool: ``function.`` or empty.
        parameters: The name of a tool's parameters within that.
        lora: The full name of the adapter.
        items: The name of a message's parts within the message.
        pictures: The full name of the pictures of a text; empty: it has none.
        healing: The full name of the option of token healing.
    """

    prompt: str
    sampling: str = "sampling."
    max_tokens: str = "sampling.max_tokens"
    call: str = ""
    reasoning: str = "reasoning"
    grammar: str = ""
    tool_name: str = "tool_choice_function"
    template_variables: str = "template_variables"
    stop: str = "stop"
    turns: tuple[str, ...] = ()
    tool: str = "function."
    parameters: str = "parameters"
    lora: str = "lora_name"
    items: str = "items"
    pictures: str = ""
    healing: str = "token_healing"


class FinishReason(enum.Enum):
    """Why a generation ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request; those of drafts are the last worker's. ``written_tokens``: those of the prompt that were not
    cached, and are kept now because the client asked for it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    written_tokens: int = 0


class Finish(msgspec.Struct, frozen=True):
    """The end of a generation; the stop string or the token of ``stop_token_ids`` that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    stop_match: str | None = None
    stop_token: int | None = None


class Delta(msgspec.Struct, gc=False):
    """New output and the tokens read for it; ``finish`` is set on the last one only.

    ``logprobs``, if asked for, has one for each token; the first ``text_tokens`` of the tokens are no end token. ``index`` says
    which of a request's generations it is of.
    """

    output: Output
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    text_tokens: int = 0
    index: int = 0


class RequestContext(msgspec.Struct):
    """A request and what the stages learned about it. One task owns it.

    Attributes:
        request_id: The client's id, or one made for it: for logs, metadata and answers.
        prompt, model, sampling: What the client asked for; the seed is the client's or one drawn for it.
        truncation: How a long prompt is cut; None: it is not.
        bad_words: Words that the answer does not hold; they become tokens of ``sampling`` (prepare).
        output: How tokens become output: first the client's settings, then also the model's (prepare).
        whole: Whether the answer is sent in one piece, at its end.
        detokenize: Whether there is to be text; else the answer is token ids alone.
        grammar: What the text must match.
        tool_choice: Which calls there must be.
        parallel_tool_calls: Whether there may be several calls.
        lora: The adapter that generates; empty: none. Until the model is settled it may be part of ``model`` instead.
        named: What the client called the adapter; empty: there is none.
        lora_digest: The digest of its weights at the first worker, as far as it is known.
        session: The session that it continues; None: none.
        hint: What is to become of the prompt in the cache.
        heals: Whether the prompt's last tokens are taken back where a longer token could begin with their text.
        healed: What the answer begins with that the client is not sent (prepare, respond).
        notice: A notice for the client in addition to its answer; empty: none (prepare).
        compiled_grammar: The grammar of the output as workers take it; empty if it is free (prepare).
        fields: How the client spells them.
        deadline: On the event loop's clock.
        caller: Who asks.
        worker_request_id: Unique among all requests, also where clients reuse an id.
        token_ids: The prompt's tokens (prepare).
        pictures: The pictures among them (prepare).
        continuations: What is scored instead of generating; ``prompt_logprobs`` then has one for each of their tokens.
        packed: The same as parts of a message, ready for the first worker, where there are very many.
        worker, reason: Address of the worker that answers, and why it was chosen (select).
        output_ids: Tokens the worker generated so far (execute).
        weight_versions: What the weights are called that have computed them, each with the first token from which on they have.
        logprobs, prompt_logprobs: How likely those were, and the prompt's tokens but the first, if asked for (execute).
        own_ends: Stop tokens that are the model's, not the client's (prepare).
        worker_finish, cached_tokens: From the worker (execute); the cached tokens are those of the first worker.
        written_tokens: See :class:`Usage` (respond).
        accepted_prediction_tokens, rejected_prediction_tokens: Drafted tokens that were and were not output (execute).
        attempts: Workers the request was given to (build).
        handoffs: How often the worker that computed the prompt gave a ticket for it.
        resumptions: How often the stream went on, on another worker, after tokens had come.
        objective: What became of the objective, one of the words of ``request/objective.py``; empty: nothing to say.
        started, first_token: On ``time.perf_counter``'s clock.
        usage, error: How it ended (respond, or the pipeline); neither is set while it runs or if the client left.
    """

    request_id: str
    worker_request_id: str
    prompt: Prompt
    sampling: SamplingParams
    output: OutputOptions
    fields: FieldNames
    deadline: float
    model: str | None = None
    truncation: Truncation | None = None
    bad_words: tuple[str, ...] = ()
    whole: bool = False
    detokenize: bool = True
    grammar: AnswerGrammar | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    caller: Caller = NOBODY
    lora: str = ""
    named: str = ""
    lora_digest: bytes = b""
    session: SessionTurn | None = None
    notice: str = ""
    hint: CacheHint = NO_HINT
    heals: bool = False
    healed: str = ""
    compiled_grammar: bytes = b""
    token_ids: TokenIds = msgspec.field(default_factory=list)
    pictures: Sequence[Picture] = ()
    continuations: Sequence[ScoreNode] = ()
    packed: Sequence[bytes] = ()
    worker: str = "-"
    reason: str = "-"
    output_ids: array[int] = msgspec.field(default_factory=partial(array, "I"))
    weight_versions: list[tuple[int, str]] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    prompt_logprobs: Sequence[Likelihoods] = ()
    own_ends: frozenset[int] = frozenset()
    worker_finish: FinishReason | None = None
    cached_tokens: int = 0
    written_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    attempts: int = 0
    handoffs: int = 0
    resumptions: int = 0
    objective: str = ""
    started: float = msgspec.field(default_factory=time.perf_counter)
    first_token: float | None = None
    usage: Usage | None = None
    error: SapwoodError | None = None

    @property
    def public_model(self) -> str:
        """What answers call the model: as the client named its adapter, if there is one."""
        return self.named or self.model or ""

    @property
    def token_counts(self) -> tuple[int, int]:
        """Tokens generated, and of the prompt, as far as they are known."""
        if self.usage is None:
            return len(self.output_ids), len(self.token_ids)
        return self.usage.completion_tokens, self.usage.prompt_tokens


_LONGEST_STEM = 110


def accept_request_id(given: str, field: str) -> str:
    """The client's id; a new one if it gave none.

    Raises:
        InvalidArgumentError: It cannot be put into headers and logs.
    """
    if not given:
        return new_request_id()
    if not is_valid_request_id(given):
        raise InvalidArgumentError(f"{field} must be 1 to 128 letters, digits and ._:/@+=-", field=field)
    return given


def unique_id(request_id: str) -> str:
    """An id for the worker: clients may use an id twice at a time, workers may not."""
    return f"{request_id[:_LONGEST_STEM]}.{random_bytes(4).hex()}"
