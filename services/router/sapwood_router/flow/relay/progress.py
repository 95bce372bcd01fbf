"""What has come of an answer that is streamed, and what another backend would be asked to go on with it.

Until its first text nothing of an answer is sent on, so that a backend that fails before leaves no trace. After that an answer
that is one text can go on, within what is left of the limit: a completion from prompt and text, a chat with the text as the
assistant's last message. It is a continuation of the text, not the tokens that would have come: the text is tokenized again, and
a seed counts from there. Other answers (calls of tools, reasoning, grammars, several choices, log probabilities) end with an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import InternalError
from sapwood_router.flow.relay.asked import Asked

CONTINUE_CHATS = frozenset({"sapwood", "sglang", "vllm"})
"""Servers that take ``continue_final_message``, and tell the usage so far if asked for it (``continuous_usage_stats``)."""
SALTED = frozenset({"sapwood", "vllm"})
"""Servers that take ``cache_salt``, so that tenants share no cache."""

Chunk = dict[str, Any]
_CALLS = range(1024)
"""Indexes that calls of tools may have."""
_MOST_HELD, _MOST_HELD_BYTES = 64, 64 * 1024
"""Chunks before the first that says something, mostly one, and their bytes."""
_MOST_TEXT = 4 * 1024 * 1024
"""Characters of a text that another backend could go on with."""
_MOST_TOKENS = 16 * 1024 * 1024
"""Tokens of an answer or a prompt: a larger count is none."""


class Progress:
    """The progress of one answer.

    Args:
        asked: The request.

    Attributes:
        tokens: Tokens of the answer so far: as backends say, or one for each chunk.
        usage: The usage from the last backend, plus the tokens of earlier backends; None: it reported none.
        sent: Whether the client has got anything.
        ended: Whether a choice has its finish reason: all that can be missing is the usage.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._goes_on = asked.can_go_on
        self._before = 0
        """Tokens that came from earlier backends."""
        self._resumed = False
        self._first: Chunk = {}
        """``id``, ``created`` and the like: the client is to see one answer."""
        self._held: list[Chunk] = []
        self._held_bytes = 0
        self._parts: list[str] = []
        self._characters = 0
        self.tokens = 0
        self.usage: dict[str, Any] | None = None
        self.sent = False
        self.ended = False

    @property
    def text(self) -> str:
        """What has come of the only choice, where another backend can go on with it."""
        return "".join(self._parts)

    @property
    def may_be_asked_again(self) -> bool:
        """Whether another backend can begin the answer, or go on with it."""
        return not self.sent or (self._goes_on and not self.ended)

    @property
    def continues(self) -> bool:
        """Whether the next backend must be able to go on with a chat: not every one can."""
        return self.sent and self._asked.kind == "chat"

    @property
    def at_limit(self) -> bool:
        """Whether the whole answer came: the lost backend had only to say that the limit was reached."""
        limit = self._asked.limit
        return self.sent and limit is not None and self.tokens >= self._asked.body[limit]

    def body(self, model: str, owner: str) -> Chunk:
        """What the next backend is sent.

        Args:
            model: What that backend calls the model.
            owner: The kind of server that it says it is.
        """
        asked = self._asked
        body = {**asked.body, "model": model}
        self._held.clear()
        self._held_bytes = 0
        if not self.sent:
            self.tokens, self.usage, self.ended = 0, None, False
        self._before, self._resumed = self.tokens, self.sent
        if asked.context.caller.cache_salt and owner in SALTED:
            body["cache_salt"] = asked.context.caller.cache_salt
        if asked.streams:
            given = body.get("stream_options")
            options = dict(given) if isinstance(given, dict) else {}
            body["stream_options"] = options | {"include_usage": True}
            if owner in CONTINUE_CHATS:
                body["stream_options"]["continuous_usage_stats"] = True
        if text := self.text:
            if asked.limit is not None:
                body[asked.limit] = asked.body[asked.limit] - self.tokens
            if asked.kind == "completion":
                body["prompt"] = asked.body["prompt"] + text
            else:
                body["messages"] = [*asked.body["messages"], {"role": "assistant", "content": text}]
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def take(self, chunk: Chunk) -> list[Chunk]:
        """A chunk as the client is to see it, after those that were held back; none if it is to see none yet.

        Raises:
            InternalError: It is no chunk of OpenAI's API, or one of too many that say nothing.
        """
        if not all(_is_delta(choice.get("delta", {})) for choice in chunk["choices"]):
            raise InternalError("the backend answered what is no chunk of OpenAI's API")
        for choice in chunk["choices"]:
            self._look(choice)
        usage = chunk.pop("usage", None)
        if isinstance(usage, dict):
            self._count(usage)
        elif any(_text_of(choice) for choice in chunk["choices"]):
            self.tokens += 1
        if not chunk["choices"] and usage is not None:
            return []  # it is told at the end, wherever the backend tells it
        if self._resumed and all(not _says(choice) for choice in chunk["choices"]):
            return []  # the other backend's opening
        shown = self._named(chunk, self.usage if self._asked.wishes("continuous_usage_stats") else None)
        if not self.sent and all(not _says(choice) for choice in chunk["choices"]):
            self._hold(shown)
            return []
        self.sent = True
        chunks, self._held = [*self._held, shown], []
        return chunks

    def _hold(self, chunk: Chunk) -> None:
        """Keeps a chunk until one follows that says something."""
        self._held.append(chunk)
        self._held_bytes += len(msgspec.json.encode(chunk))
        if len(self._held) > _MOST_HELD or self._held_bytes > _MOST_HELD_BYTES:
            raise InternalError("the backend streams and says nothing")

    def take_whole(self, answer: Chunk) -> None:
        """An answer in one piece has come: nothing is asked again."""
        self.sent = True
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
            self.tokens = number(usage.get("completion_tokens"))

    def end(self) -> list[Chunk]:
        """What is left to be sent when the backend is at its end: what was held back, and the usage.

        Raises:
            InternalError: Nothing came at all.
        """
        held, self._held = self._held, []
        if not self.sent and not held:
            raise InternalError("the backend ended a stream without an answer")
        self.sent = True
        return held + self._closing()

    def end_at_limit(self) -> list[Chunk]:
        """What a backend would have sent that was lost when it had only to say that the limit is reached."""
        choice: Chunk = {"index": 0, "finish_reason": "length", "logprobs": None}
        if self._asked.kind == "chat":
            choice["delta"] = {}
        else:
            choice["text"] = ""
        return [self._named({"choices": [choice]}, None), *self._closing()]

    def _closing(self) -> list[Chunk]:
        if self.usage is None or not self._asked.wishes("include_usage"):
            return []
        return [self._named({"choices": []}, self.usage)]

    def _look(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta", {})
        if any(delta.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "reasoning", "audio")):
            self._goes_on = False
        if self._goes_on and (text := _text_of(choice)):
            self._parts.append(text)
            self._characters += len(text)
            self._goes_on = self._characters <= _MOST_TEXT
        if not self._goes_on:
            self._parts.clear()
        self.ended = self.ended or choice.get("finish_reason") is not None

    def _count(self, usage: dict[str, Any]) -> None:
        prompt, completion = number(usage.get("prompt_tokens")), number(usage.get("completion_tokens"))
        self.tokens = self._before + completion
        prompt = max(0, prompt - self._before)
        self.usage = usage | {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
        }

    def _named(self, chunk: Chunk, usage: dict[str, Any] | None) -> Chunk:
        if not self._first:
            self._first = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
            self._first["model"] = self._asked.context.model
        extra = {"usage": usage} if usage is not None else {}
        return {**chunk, **self._first, **extra}


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def _says(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has more than its opening."""
    delta = choice.get("delta")
    said = isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")
    return said or bool(choice.get("text")) or choice.get("finish_reason") is not None


def number(value: Any) -> int:
    """A count from a backend; 0 if it is none that can be."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else 0


def _is_delta(delta: object) -> bool:
    """Whether it is one that clients can take: many make a list as long as the largest index of a call."""
    if not isinstance(delta, dict):
        return False
    calls = delta.get("tool_calls") or []
    return isinstance(calls, list) and all(
        isinstance(call, dict) and (call.get("index") is None or call["index"] in _CALLS) for call in calls
    )
