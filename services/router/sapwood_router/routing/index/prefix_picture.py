"""A picture of the radix tree of cached prefixes: the prompts asked for lately, merged where they begin alike.

Algorithm: a page's hash covers everything before it, so each hash is a node, and the page before it its parent. Runs of pages
that have one successor, the same holders and the same heat become one node.
Complexity: O(chains x pages), at most MOST_CHAINS x MOST_PAGES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

MOST_CHAINS = 64
MOST_PAGES = 128
Held = tuple[tuple[str, str], ...]
"""Workers and the tier that each holds a page in."""


class TreeNode(msgspec.Struct):
    """A run of pages. ``parent``: its place in the list, -1: none. ``heat``: prompts asked for lately that have it.

    ``latest``: how many prompts were asked for since the last of these; ``held``: worker and tier.
    """

    parent: int
    pages: int
    heat: int
    latest: int
    held: Held


@dataclass(slots=True)
class _Page:
    parent: bytes
    heat: int
    latest: int
    children: list[bytes] = field(default_factory=list)


def tree_of(chains: Iterable[Sequence[bytes]], where: Callable[[bytes], Held]) -> list[TreeNode]:
    """The tree, parents first.

    Args:
        chains: The page hashes of prompts, the latest prompt first.
        where: Who holds a page.
    """
    pages: dict[bytes, _Page] = {}
    roots: list[bytes] = []
    for number, chain in enumerate(chains):
        if number >= MOST_CHAINS:
            break
        parent = b""
        for page in chain[:MOST_PAGES]:
            known = pages.get(page)
            if known is None:
                pages[page] = _Page(parent, 1, number)
                (pages[parent].children if parent else roots).append(page)
            else:
                known.heat += 1
            parent = page
    nodes: list[TreeNode] = []
    open_ends = [(page, -1) for page in reversed(roots)]
    while open_ends:
        page, parent_at = open_ends.pop()
        held, run, first = where(page), 1, pages[page]
        last = first
        while len(last.children) == 1:
            following = last.children[0]
            if pages[following].heat != first.heat or where(following) != held:
                break
            last, run = pages[following], run + 1
        nodes.append(TreeNode(parent_at, run, first.heat, first.latest, held))
        open_ends += [(child, len(nodes) - 1) for child in reversed(last.children)]
    return nodes
