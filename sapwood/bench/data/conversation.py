"""Conversations: what a client asks, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Api = Literal["completions", "chat"]
"""Whether prompts are texts to continue with, or messages to answer."""

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text, token ids, or messages in the form of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: A text, token ids or messages.
        max_tokens: The most tokens to answer with; None for as many as the server likes.
        json_schema: What the answer must match, as JSON text; empty for free text.
        stop: The answer ends before the first of these.
    """

    prompt: Prompt
    max_tokens: int | None
    json_schema: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one client; each is asked when the one before was answered, with all that was said before it."""

    turns: tuple[Ask, ...]


Conversations = Iterator[Conversation]


class History:
    """What was said so far in a conversation.

    Args:
        api: How a turn continues from the answer before it: as a further message, or as more of the one text.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._messages: list[dict[str, Any]] = []
        self._text = ""

    def extend(self, turn: Ask) -> Ask:
        """The turn with all that came before it."""
        prompt = turn.prompt
        if self._api == "chat":
            new = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            self._messages += new  # type: ignore[arg-type]  # token ids are refused for chats before anything is sent
            prompt = list(self._messages)
        elif isinstance(prompt, str):
            self._text = prompt = f"{self._text}\n{prompt}" if self._text else prompt
        return replace(turn, prompt=prompt)

    def answered(self, text: str) -> None:
        """Adds an answer."""
        if self._api == "chat":
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._text += text
