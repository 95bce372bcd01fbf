"""A node of the radix tree, and what a match finds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int32]

TOKEN_BYTES = 4
"""Bytes of a token id in a key, which is a sequence of native uint32."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages below its parent's.

    Attributes:
        key: The token ids of its pages; of a root, its namespace.
        pages: int32, its page ids.
        hashes: The chained hashes of its pages, 16 bytes each.
        parent: None for a root and for a node that has been evicted.
        children: By the bytes of their first page.
        locks: Locks on it and on everything below it.
        created: When it was cached, by the tree's tick.
        used: When it was last matched or cached, by the tree's tick.
        hits: How often it was matched.
        queued: Whether the eviction queue has an entry for it.
    """

    key: bytes
    pages: PageIds
    hashes: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    created: int = 0
    used: int = 0
    hits: int = 0
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: its last node (a root if there is none) and its pages, int32, from the start."""

    node: Node
    pages: PageIds


def is_free_leaf(node: Node) -> bool:
    """Whether eviction may take the node."""
    return node.parent is not None and not node.children and not node.locks


def root_of(node: Node) -> Node:
    """The root above a node, whose key is the namespace."""
    while node.parent is not None:
        node = node.parent
    return node
