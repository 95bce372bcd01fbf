"""Shares a step's prompt tokens: between tenants, and in each tenant between its oldest and its short prompts.

Algorithm. Levels of priority come one after the other (without the policy ``priority`` there is one). In a level every tenant
that has prompt tokens to compute, whether its requests run or wait, gets an equal part of the budget. The others share what one
tenant does not need (max-min fairness, as deficit round robin has it for packets; tokens can be divided, so no deficit is carried
over). A tenant's part goes a quarter to its prompts in their order, and the rest to its short ones first: those that have at most
half a step's tokens to compute, the shortest first, then the others in their order. So neither starves: the oldest prompt
proceeds with a quarter of the tenant's part, and a short one is done soon, even if its tenant has sent long ones before. A prompt
that is mostly cached is short. It is computed while it is cached: where agents' sessions do not all fit, this order finds two to
four times the cached tokens that the order of arrival finds, with 0.4 to 0.6 of its p90 (``benchmarks/bench_agents.py``).

A waiting request starts with its first tokens, if there are a row and pages. Where rows or pages are scarce:
1. A request that has starved goes first. If it does not fit, no other request starts.
2. A tenant with no running request starts its first one before other tenants start more. If it has waited ``PATIENCE`` steps, the
   last request of the tenant with most is sent back for it, and this tenant keeps at least one.
3. A retracted request goes before new ones of tenants that have something running.
4. Tenants start requests in the order of :class:`AdmissionOrder`, and share the free rows.
5. Requests that fit overtake a new request that finds no pages, until it has starved.
A request that waits for a running request to compute a shared prefix, or for a slot for its adapter, does not hold up others
(``lora_slots.py`` says how it gets one).

Bound. Of n tenants with prompts at a level, where rows and pages suffice, each one's shortest prompt, if it is short and has s
tokens, is computed in ``s / max(1, 3 * budget // n // 4)`` steps, and the oldest in ``s / max(1, budget // n // 4)``. With more
tenants than tokens in the budget, the tenants that got least come first. A running prompt that got no tokens for
``starved_after`` steps comes before all others.

O(running + waiting) a step, and the matching of a few waiting requests of each tenant with the cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.scheduler.batch import SCORED, RunningBatch
from sapwood_worker.core.scheduler.joining import Join, alike
from sapwood_worker.core.scheduler.lora_slots import SlotPool
from sapwood_worker.core.scheduler.request import Request, RequestState
from sapwood_worker.core.scheduler.waiting import TOP, WINDOW, AdmissionOrder, Level, TenantFairness, WaitingQueue

# Retraction: what to do when pages run out, and how to make that rare.
#
# A retracted request gives up its row and its pages and goes back to the head of the queue. What it has generated is
# kept, and its pages stay in the prefix cache as long as there is room, so that computing it again is mostly a cache
# hit.
#
# The victim is always the last running request by rank: of the lowest priority, where priorities count, and of these
# the youngest. So the first by rank is never retracted for want of pages. Alone it always fits (admission sees to
# that), hence it ends, and there is neither deadlock nor livelock. Only a waiting request of higher priority can push
# it out (preemption), and only until it has starved (:class:`AdmissionOrder`): then only older starved requests come
# before it.
#
# :class:`NewTokenRatio` estimates which share of their remaining ``max_tokens`` running requests will generate
# (SGLang's estimate): admission leaves pages free for these tokens. The ratio sinks with each step without a retraction and
# rises with each retraction.


_FIRST, _LEAST = 0.3, 0.05
_DECAY = 0.995
_MOST_TOKENS = 2048
"""The most tokens that one request is expected to generate: a client's limit as large as the context says nothing."""


def choose_victim(running: Sequence[Request]) -> Request:
    """The request to retract, of at least one, by rank."""
    return running[-1]


class NewTokenRatio:
    """The share of their remaining ``max_tokens`` that running requests are expected to generate.

    Args:
        conservativeness: Factor on the expected tokens; 0 expects none, so requests are retracted when pages run out.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._conservativeness = conservativeness
        self.ratio = _FIRST

    def step(self, micro_batches: int = 1) -> None:
        """Notes a step without a retraction; each of ``micro_batches`` steps decodes a part of the running requests."""
        self.ratio = max(_LEAST, self.ratio * _DECAY ** (1 / micro_batches))

    def retracted(self, running: Sequence[Request]) -> None:
        """Raises the ratio after pages ran out, to what the running requests have generated so far and a little more."""
        allowed = sum(_limit(request) + request.generated for request in running)
        generated = sum(request.generated for request in running)
        self.ratio = min(1.0, max(self.ratio, (generated + 16 * len(running)) / max(1, allowed)))

    def expected_tokens(self, request: Request) -> int:
        """Tokens that a request is expected to generate yet."""
        return int(self._conservativeness * self.ratio * _limit(request))


class Retraction:
    """Sends running requests back to the queue.

    Args:
        running: The batch that requests are taken from.
        waiting: The queue that they go to.
        ratio: Is notified when pages run out.

    Attributes:
        num_retractions: Retractions for want of pages since the start.
        num_preemptions: Retractions to make room for a higher priority since the start.
    """

    def __init__(self, running: RunningBatch, waiting: WaitingQueue, ratio: NewTokenRatio) -> None:
        self._running = running
        self._waiting = waiting
        self._ratio = ratio
        self.num_retractions = 0
        self.num_preemptions = 0

    def put_back(self, request: Request, step: int) -> None:
        """Takes a request's row and puts it back into the queue at ``step``. No step in flight may compute it."""
        self._running.stop(request, RequestState.WAITING)
        request.retractions += 1
        request.queued_at = step
        self._waiting.put_back(request)

    def for_pages(self, step: int) -> None:
        """Retracts the running request with the last rank, because pages are lacking."""
        self.put_back(choose_victim(self._running.requests), step)
        self._ratio.retracted(self._running.requests)
        self.num_retractions += 1

    def for_priority(self, request: Request, step: int) -> None:
        """Retracts a request to make room for one of a higher priority."""
        self.put_back(request, step)
        self.num_preemptions += 1


def _limit(request: Request) -> int:
    return min(_MOST_TOKENS, request.max_length - len(request.token_ids))


# Fills the token budget that a step's decodes leave with chunks of prompts.
# The adder starts requests and gives them tokens; :class:`Admission` says whose turn it is.


WORTH_WAITING = 32
"""A request waits while another computes a prefix that both share, if the prefix has at least this many tokens (SGLang's
value)."""


class PrefillAdder:
    """One step's prefill.

    Args:
        running: The running requests; admitted ones join them.
        budget: Tokens this step may prefill.
        ratio: The share of their ``max_tokens`` that requests will generate; pages for these tokens stay in reserve.
        computing: The chunks that steps in flight compute, in the form of ``chunks``.
        picture_tokens: Tokens of pictures that the step may begin with; one picture is always begun.
        scored_cost: How many tokens of the budget a token counts as whose log probabilities are wanted, of a prompt or of
            continuations. Such tokens of a request get at most half of the remaining budget, so that the next request can begin
            in the same step.

    Attributes:
        budget: Tokens that are left.
        scored: Tokens that were given whose log probabilities are wanted.
    """

    def __init__(
        self,
        running: RunningBatch,
        budget: int,
        ratio: NewTokenRatio,
        computing: Sequence[tuple[Request, int]] = (),
        picture_tokens: int = 0,
        scored_cost: float = SCORED,
    ) -> None:
        self._running = running
        self._most_shown = self._left_shown = picture_tokens
        self._computing = computing
        self._cost = scored_cost
        self.budget = budget
        self.scored = 0
        # The budget that is left for requests with such tokens.
        self._scored: dict[Request, int] = {}
        self._ratio = ratio
        self._reserved: int | None = None
        self._given: dict[Request, int] = {}
        # Who gets tokens of a prompt, by the prompt's key; and who has the same prompt as one of them.
        self._leading: dict[tuple[int, bytes], list[Request]] = {}
        self._followers: dict[Request, list[Request]] = {}

    @property
    def chunks(self) -> list[tuple[Request, int]]:
        """The chunks that were added: each a request and how many of its tokens."""
        return list(self._given.items())

    @property
    def num_free_slots(self) -> int:
        """How many more requests could run."""
        return self._running.num_free_slots

    def _shown(self, request: Request, start: int, count: int) -> int:
        """How many of the tokens from ``start`` on a step may compute without beginning with more pictures than it may encode."""
        for each in request.pictures:
            if start <= each.offset < start + count:
                if each.length > self._left_shown and self._left_shown < self._most_shown:
                    return each.offset - start
                self._left_shown -= each.length
        return count

    def should_wait(self, request: Request) -> bool:
        """Whether a waiting request should wait longer, because a request in this step or in flight computes much of its prompt.

        The other request computes a chunk in every step and shares each finished chunk, so the wait ends with a cache hit.
        """
        others = [other for other, count in chain(self._given.items(), self._computing) if count > 1]
        return self._running.tokens_gained(request, others) >= WORTH_WAITING

    def leader(self, request: Request) -> Request | None:
        """The request for which the step computes a part of the same prompt that a new request has; None: there is none."""
        if request.prompt_key is None or request.cached is not None:
            return None
        return next((each for each in self._leading.get(request.prompt_key, ()) if alike(each, request)), None)

    def follow(self, request: Request, leader: Request) -> None:
        """Notes that a waiting request, whose turn it is, joins the step if its leader's prompt ends there. It does if there are
        pages for it after the prompt's."""
        needed = 1 + self._growth(request)
        if self._enough(request, needed):
            self._followers.setdefault(leader, []).append(request)
            self._reserved = (self._reserved or 0) + needed

    def followers(self, leader: Request, count: int) -> list[Request]:
        """Those of a chunk of ``count`` tokens, if it is the prompt's end."""
        return self._followers.get(leader, []) if leader.planned + count == leader.prompt_length else []

    def start(self, request: Request) -> bool:
        """Starts a waiting request if there are a row and pages for its known tokens; returns whether it has started.

        If nothing runs there always are. Otherwise there must also be pages for the tokens that all these requests are expected
        to generate, at least one page for each. :meth:`has_lora_slot` must be true.
        """
        if self.num_free_slots < 1:
            return False
        if request.whole and request.remaining > self.budget and self._given:
            return False  # it needs a step of its own
        if not self.fits(request):
            return False
        growth = self._growth(request)
        self._running.start(request, self._expected(request))
        self._reserved = (self._reserved or 0) + growth
        return True

    def has_lora_slot(self, request: Request) -> bool:
        """Whether the request needs no adapter, or there is a slot for it."""
        return self._running.has_lora_slot(request)

    def fits(self, request: Request) -> bool:
        """Whether there are pages to start a request."""
        if not len(self._running):
            return True
        return self._enough(request, self._running.pages_to_start(request) + self._growth(request))

    def _enough(self, request: Request, needed: int) -> bool:
        """Whether there are ``needed`` pages for a request, and those of windows."""
        if self._reserved is None:
            self._reserved = sum(map(self._growth, self._running.requests))
        enough = needed + self._reserved <= self._running.num_available_pages
        return enough and self._running.windows_fit(self._expected(request))

    def give(self, request: Request, most: int) -> int:
        """Adds a running request's next tokens to the step, within the budget; returns how many tokens of the budget they
        took."""
        given, most = self._given.get(request, 0), min(most, self.budget)
        left = request.remaining - given
        if left < 1 or most < 1:
            return 0
        first = None if request.whole else request.first_scored
        plain = left if first is None else max(0, first - request.planned - given)
        if request.whole:
            most = left
        elif plain < min(left, most):
            allowed = self._scored.setdefault(request, -(-self.budget // 2))
            if allowed < 1 and not plain:
                return 0
            most = plain + max(not plain, int(min(most - plain, allowed) / self._cost))
        count = self._running.reachable(request, given + min(left, most)) - given
        if request.pictures and count > 0:
            start = request.planned + given
            wanted = request.chunk_end(start, start + count) - start
            # A whole picture may take more than the budget, but not more than there are pages of windows.
            if wanted > count and self._running.reachable(request, given + wanted) - given < wanted:
                return 0
            count = wanted if request.whole else self._shown(request, start, wanted)
        if count < 1:
            return 0  # until others have left pages of a window
        if not given and request.prompt_key is not None and not request.generated:
            self._leading.setdefault(request.prompt_key, []).append(request)
        self._given[request] = given + count
        spent = count
        if first is not None and count > plain:
            self.scored += count - plain
            spent = plain + math.ceil(self._cost * (count - plain))
            self._scored[request] = self._scored.get(request, -(-self.budget // 2)) - (spent - plain)
        self.budget -= spent
        return spent

    def _expected(self, request: Request) -> int:
        return len(request.token_ids) + self._ratio.expected_tokens(request)

    def _growth(self, request: Request) -> int:
        return max(1, self._running.pages_for(self._ratio.expected_tokens(request)))


PATIENCE = 16
"""How many steps a tenant with no running request waits before another tenant's request is retracted for it."""
_OLDEST = 4
"""One in this many of a tenant's prompt tokens goes to its oldest prompt."""
_TRIED = 4
"""The most requests of a tenant that fail to start in a step before the tenant's turn ends."""


class Admission:
    """Moves requests from the queue to the batch, and gives tokens of a step to prompts.

    Args:
        waiting: The queue.
        running: The batch.
        order: Says which request is next.
        fairness: Is charged with the computed tokens.
        retraction: Makes room.
        ratio: What requests are expected to generate.
        tiers: The KV cache's lower tiers; they learn which requests no longer wait for them.
        cached_tokens: How many tokens of a request the prefix cache has.
        loras: The slots of adapters.
        short: The most tokens to compute with which a prompt is short.

    Attributes:
        prompt_tokens: Tokens of all prompts that have been admitted.
        cached_tokens: How many of these were found in the prefix cache.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningBatch,
        order: AdmissionOrder,
        fairness: TenantFairness,
        retraction: Retraction,
        ratio: NewTokenRatio,
        tiers: HierarchicalCache | None,
        cached_tokens: Callable[[Request], int],
        loras: SlotPool,
        short: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._loras = loras
        self._short = short
        self._order = order
        self._fairness = fairness
        self._retraction = retraction
        self._ratio = ratio
        self._tiers = tiers
        self._cached_tokens = cached_tokens
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def preempt(self, step: int, *, in_flight: bool) -> bool:
        """Makes room for a waiting request by retracting running ones: of a lower level, or of a tenant that has more.

        Args:
            step: The number of the step being planned.
            in_flight: Whether a step is in flight, so that nothing can be retracted.

        Returns:
            Whether a request would have to be retracted, but a step is in flight.
        """
        if not self._running.requests or not len(self._waiting):
            return False
        return (
            self._vacate(step, in_flight=in_flight)
            or (self._order.by_priority and self._preempt_level(step, in_flight=in_flight))
            or self._preempt_tenant(step, in_flight=in_flight)
        )

    def admit(self, adder: PrefillAdder, unfinished: Sequence[Request], step: int, *, new: bool) -> None:
        """Fills a step with prompt tokens.

        Args:
            adder: The step's.
            unfinished: Running requests whose prompts are not wholly computed, by rank.
            step: The step's number.
            new: Whether waiting requests may start.
        """
        levels = self._order.levels(self._waiting, step) if new and adder.num_free_slots and len(self._waiting) else {}
        running: dict[int, list[Request]] = {}
        for request in unfinished:
            if request.slot >= 0:  # -1: it has been retracted
                running.setdefault(self._level(request, step), []).append(request)
        starts = _Starts(self, adder, step)
        for level in sorted(levels.keys() | running.keys(), reverse=True):
            if adder.budget < 1:
                break
            self._share(adder, running.get(level, []), levels.get(level, Level([], {})), step, starts)
        given = {request.serial for request, _ in adder.chunks}
        for request in unfinished:
            request.waited += request.serial not in given

    def start(self, adder: PrefillAdder, request: Request, step: int) -> bool:
        """Starts a waiting request if there are a row and pages; returns whether it has started."""
        tokens = request.remaining
        request.rank = (-self._order.level(request, step), request.arrival)
        if not adder.start(request):
            return False
        self._waiting.remove(request, tokens)
        if self._tiers is not None:
            self._tiers.settle(request.serial)
        request.waited += step - request.queued_at
        if request.cached is None:
            self._admitted(request, request.computed, step)
        return True

    def join(self, adder: PrefillAdder, first: int, step: int) -> list[Join]:
        """Has waiting requests join a step that computes the end of their prompt, as far as there are free rows.

        Args:
            adder: The step's; it was filled by :meth:`admit`.
            first: The part of the step that its first chunk is.
            step: The step's number.
        """
        joins: list[Join] = []
        for part, (leader, count) in enumerate(adder.chunks, first):
            for request in adder.followers(leader, count)[: self._running.num_free_slots]:
                request.held = True
                if self._tiers is not None:
                    self._tiers.settle(request.serial)
                request.waited += step - request.queued_at
                self._admitted(request, request.prompt_length, step)
                joins.append(Join(request, part, self._running.lend_row()))
        return joins

    def starved(self, request: Request, step: int) -> bool:
        """Whether the request has starved, so that no other request may overtake it."""
        return self._order.starved(request, step)

    def _admitted(self, request: Request, cached: int, step: int) -> None:
        """Counts a new request, ``cached`` of whose prompt's tokens need not be computed."""
        request.cached = cached
        self.prompt_tokens += request.prompt_length + (0 if request.walk is None else request.walk.computed)
        self.cached_tokens += cached
        self._fairness.admitted(request.tenant, step)

    def _level(self, request: Request, step: int) -> int:
        """The level of a running request."""
        if not self._order.by_priority:
            return 0
        return TOP if self._order.starved(request, step) else -request.rank[0]

    def _share(
        self, adder: PrefillAdder, running: Sequence[Request], waiting: Level, step: int, starts: _Starts
    ) -> None:
        """Divides the rest of the budget between the tenants of a level."""
        for request in sorted((each for each in running if self._order.starved(each, step)), key=_by_arrival):
            self._give(adder, request, -(-adder.budget // 2))
        for request in waiting.retracted:
            if self._order.starved(request, step):
                starts.try_first(request)
        heads = {tenant: requests[0] for tenant, requests in waiting.tenants.items()}
        for request in reversed(waiting.retracted):
            heads[request.tenant] = request
        order = self._order.by_share(heads, step)
        present = Counter(request.tenant for request in self._running.requests) if order else Counter()
        for tenant in order:
            head = heads[tenant]
            if head.slot < 0 and (self._order.has_turn(head, step) or not present[tenant]):
                starts.try_first(head)
        for request in waiting.retracted:
            if request.slot < 0 and not starts.try_first(request) and adder.has_lora_slot(request):
                starts.closed = True
                break
        lines: dict[str, list[Request]] = {}
        for request in chain(running, (each for each in waiting.retracted if each.slot >= 0)):
            lines.setdefault(request.tenant, []).append(request)
        for tenant, requests in waiting.tenants.items():
            lines.setdefault(tenant, []).extend(requests)
        active = self._order.by_share({tenant: requests[0] for tenant, requests in lines.items()}, step)
        while active and adder.budget > 0:
            part, rows = max(1, adder.budget // len(active)), max(1, adder.num_free_slots // len(active))
            wanting: list[str] = []
            for tenant in active:
                starts.rows, began = rows, starts.count
                if self._serve(adder, lines[tenant], part, step, starts) >= part or starts.count - began >= rows:
                    wanting.append(tenant)
            active = wanting

    def _serve(self, adder: PrefillAdder, line: list[Request], part: int, step: int, starts: _Starts) -> int:
        """Gives tokens to a tenant's prompts; returns how many tokens of the tenant's part they took."""
        if len(line) == 1:
            return self._pass(adder, line, part, starts)
        spent = self._pass(adder, line, (part + step % _OLDEST) // _OLDEST, starts)
        if spent < part and adder.budget > 0:
            starved = any(
                each.slot < 0 and self._order.starved(each, step) and self._running.has_lora_slot(each)
                for each in line[:WINDOW]
            )
            rest = line if starved else self._short_first(line, starts)
            spent += self._pass(adder, rest, part - spent, starts)
        return spent

    def _pass(self, adder: PrefillAdder, line: Iterable[Request], most: int, starts: _Starts) -> int:
        spent = 0
        for request in line:
            if spent >= most or adder.budget < 1:
                break
            if request.slot < 0 and not starts.try_start(request):
                if starts.ended:
                    break
                continue
            spent += self._give(adder, request, most - spent)
        return spent

    def _give(self, adder: PrefillAdder, request: Request, most: int) -> int:
        spent = adder.give(request, most)
        self._fairness.charge(request.tenant, spent)
        return spent

    def _short_first(self, line: Sequence[Request], starts: _Starts) -> list[Request]:
        """Prompts: short ones, the shortest first, then the others by arrival. Of those that wait, only as many as get rows
        without a retraction."""
        running = [request for request in line if request.slot >= 0]
        waiting = [request for request in line if request.slot < 0 and self._running.has_lora_slot(request)]
        waiting = waiting[: min(WINDOW, starts.num_free_slots)]
        return sorted(chain(running, waiting), key=self._by_shortness)

    def _by_shortness(self, request: Request) -> tuple[bool, int]:
        size = self._size(request)
        return (False, size) if size <= self._short else (True, request.arrival)

    def _size(self, request: Request) -> int:
        """The tokens that a request has to compute; for a waiting request, those that were not cached when it was first looked
        at."""
        if request.slot >= 0:
            return request.remaining
        if request.size is None:
            request.size = request.remaining - self._cached_tokens(request)
        return request.size

    def _vacate(self, step: int, *, in_flight: bool) -> bool:
        """Sends back the requests of slots that other adapters have waited for long enough."""
        if not self._loras.contended:
            return False
        slots = self._loras.claim(
            self._waiting,
            step,
            lambda each: self._order.level(each, step),
            lambda each: self._order.starved(each, step),
        )
        leaving = [request for request in self._running.requests if request.lora_slot in slots] if slots else []
        if leaving and in_flight:
            return True
        for request in reversed(leaving):
            self._retraction.for_priority(request, step)
        return False

    def _preempt_level(self, step: int, *, in_flight: bool) -> bool:
        running = self._running.requests
        first = next(filter(self._running.has_lora_slot, self._order.order(self._waiting, step)), None)
        if first is None:  # all of them wait for pages that are being fetched, or for slots
            return False
        level = self._order.level(first, step)
        while running and -running[-1].rank[0] < level:
            if self._fits(first):
                return False
            if in_flight:
                return True
            self._retraction.for_priority(running[-1], step)
        return False

    def _preempt_tenant(self, step: int, *, in_flight: bool) -> bool:
        """Makes room for the first request of a tenant with no running request, if it needs at most the tenant's share of the
        pages."""
        running = self._running.requests
        present = Counter(request.tenant for request in running)
        first: Request | None = None
        for _, tenant, queue in self._waiting.queues():
            if present[tenant]:
                continue
            head = next((each for each in queue.values() if not each.held and self._running.has_lora_slot(each)), None)
            if head is None or step - head.queued_at < PATIENCE:
                continue
            if first is None or (self._order.level(head, step), -head.arrival) > (
                self._order.level(first, step),
                -first.arrival,
            ):
                first = head
        if first is None or first.whole:
            return False
        if self._running.pages_to_start(first) * (len(present) + 1) > self._running.num_pages:
            return False
        level = self._order.level(first, step)
        while not self._fits(first):
            victim = next(
                (
                    request
                    for request in reversed(running)
                    if present[request.tenant] == max(present.values())
                    and -request.rank[0] <= level
                    and not self._order.starved(request, step)
                ),
                None,
            )
            if victim is None or present[victim.tenant] < 2:
                return False
            if in_flight:
                return True
            present[victim.tenant] -= 1
            self._retraction.for_priority(victim, step)
        return False

    def _fits(self, request: Request) -> bool:
        return self._running.num_free_slots > 0 and PrefillAdder(self._running, 1, self._ratio).fits(request)


class _Starts:
    """What starts in a step.

    Args:
        admission: Starts it.
        adder: The step's.
        step: Its number.

    Attributes:
        closed: Whether only the first requests of tenants may still start.
        rows: How many more requests may start now.
        count: How many have started.
    """

    def __init__(self, admission: Admission, adder: PrefillAdder, step: int) -> None:
        self._admission = admission
        self._adder = adder
        self._step = step
        self._failed: dict[int, None] = {}
        self._tries: Counter[str] = Counter()
        self._full = False
        self.closed = False
        self.rows = 0
        self.count = 0

    @property
    def num_free_slots(self) -> int:
        return 0 if self.ended else self._adder.num_free_slots

    @property
    def ended(self) -> bool:
        """Whether no waiting request can start any more."""
        return self._full or self.closed or self.rows < 1 or not self._adder.num_free_slots

    def try_first(self, request: Request) -> bool:
        """Starts a request before the tenants share the rest; returns whether it has started."""
        room = not self._full and self._adder.budget > self.count
        return room and self._adder.leader(request) is None and self._try(request)

    def try_start(self, request: Request) -> bool:
        """Starts a request in its turn."""
        if self.ended or request.serial in self._failed or not self._adder.has_lora_slot(request):
            return False
        if (leader := self._adder.leader(request)) is not None:
            self._adder.follow(request, leader)
            self.rows -= 1
            self._failed[request.serial] = None
            return False
        if self._tries[request.tenant] >= _TRIED:
            return False
        if not self._try(request):
            self._tries[request.tenant] += 1
            return False
        self.rows -= 1
        return True

    def _try(self, request: Request) -> bool:
        if request.serial in self._failed or not self._adder.has_lora_slot(request):
            return False
        if not self._adder.should_wait(request):
            if self._admission.start(self._adder, request, self._step):
                self.count += 1
                return True
            if self._admission.starved(request, self._step):
                self._full = True
        self._failed[request.serial] = None
        return False


def _by_arrival(request: Request) -> int:
    return request.arrival
