"""Counts the tokens of an answer that only passes: by its events, and by the usage that its end reports."""

from __future__ import annotations

import json
from typing import Any

from sapwood_router.flow.relay.progress import number
from sapwood_router.request.context import Usage

_TAIL = 4096
"""Bytes at an answer's end in which its usage stands."""
_EVENT, _USAGE = b"data:", '"usage"'


class AnswerMeter:
    """Measures one answer.

    Args:
        events: Whether it comes as server-sent events.
        readable: Whether its bytes are text: not compressed.

    Attributes:
        tokens: Tokens so far: one for each event.
    """

    def __init__(self, *, events: bool, readable: bool) -> None:
        self._events = events
        self._readable = readable
        self._tail = b""
        self.tokens = 0

    def take(self, piece: bytes) -> int:
        """A piece of the answer came; returns about how many tokens it has."""
        if not self._readable:
            return 0
        self._tail = (self._tail + piece[-_TAIL:])[-_TAIL:]
        count = piece.count(_EVENT) if self._events else 0
        self.tokens += count
        return count

    def usage(self, prompt_tokens: int) -> Usage:
        """The answer is complete: the usage that it reports, and what was counted of what it does not report.

        Args:
            prompt_tokens: An estimate.
        """
        usage = self._reported()
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
        return Usage(
            number(usage.get("prompt_tokens", usage.get("input_tokens"))) or prompt_tokens,
            number(usage.get("completion_tokens", usage.get("output_tokens"))) or self.tokens,
            number(cached),
        )

    def _reported(self) -> dict[str, Any]:
        text = self._tail.decode(errors="replace")
        at = text.rfind(_USAGE)
        while at >= 0:
            try:
                usage, _ = json.JSONDecoder().raw_decode(text[at + len(_USAGE) :].lstrip(" \t\r\n:"))
            except (ValueError, RecursionError):
                return {}
            if isinstance(usage, dict):
                return usage
            at = text.rfind(_USAGE, 0, at)  # null, in the last chunks of some
        return {}
