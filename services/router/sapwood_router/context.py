"""One request on its way through the pipeline: what the edge understood, and what each stage adds."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from sapwood_common.errors import SapwoodError


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt the tokenizer has to encode."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation the tokenizer has to render and encode."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is tokens already."""

    token_ids: list[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None leaves a setting to the worker's default. Fields as in ``common.proto``."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How an edge's callers spell the fields that an error may name.

    Attributes:
        prompt: The prompt as a whole, for example ``text`` or ``messages.messages``.
        sampling: Prefix of the sampling fields: ``sampling.`` or empty.
        max_tokens: The full name of the limit on new tokens.
    """

    prompt: str
    sampling: str = "sampling."
    max_tokens: str = "sampling.max_tokens"


class FinishReason(enum.Enum):
    """Why a generation ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation."""

    reason: FinishReason
    usage: Usage
    stop_match: str | None = None


@dataclass(slots=True)
class Delta:
    """New text and the tokens it accounts for; ``finish`` is set on the last one only."""

    text: str
    token_ids: list[int]
    finish: Finish | None = None


@dataclass(slots=True)
class RequestContext:
    """A request and what the stages learned about it. One task owns it.

    Attributes:
        request_id: The client's id, or one made for it: for logs, metadata and answers.
        prompt, model, sampling, stop, skip_special_tokens: What the client asked for.
        fields: How the client spells them.
        deadline: On the event loop's clock.
        token_ids: The prompt's tokens (prepare).
        worker, reason: Address of the worker that answers, and why it was chosen (select).
        output_ids: Tokens the worker generated so far (execute).
        worker_finish, cached_tokens: What the worker said (execute); what was cached is what the first worker found.
        resumptions: How often the stream went on, on another worker, after tokens had come.
        started, first_token: On ``time.perf_counter``'s clock.
        usage, error: How it ended (respond, or the pipeline); neither is set while it runs or if the client left.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling
    stop: tuple[str, ...]
    fields: FieldNames
    deadline: float
    model: str | None = None
    skip_special_tokens: bool = True
    token_ids: list[int] = field(default_factory=list)
    worker: str = "-"
    reason: str = "-"
    output_ids: list[int] = field(default_factory=list)
    worker_finish: FinishReason | None = None
    cached_tokens: int = 0
    resumptions: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    usage: Usage | None = None
    error: SapwoodError | None = None
