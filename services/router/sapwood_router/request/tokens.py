"""Tokens. Those of a prompt are a list, or where there are very many an array, which takes 4 bytes a token; a list takes 36.

Work on each of very many tokens is done for :data:`MANY` of them at a time, which takes a millisecond or two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from sapwood_net.pacing.steps import Steps

ItemT = TypeVar("ItemT")
TokenIds: TypeAlias = "list[int] | array[int]"
MANY = 65_536
_GATHERED_AT_ONCE = 16_384


def pieces(items: Sequence[ItemT], size: int = MANY) -> Iterator[Sequence[ItemT]]:
    """Tokens, or what is known of each, ``size`` at a time."""
    for at in range(0, len(items), size):
        yield items[at : at + size]


def are_tokens(values: Sequence[Any]) -> bool:
    """Whether all of these are whole numbers. The most that a body may hold take 4 ms."""
    return set(map(type, values)) <= {int}


def gather(token_ids: Sequence[int]) -> list[int]:
    """A message's tokens; there are not very many."""
    return [*token_ids[:]]  # a message's own iterator takes twice as long as a slice of it


def gather_many(token_ids: Sequence[int]) -> Steps[TokenIds]:
    """A message's tokens, each below 2**32, as an array."""
    gathered = array("I")
    for piece in pieces(token_ids, _GATHERED_AT_ONCE):
        gathered.extend(piece)
        yield
    return gathered
