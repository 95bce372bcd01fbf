"""The requests that wait, and their order: the queue, the policies, the tenants' shares, and starvation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.core.scheduler.request import Request

_SHARE = 16
"""A tenant with fewer than this part of ``limit`` waiting is let in although others fill the queue."""


def check_room(limit: int, waiting: int, own: int) -> None:
    """Whether one more request may wait. Requests of one tenant do not keep another one's out of the queue.

    Args:
        limit: The most requests that wait; of tenants with few of them, twice as many.
        waiting: Those that wait.
        own: Those of the same tenant among them.

    Raises:
        ResourceExhaustedError: It may not.
    """
    if waiting >= limit and (own >= max(1, limit // _SHARE) or waiting >= 2 * limit):
        raise ResourceExhaustedError(f"the queue is full: {waiting} requests wait", retry_after=1.0)


class WaitingQueue:
    """New requests by priority and tenant, each in order of arrival, and retracted requests. Adding and removing is O(1).

    Args:
        limit: As for :func:`check_room`. A retracted request always finds room, because it was accepted before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[tuple[int, str], dict[int, Request]] = {}
        self._num_new = 0
        self._num_of: dict[str, int] = {}
        self._put_back: dict[int, Request] = {}
        self.num_tokens = 0
        """Tokens that the waiting requests would have to compute if nothing were cached."""

    def __len__(self) -> int:
        return self._num_new + len(self._put_back)

    def add(self, request: Request) -> None:
        """Lets a new request in.

        Raises:
            ResourceExhaustedError: The queue is full.
        """
        own = self.num_of(request.tenant)
        check_room(self._limit, self._num_new, own)
        self._new.setdefault((request.priority, request.tenant), {})[request.serial] = request
        self._num_new += 1
        self._num_of[request.tenant] = own + 1
        self.num_tokens += request.remaining

    def num_of(self, tenant: str) -> int:
        """A tenant's new requests."""
        return self._num_of.get(tenant, 0)

    def put_back(self, request: Request) -> None:
        """Takes a retracted request back."""
        self._put_back[request.serial] = request
        self.num_tokens += request.remaining

    def remove(self, request: Request, tokens: int) -> None:
        """Removes a request; ``tokens`` is how many tokens it had to compute when it was added or put back."""
        if self._put_back.pop(request.serial, None) is None:
            place = request.priority, request.tenant
            del self._new[place][request.serial]
            self._num_new -= 1
            self._num_of[request.tenant] -= 1
            if not self._new[place]:
                del self._new[place]
            if not self._num_of[request.tenant]:
                del self._num_of[request.tenant]
        self.num_tokens -= tokens

    def retracted(self) -> Sequence[Request]:
        """The requests that were put back, in no order."""
        return list(self._put_back.values())

    def queues(self) -> Iterator[tuple[int, str, dict[int, Request]]]:
        """Yields each priority and tenant with its new requests by arrival, at least one; valid until the queue changes."""
        for (priority, tenant), queue in self._new.items():
            yield priority, tenant, queue

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order; valid until the queue changes."""
        yield from self._put_back.values()
        for queue in self._new.values():
            yield from queue.values()


# Fairness across tenants: the tenant that got the fewest tokens is next.
#
# Algorithm: Virtual Token Counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each
# tenant's counter goes up with the tokens computed for it; of the tenants that have requests waiting the one with the
# lowest counter is served next. A tenant that returns gets at least the lowest counter of the busy tenants, so that idling earns
# no credit.
#
# Bound: while two tenants both wait, the tokens that they get differ by at most one round of admissions; so one of n
# tenants gets at least 1/n, however many requests the others send. If new tenants keep coming, n has no bound;
# :class:`AdmissionOrder` ensures that no tenant starves even then. O(1) for each charge and O(log tenants) for each
# admission; a counter is kept for each busy tenant and for the ``MOST_IDLE`` that were busy last.


MOST_IDLE = 1024


class TenantFairness:
    """The tenants' token counters."""

    def __init__(self) -> None:
        self._busy: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        self._idle: dict[str, None] = {}
        self._admitted: dict[str, int] = {}

    def arrived(self, tenant: str) -> None:
        """Notes that one more request of the tenant is unfinished."""
        unfinished = self._busy.get(tenant, 0)
        if not unfinished:
            self._idle.pop(tenant, None)
            floor = min((self._counters[other] for other in self._busy), default=0.0)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._busy[tenant] = unfinished + 1

    def ended(self, tenant: str) -> None:
        """Notes that one request of the tenant has ended."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
            self._admitted.pop(tenant, None)
            self._idle[tenant] = None
            if len(self._idle) > MOST_IDLE:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._counters[oldest]

    def admitted(self, tenant: str, step: int) -> None:
        """Notes that a new request of a busy tenant was admitted in this step."""
        self._admitted[tenant] = step

    def admitted_at(self, tenant: str) -> int:
        """The last step in which a new request of a busy tenant was admitted; -1: none since it became busy."""
        return self._admitted.get(tenant, -1)

    def charge(self, tenant: str, tokens: int) -> None:
        """Adds tokens that are computed for a busy tenant to its counter."""
        self._counters[tenant] += tokens

    def charge_each(self, requests: Sequence[Request]) -> None:
        """Adds one token for each of these requests, whose tenants are busy."""
        if len(self._busy) == 1 and requests:
            self._counters[requests[0].tenant] += len(requests)
            return
        counters = self._counters
        for request in requests:
            counters[request.tenant] += 1

    def served(self, tenant: str) -> float:
        """A busy tenant's counter."""
        return self._counters[tenant]


# The order in which the waiting requests of one tenant are admitted. A policy only orders; it does not judge whether
# one fits.
#
# :class:`AdmissionOrder` decides about tenants, priorities and starvation.


PolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]

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
    """Longest cached prefix first (SGLang's cache-aware order), so that a prefix is used while it is cached.

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
    """The request with the largest output limit goes first: long generations start early, and short ones fill the gaps at the
    end."""

    def sort(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.max_length - request.prompt_length, reverse=True)


class RandomOrder:
    """By a number that is drawn from a request's serial number: the order that other policies are measured against."""

    def sort(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.serial * _GOLDEN % _DRAWN)


_GOLDEN, _DRAWN = 0x9E3779B97F4A7C15, 2**64
"""Products of the first, less multiples of the second, lie evenly and in no order (Knuth, volume 3, 6.4)."""


def make_policy(name: PolicyName, match_length: Callable[[Request], int], path: Callable[[Request], Path]) -> Policy:
    """The policy of a name. ``priority`` orders by arrival within a priority."""
    match name:
        case "lpm":
            return LongestPrefixMatch(match_length)
        case "dfs-weight":
            return DepthFirstWeight(path)
        case "lof":
            return LongestOutputFirst()
        case "random":
            return RandomOrder()
        case _:
            return FirstComeFirstServed()


# Which waiting request is admitted next, over all tenants and priorities.
#
# Order, each rule among the equals of the one before:
# 1. by priority, the highest first (all are equal unless the policy is ``priority``);
# 2. requests that were retracted before all others, by arrival;
# 3. by tenant: the tenant that got least first (:class:`TenantFairness`), among equals the one whose next request is the
#   oldest;
# 4. within a tenant the policy's order.
#
# Starvation: a request that has waited ``starved_after`` steps in all goes before its tenant's others, counts as one of
# the highest priority, and keeps that rank when it runs. Shares alone do not bound the wait: new tenants may keep
# coming, each with a share to claim. So if a tenant's oldest request starves, and none of its new requests was admitted
# for ``starved_after`` steps, the tenant gets one turn before all shares, by arrival. Hence the i-th oldest starved
# request of a tenant waits for at most i such periods and for all older requests.
#
# O(waiting) and what the policy takes, in steps that may admit something.


TOP = 1 << 40
"""The level of a starved request: above every priority."""


class Level(NamedTuple):
    """Waiting requests of one level: retracted ones by arrival, and each tenant's other requests in the policy's order."""

    retracted: list[Request]
    tenants: dict[str, list[Request]]


class AdmissionOrder:
    """The order of admission.

    Args:
        policy: Orders one tenant's requests.
        fairness: Says which tenant is next.
        by_priority: Whether priorities count.
        starved_after: Steps of waiting after which a request is not overtaken any more.
    """

    def __init__(self, policy: Policy, fairness: TenantFairness, *, by_priority: bool, starved_after: int) -> None:
        self._policy = policy
        self._fairness = fairness
        self.by_priority = by_priority
        self._starved_after = starved_after

    def level(self, request: Request, step: int) -> int:
        """The request's priority when requests compete for pages, TOP once it starves; 0 unless priorities count."""
        if not self.by_priority:
            return 0
        return TOP if self.starved(request, step) else request.priority

    def order(self, waiting: WaitingQueue, step: int) -> Iterator[Request]:
        """The waiting requests in order of admission, if rows and pages are scarce.

        Args:
            waiting: The queue.
            step: The number of the step being planned.
        """
        levels = self.levels(waiting, step)
        for level in sorted(levels, reverse=True):
            yield from levels[level].retracted
            yield from self._fair(levels[level].tenants, step)

    def levels(self, waiting: WaitingQueue, step: int) -> dict[int, Level]:
        """The waiting requests by level."""
        levels: dict[int, Level] = {}
        for request in waiting.retracted():
            levels.setdefault(self.level(request, step), Level([], {})).retracted.append(request)
        for priority, tenant, queue in waiting.queues():
            requests = [request for request in queue.values() if not request.held]
            if not requests:
                continue
            # Requests stand by arrival, so the starved ones are the first.
            starved = list(takewhile(lambda request: self.starved(request, step), requests[:WINDOW]))
            rest = self._policy.sort(requests[len(starved) :])
            if not self.by_priority:
                levels.setdefault(0, Level([], {})).tenants[tenant] = starved + rest
                continue
            if starved:
                levels.setdefault(TOP, Level([], {})).tenants.setdefault(tenant, []).extend(starved)
            if rest:
                levels.setdefault(priority, Level([], {})).tenants[tenant] = rest
        for number, level in levels.items():
            level.retracted.sort(key=_by_arrival)
            if number == TOP:
                for requests in level.tenants.values():
                    requests.sort(key=_by_arrival)
        return levels

    def by_share(self, tenants: Mapping[str, Request], step: int) -> list[str]:
        """Each tenant with its next request: tenants with a turn first, then the tenant that got least."""

        def key(tenant: str) -> tuple[float, int]:
            request = tenants[tenant]
            turn = request.slot < 0 and self.has_turn(request, step)
            return (-1.0 if turn else self._fairness.served(tenant)), request.arrival

        return sorted(tenants, key=key)

    def _fair(self, tenants: dict[str, list[Request]], step: int) -> Iterator[Request]:
        """Yields requests of several tenants: first one of each starving tenant, then always one of the tenant that will have got
        least."""
        if len(tenants) == 1:
            [requests] = tenants.values()
            yield from requests
            return
        turns = [tenant for tenant, requests in tenants.items() if self.has_turn(requests[0], step)]
        turns.sort(key=lambda tenant: tenants[tenant][0].arrival)
        yield from (tenants[tenant][0] for tenant in turns)
        heap: list[tuple[float, int, str, int]] = []
        for tenant, requests in tenants.items():
            served, first = self._fairness.served(tenant), 0
            if tenant in turns:
                served, first = served + requests[0].remaining, 1
            if first < len(requests):
                heap.append((served, requests[first].arrival, tenant, first))
        heapq.heapify(heap)
        while heap:
            served, _, tenant, index = heap[0]
            requests = tenants[tenant]
            request = requests[index]
            if index + 1 < len(requests):
                following = served + request.remaining, requests[index + 1].arrival, tenant, index + 1
                heapq.heapreplace(heap, following)
            else:
                heapq.heappop(heap)
            yield request

    def has_turn(self, oldest: Request, step: int) -> bool:
        """Whether a tenant with this request at its head goes before those who have got less."""
        since = step - self._fairness.admitted_at(oldest.tenant)
        return self.starved(oldest, step) and since >= self._starved_after

    def starved(self, request: Request, step: int) -> bool:
        """Whether a request has waited so long that no other request may overtake it."""
        queued = step - request.queued_at if request.slot < 0 else 0
        return request.waited + queued >= self._starved_after


def _by_arrival(request: Request) -> int:
    return request.arrival
