"""A request that goes to backends, and what its body says as far as the way there depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sapwood_router.request.context import RequestContext

Kind = Literal["chat", "completion"]

PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions"}
_GRAMMARS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
    }
)
"""Parameters of several servers that make an answer match a grammar. Its second half alone would not match that."""
_OTHERS = frozenset(
    {"tools", "functions", "logprobs", "top_logprobs", "echo", "suffix", "audio", "best_of", "min_tokens"}
)
"""Further parameters with which no other backend can go on: the answer is more than text, or depends on more than text."""
_PROMPTS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""Parameters of several APIs that are the prompt, in the order in which models see them."""
_LIMITS = ("max_completion_tokens", "max_tokens")
_BYTES_A_TOKEN = 4
_MOST_BYTES = 1024 * 1024
"""Most bytes of the prompt that the choice of a backend looks at."""


class Asked(msgspec.Struct):
    """The request.

    Attributes:
        kind: What it asks for.
        body: Its body as it came.
        context: The rest; ``prompt`` holds what the body has of it, for the log.
    """

    kind: Kind
    body: Mapping[str, Any]
    context: RequestContext

    @property
    def streams(self) -> bool:
        """Whether it asks for events."""
        return self.body.get("stream") is True

    @property
    def limit(self) -> str | None:
        """The parameter that bounds the answer's tokens; None: none does."""
        return next((name for name in _LIMITS if isinstance(self.body.get(name), int)), None)

    def most_tokens(self, context_length: int) -> int | None:
        """Tokens that all choices together can have at most; None: neither the request nor the model says.

        Args:
            context_length: The model's; 0: it is not known.
        """
        limit, choices = self.limit, self.body.get("n")
        most = context_length if limit is None else self.body[limit]
        return most * choices if most and isinstance(choices, int) and choices > 0 else most or None

    def wishes(self, option: str) -> bool:
        """Whether it has this stream option."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get(option) is True

    @property
    def can_go_on(self) -> bool:
        """Whether its answer is one text, which a backend that gets the beginning of it can go on with."""
        body = self.body
        if not self.streams or body.get("n") not in (None, 1):
            return False
        if any(body.get(name) not in (None, False, 0, [], "auto", {"type": "text"}) for name in _GRAMMARS | _OTHERS):
            return False
        if self.kind == "completion":  # without a limit in the request only the server knows it
            return isinstance(body.get("prompt"), str) and self.limit is not None and body.get("logprobs") is None
        messages = body.get("messages")
        return isinstance(messages, list) and bool(messages) and not _is_answer(messages[-1])


def pseudo_tokens(body: Mapping[str, Any]) -> list[int]:
    """The prompt of a body as numbers, four bytes of it each: policies compare beginnings, and no tokenizer is asked for it."""
    parts = [body.get(name) for name in _PROMPTS]
    raw = b"".join(msgspec.json.encode(part) for part in parts if part is not None)[:_MOST_BYTES]
    whole = raw[: len(raw) - len(raw) % _BYTES_A_TOKEN]
    return [] if not whole else memoryview(whole).cast("I").tolist()


def _is_answer(message: Any) -> bool:
    return not isinstance(message, dict) or message.get("role") == "assistant"
