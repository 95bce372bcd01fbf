"""The order in which the waiting requests of one tenant are admitted. A policy only orders; it does not judge whether one fits.

``admission_order.py`` decides about tenants, priorities and starvation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from sapwood_worker.core.scheduler.request import Request

PolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "priority"]

WINDOW = 128
"""Requests, the longest waiting ones, that a policy matches against the tree: matching all of a long queue in every step would
cost more than it gains."""

Path = Sequence[int]


class Policy(Protocol):
    """An order of admission; the classes below implement it."""

    def sort(self, requests: list[Request]) -> list[Request]:
        """Returns the requests, given by arrival, in the order in which to admit them. Changes nothing."""
        ...


class FirstComeFirstServed:
    """Orders by arrival. O(1)."""

    def sort(self, requests: list[Request]) -> list[Request]:
        return requests


class LongestPrefixMatch:
    """Longest cached prefix first (SGLang's cache-aware order), so that a prefix is used while it is there.

    Complexity: one match in the tree for each of at most WINDOW requests.

    Args:
        match_length: Cached tokens of a request's prefix; changes nothing.
    """

    def __init__(self, match_length: Callable[[Request], int]) -> None:
        self._match_length = match_length

    def sort(self, requests: list[Request]) -> list[Request]:
        return sorted(requests[:WINDOW], key=self._match_length, reverse=True) + requests[WINDOW:]


class DepthFirstWeight:
    """Depth first through the radix tree, the branch with the most waiting requests first (SGLang's dfs-weight).

    Requests that share a prefix follow each other, whatever its length. Complexity: one match for each of at most WINDOW
    requests, and O(requests x depth).

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
            # Requests that go deeper come before those that end here: the branch is kept for them. sorted() keeps the order
            # of arrival among equals. A stack yields last what is put on it first.
            stack.append((ending, depth))
            heaviest_first = sorted(branches.values(), key=len, reverse=True)
            stack += [(branch, depth + 1) for branch in reversed(heaviest_first)]
        return order + requests[WINDOW:]


class LongestOutputFirst:
    """The largest limit of output first: long generations start early, and short ones fill the gaps at the end."""

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
