"""Hints about the cache that clients give beside what they ask: they cost or save time, and change no answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError

FIELD = "cache_hint"
LONGEST_KEEP = 366 * 86400.0
"""Seconds; what a router grants is far less."""
_KEY, _RETENTION = "prompt_cache_key", "prompt_cache_retention"
_USUAL_SECONDS, _LONG_SECONDS = 300.0, 86400.0


class CacheHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to become of a request's prompt and answer in the cache. Fields as in ``CacheHint`` of ``router.proto``."""

    keep_seconds: float = 0.0
    demote: bool = False
    prefetch: bool = False

    def check(self, field: str = FIELD) -> None:
        """Raises InvalidArgumentError, which names the field, where it makes no sense."""
        if not 0 <= self.keep_seconds <= LONGEST_KEEP:
            raise InvalidArgumentError(
                f"{field}.keep_seconds must be in 0..{LONGEST_KEEP:.0f}", field=f"{field}.keep_seconds"
            )
        if self.demote and (self.keep_seconds or self.prefetch):
            raise InvalidArgumentError(
                f"{field}.demote lets go of what the others keep: give one of them", field=f"{field}.demote"
            )


NO_HINT = CacheHint()


def cache_hint_of(own: CacheHint | None, given: Mapping[str, Any], keep_seconds: float = 0.0) -> CacheHint:
    """The hint of a body.

    Args:
        own: Our own field, which wins.
        given: The body, with fields of OpenAI's clients.
        keep_seconds: What holds where neither says how long.

    Raises:
        InvalidArgumentError: Our own field makes no sense. The others are never wrong.
    """
    hint = NO_HINT if own is None else own
    hint.check()
    if hint.keep_seconds or hint.demote:
        return hint
    kept = _kept(given) or keep_seconds
    return msgspec.structs.replace(hint, keep_seconds=kept) if kept else hint


def _kept(given: Mapping[str, Any]) -> float:
    """How long OpenAI's fields ask to keep a prompt; 0: they do not."""
    if given.get(_RETENTION) == "24h":
        return _LONG_SECONDS
    return _USUAL_SECONDS if given.get(_KEY) or given.get(_RETENTION) else 0.0
