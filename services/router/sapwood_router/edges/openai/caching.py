"""What OpenAI's clients say of the cache: a hint how long a prompt is to be kept there. A hint is never wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY, _RETENTION = "prompt_cache_key", "prompt_cache_retention"
_USUAL_SECONDS, _LONG_SECONDS = 300.0, 86400.0


def keep_seconds_of(given: Mapping[str, Any]) -> float:
    """How long a request asks to keep its prompt; 0: it does not."""
    if given.get(_RETENTION) == "24h":
        return _LONG_SECONDS
    return _USUAL_SECONDS if given.get(_KEY) or given.get(_RETENTION) else 0.0
