"""Continuations of a prompt whose log probabilities are wanted, as a tree: what several begin with is one node."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Continuation(msgspec.Struct, frozen=True, array_like=True):
    """A node of the tree.

    Attributes:
        parent: The index of the node that it continues, an earlier one; -1: it continues the prompt.
        token_ids: Its own tokens, at least one.
    """

    parent: int
    token_ids: list[int]


def longest(nodes: Sequence[Continuation]) -> int:
    """Tokens of the longest path. O(nodes)."""
    ends: list[int] = []
    for node in nodes:
        ends.append((ends[node.parent] if node.parent >= 0 else 0) + len(node.token_ids))
    return max(ends, default=0)
