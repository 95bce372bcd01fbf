"""Tells token ids from other values: a body may hold a million, whose types take 20 ms to look at in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.request.tokens import pieces

_AT_ONCE = 16_384


class TokenLists:
    """Looks at the lists of one request.

    Args:
        exchange: The request: others go on now and then where it is a large one.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._pause = exchange.pause

    async def are_tokens(self, values: Sequence[Any]) -> bool:
        """Whether all of these are whole numbers."""
        for piece in pieces(values, _AT_ONCE):
            if not set(map(type, piece)) <= {int}:
                return False
            await self._pause()
        return True
