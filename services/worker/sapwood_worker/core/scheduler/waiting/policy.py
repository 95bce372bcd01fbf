"""In which order the waiting requests of one tenant are admitted. A policy only orders; whether one fits is not its matter.

Tenants, priorities and starvation are ``admission_order.py``'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from sapwood_worker.core.scheduler.request import Request

PolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "priority"]

WINDOW = 128
"""Requests that are matched against the tree, those that have waited longest: matching each of a long queue in every step would
cost more than it gains."""

Path = Sequence[int]


class Policy(Protocol):
    """An order of admission; the classes below implement it."""

    def sort(self, requests: list[Request]) -> list[Request]:
        """The requests, which come by arrival, in the order in which to admit them. Changes nothing."""
        ...


class FirstComeFirstServed:
    """By arrival. O(1)."""

    def sort(self, requests: list[Request]) -> list[Request]:
        return requests


class LongestPrefixMatch:
    """Longest cached prefix first (SGLang's cache-aware order), so that a prefix is used while it is there. One match a request.

    Args:
        match_length: Cached pages of a request's prefix; changes nothing.
    """

    def __init__(self, match_length: Callable[[Request], int]) -> None:
        self._match_length = match_length

    def sort(self, requests: list[Request]) -> list[Request]:
        return sorted(requests[:WINDOW], key=self._match_length, reverse=True) + requests[WINDOW:]


class DepthFirstWeight:
    """Depth first through the radix tree, the branch with the most waiting requests first (SGLang's dfs-weight).

    Requests that share a prefix follow each other, whatever its length. One match a request and O(requests x depth).

    Args:
        path: The nodes of the radix tree along a request's cached prefix, from the root; changes nothing.
    """

    def __init__(self, path: Callable[[Request], Path]) -> None:
        self._path = path

    def sort(self, requests: list[Request]) -> list[Request]:
        order: list[Request] = []
        # A stack instead of recursion: a conversation of many turns is a deep branch.
        stack = [([(request, self._path(request)) for request in requests[:WINDOW]], 0)]
        while stack:
            group, depth = stack.pop()
            ending = [item for item in group if len(item[1]) <= depth]
            if len(ending) == len(group):
                order += [request for request, _ in group]
                continue
            branches: dict[int, list[tuple[Request, Path]]] = {}
            for request, path in group:
                if len(path) > depth:
                    branches.setdefault(path[depth], []).append((request, path))
            # What goes further comes before what ends here: it is what the branch is kept for. sorted() keeps the order of
            # arrival among equals; what comes first is put on top last.
            stack.append((ending, depth))
            heaviest_first = sorted(branches.values(), key=len, reverse=True)
            stack += [(branch, depth + 1) for branch in reversed(heaviest_first)]
        return order + requests[WINDOW:]


class LongestOutputFirst:
    """The largest limit of output first: long generations start early, and what is short fills the gaps at the end."""

    def sort(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.max_length - request.prompt_length, reverse=True)


def make_policy(name: PolicyName, match_length: Callable[[Request], int], path: Callable[[Request], Path]) -> Policy:
    """The policy of a name. ``priority`` orders by arrival within a priority."""
    match name:
        case "lpm":
            return LongestPrefixMatch(match_length)
        case "dfs-weight":
            return DepthFirstWeight(path)
        case "lof":
            return LongestOutputFirst()
        case _:
            return FirstComeFirstServed()
