"""Plans steps for data-parallel attention, where each rank has requests of its own. A step has a part for every rank.

Each rank has a scheduler, with rows, pages, prefix cache and tiers of its own; all schedulers are in this process, so one place
decides which request goes to which rank (:func:`choose_rank`). A new request goes to the rank that then has the least work;
cached tokens of its prompt count as done. A request that waits at one rank moves on to another that has room while nothing
waits there. The ranks' prompt tokens in a step are balanced, since in each layer all ranks wait for the one with most tokens.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from sapwood_common.contract.page_hash import HASH_BYTES
from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.core.scheduler.batch import StepPace
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.results import Handoffs
from sapwood_worker.core.scheduler.scheduler import Demand, Scheduler
from sapwood_worker.core.scheduler.waiting import check_room
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Medium, split_hashes
from sapwood_worker.records.load import Load, RankLoad, sum_loads
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step import ModelOutput, Step
from sapwood_worker.records.weights import InFlight


class RankPlanner:
    """Does for several ranks what a :class:`Scheduler` does for one, called in the same way; its steps have parts.

    Args:
        config: The limits of each rank; ``max_waiting`` is that of all together.
        schedulers: One for each rank.
        clock: Seconds; how long steps take is measured.

    Attributes:
        micro_batches, depth: Always 1.
        handoffs: The ranks' part in KV transfers.
    """

    micro_batches = depth = 1

    def __init__(
        self,
        config: SchedulerConfig,
        schedulers: Sequence[Scheduler],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._ranks = schedulers
        self._events = MergedEvents(len(schedulers))
        self._rank_events: list[list[KvEvent]] = []
        self._steps = 0
        # For each step in flight: the number that each rank's scheduler gave its part of the step; -1: the rank has no part.
        self._in_flight: deque[list[int]] = deque()
        self._clock = clock
        self._pace = StepPace(config.step_seconds, config.max_step_tokens)
        # For each step in flight: when it was planned, and the decodes and prompt tokens of the rank with most.
        self._planned: deque[tuple[float, int, int]] = deque()
        self._updated = 0.0
        self._requests = [0] * len(schedulers)
        self.handoffs = RankHandoffs([each.handoffs for each in schedulers], self._choose)

    @property
    def speculates(self) -> bool:
        """As :attr:`Scheduler.speculates`."""
        return self._ranks[0].speculates

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return any(each.has_work for each in self._ranks)

    @property
    def paused(self) -> bool:
        """Whether nothing is scheduled until :meth:`resume`."""
        return self._ranks[0].paused

    @property
    def can_step(self) -> bool:
        """Whether :meth:`schedule` would have something to do for a request."""
        return any(each.can_step for each in self._ranks)

    @property
    def has_copies(self) -> bool:
        """As :attr:`Scheduler.has_copies`."""
        return any(each.has_copies for each in self._ranks)

    def wait_for_storage(self, seconds: float) -> None:
        """Returns after the given seconds, even if the ranks' tiers still wait."""
        time.sleep(seconds)

    def add(self, request: Request) -> None:
        """Lets a request in, at the rank where it fits best.

        Raises:
            InvalidArgumentError: As :meth:`Lifecycle.add`.
            ResourceExhaustedError: The queues are full.
        """
        waiting = sum(each.num_waiting for each in self._ranks)
        if waiting >= self._config.max_waiting:
            own = sum(each.num_waiting_of(request.tenant) for each in self._ranks)
            check_room(self._config.max_waiting, waiting, own)
        rank = self.handoffs.take_rank(request.ticket)
        if rank is None:
            rank = self._choose([request.remaining - each.cached_tokens(request) for each in self._ranks])
        self._ranks[rank].add(request)
        self._requests[rank] += 1

    def abort(self, serial: int) -> bool:
        """As :meth:`Scheduler.abort`."""
        return any(each.abort(serial) for each in self._ranks)

    def expire(self) -> list[RequestOutput]:
        """As :meth:`Scheduler.expire`."""
        return [output for each in self._ranks for output in each.expire()]

    def pause(self, *, retract: bool = False) -> None:
        """As :meth:`Scheduler.pause`."""
        for each in self._ranks:
            each.pause(retract=retract)

    def resume(self) -> None:
        """Ends a pause."""
        for each in self._ranks:
            each.resume()

    @property
    def plans_ahead(self) -> bool:
        """Whether the next step may be planned while one is in flight; true only if it is true at every rank."""
        return len(self._in_flight) < 2 and all(each.plans_ahead for each in self._ranks)

    def schedule(self) -> Step:
        """Plans the next step, as :meth:`Scheduler.schedule` does. A step that is true has the parts of all ranks."""
        if not self.paused:
            self._spread()
        demands = [each.demand for each in self._ranks]
        rows = max(demand.rows for demand in demands)
        prompts = prompt_tokens(demands, min(self._config.max_step_tokens, rows + self._pace.tokens(rows)))
        parts = [
            each.schedule(demand.rows + tokens)
            for each, demand, tokens in zip(self._ranks, demands, prompts, strict=True)
        ]
        if not any(parts):
            return Step(self._steps)
        self._in_flight.append([part.number if part else -1 for part in parts])
        decodes = [each.decodes_planned if part else 0 for each, part in zip(self._ranks, parts, strict=True)]
        chunks = [len(part.token_ids) - count for part, count in zip(parts, decodes, strict=True)]
        self._planned.append((self._clock(), max(decodes), max(chunks)))
        step = Step(self._steps, parts=tuple(parts))
        self._steps += 1
        return step

    def update(self, output: ModelOutput) -> list[RequestOutput]:
        """Takes the tokens of the step longest in flight; returns what each request gets."""
        assert output.step == self._steps - len(self._in_flight)
        outputs: list[RequestOutput] = []
        planned, decodes, chunks = self._planned.popleft()
        now = self._clock()
        self._pace.took(decodes, chunks, now - max(planned, self._updated))
        self._updated = now
        for each, number, part in zip(self._ranks, self._in_flight.popleft(), output.parts, strict=True):
            if number >= 0:
                part.step = number
                outputs += each.update(part)
        return outputs

    def in_flight(self) -> list[str]:
        """The ids of the requests that the steps in flight compute."""
        return [name for each in self._ranks for name in each.in_flight()]

    def fail_step(self, error: str) -> list[RequestOutput]:
        """As :meth:`Scheduler.fail_step`."""
        self._in_flight.clear()
        self._planned.clear()
        return [output for each in self._ranks for output in each.fail_step(error)]

    def abort_all(self) -> list[RequestOutput]:
        """As :meth:`Scheduler.abort_all`."""
        return [output for each in self._ranks for output in each.abort_all()]

    def sleep(self, *, abort: bool) -> list[RequestOutput]:
        """As :meth:`Scheduler.sleep`."""
        return [output for each in self._ranks for output in each.sleep(abort=abort)]

    def wake_up(self) -> None:
        """As :meth:`Scheduler.wake_up`."""
        for each in self._ranks:
            each.wake_up()

    def change_weights(self, digest: bytes, in_flight: InFlight, *, flush: bool) -> list[RequestOutput]:
        """As :meth:`Scheduler.change_weights`."""
        return [output for each in self._ranks for output in each.change_weights(digest, in_flight, flush=flush)]

    def lora_requests(self, number: int) -> int:
        """As :meth:`Scheduler.lora_requests`."""
        return sum(each.lora_requests(number) for each in self._ranks)

    def forget_lora(self, number: int) -> None:
        """As :meth:`Scheduler.forget_lora`."""
        for each in self._ranks:
            each.forget_lora(number)

    def flush_cache(self) -> int:
        """As :meth:`Scheduler.flush_cache`."""
        return sum(each.flush_cache() for each in self._ranks)

    def clear_device(self) -> int:
        """As :meth:`Scheduler.clear_device`."""
        return sum(each.clear_device() for each in self._ranks)

    def pin(self, name: str, token_ids: Sequence[int], namespace: bytes = b"", seconds: float | None = None) -> int:
        """Pins at every rank what that rank has cached of the prefix (:meth:`Scheduler.pin`); returns the most tokens that a rank
        has pinned.

        Raises:
            ResourceExhaustedError: A rank would not have enough pages left; the pins at the other ranks are released.
        """
        try:
            return max([each.pin(name, token_ids, namespace, seconds) for each in self._ranks])
        except ResourceExhaustedError:
            self.unpin(name)
            raise

    def unpin(self, name: str) -> bool:
        """Lets go of a pinned prefix; returns whether there was one of this name."""
        return sum(each.unpin(name) for each in self._ranks) > 0  # of all, not up to the first

    def take_kv_events(self) -> list[KvEvent]:
        """As :meth:`Scheduler.take_kv_events`: a block is removed when no rank has it any more."""
        self._rank_events = [each.take_kv_events() for each in self._ranks]
        return self._events.merge(self._rank_events)

    def take_rank_kv_events(self) -> list[list[KvEvent]]:
        """The events of each rank's own prefix cache that the last :meth:`take_kv_events` merged; empty if there were none."""
        events, self._rank_events = self._rank_events, []
        return events if any(events) else []

    def load(self) -> Load:
        """The load of all ranks together. O(running)."""
        ranks = []
        for each, admitted in zip(self._ranks, self._requests, strict=True):
            demand = each.demand
            ranks.append(RankLoad(admitted, demand.rows, decode_work(demand)))
        return sum_loads([each.load() for each in self._ranks], tuple(ranks))

    def check_idle(self) -> None:
        """As :meth:`Scheduler.check_idle`."""
        for each in self._ranks:
            each.check_idle()

    def check(self) -> None:
        """As :meth:`Scheduler.check`."""
        for each in self._ranks:
            each.check()

    def _choose(self, missing: Sequence[int]) -> int:
        """Chooses the rank for a request, given how many of its tokens each rank has not cached."""
        loads = [each.load() for each in self._ranks]
        return choose_rank(
            [each.demand for each in self._ranks],
            [load.waiting_requests for load in loads],
            [load.queued_tokens for load in loads],
            missing,
        )

    def _spread(self) -> None:
        """Moves waiting requests to ranks that could admit them and have no waiting request."""
        if not any(each.num_waiting for each in self._ranks):
            return
        for rank, taker in enumerate(self._ranks):
            load = taker.load()
            if load.waiting_requests or load.running_requests >= self._config.max_running:
                continue
            loads = [each.load() for each in self._ranks]
            busiest = max(
                range(len(loads)), key=lambda other: (loads[other].waiting_requests > 0, loads[other].queued_tokens)
            )
            more = loads[busiest].queued_tokens - load.queued_tokens
            moved = self._ranks[busiest].give_away(partial(_sooner, taker, more))
            if moved is not None:
                taker.add(moved)
                self._requests[busiest] -= 1
                self._requests[rank] += 1


def _sooner(taker: Scheduler, more: int, request: Request) -> bool:
    """Whether a request begins earlier at another scheduler, which computes ``more`` fewer tokens before it. A request with a
    ticket does not: its pages are at its present rank."""
    return request.ticket is None and request.remaining - taker.cached_tokens(request) < more


# Balances work over ranks that wait for each other in every layer: chooses the rank of a new request, and the number of prompt
# tokens that each rank computes in a step.
#
# Work is counted in tokens to compute. Every rank waits for the slowest, so the longest of their steps is what counts.
CONTEXT_TOKENS = 512
"""Attention over about this many cached tokens takes as long as computing one token (70B shapes and DeepSeek-V3's on an H200)."""
_STEPS = 128
"""Steps for which a request is expected to run: work that recurs in each step is multiplied by this number."""
_UNEVEN = 1.05
"""Prompts are held back if the longest of the ranks' steps is longer than this multiple of the mean."""


def decode_work(demand: Demand) -> float:
    """The work of a rank's running requests in a step in which all of them decode."""
    return demand.rows + demand.context / CONTEXT_TOKENS


def choose_rank(
    demands: Sequence[Demand], waiting: Sequence[int], queued: Sequence[int], missing: Sequence[int]
) -> int:
    """The rank that has the least work after it gets the new request; among equal ranks the first.

    Args:
        demands: For each rank, what it could compute in the next step.
        waiting: Requests in each rank's queue.
        queued: Tokens of prompts that each rank has not computed.
        missing: The new request's tokens that each rank does not have in its cache.
    """

    def work(rank: int) -> float:
        steady = decode_work(demands[rank]) + waiting[rank] + queued[rank] / CONTEXT_TOKENS
        return queued[rank] + missing[rank] + _STEPS * steady

    return min(range(len(demands)), key=work)


def prompt_tokens(demands: Sequence[Demand], most: int) -> list[int]:
    """How many prompt tokens each rank computes in the next step, so that the ranks' steps take about the same time.

    While one rank computes a prompt and the others only decode, all of their requests wait for it. So the prompt is held back
    for a number of steps, about the number of requests that would wait, in the hope that other ranks get prompts too. Idle ranks
    do not count. O(ranks).

    Args:
        demands: What each could.
        most: The most tokens of a rank's step.
    """
    if not any(demand.prompts for demand in demands):
        return [0] * len(demands)
    busy = [demand for demand in demands if demand.rows or demand.prompts]
    decodes = [decode_work(demand) for demand in busy]
    low = max(decodes, default=0.0)
    high = low + most

    def added(demand: Demand, decode: float, level: float) -> float:
        return max(0.0, min(demand.prompts, level - decode, most - demand.rows))

    def is_even(level: float) -> bool:
        times = [decode + added(demand, decode, level) for demand, decode in zip(busy, decodes, strict=True)]
        return max(times) * len(times) <= _UNEVEN * sum(times)

    # The longest step over the mean only grows with the level: what ranks compute is a concave function of it.
    while high - low > 1.0:
        level = (low + high) / 2
        low, high = (level, high) if is_even(level) else (low, level)
    patience = max(1, sum(demand.rows for demand in demands))
    found = []
    for demand in demands:
        least = min(-(-demand.prompts // patience), most - demand.rows)
        found.append(int(max(added(demand, decode_work(demand), high), least)))
    return found


# KV transfers with data-parallel attention: each rank has its part, and the rank where the request will run reads its pages.
_MOST_PROMISED = 1024
"""How many announced requests have their rank remembered; for an older one, pages are read again."""


class RankHandoffs:
    """Does for several ranks what :class:`Handoffs` does for one.

    Args:
        ranks: Each rank's part.
        choose: Chooses the rank for a request, given how many of its tokens each rank has not cached.
    """

    def __init__(self, ranks: Sequence[Handoffs], choose: Callable[[Sequence[int]], int]) -> None:
        self._ranks = ranks
        self._choose = choose
        # By the transfer.
        self._promised: dict[bytes, int] = {}

    @property
    def owes_tickets(self) -> bool:
        """As :attr:`Handoffs.owes_tickets`."""
        return any(each.owes_tickets for each in self._ranks)

    def poll(self) -> list[RequestOutput]:
        """As :meth:`Handoffs.poll`."""
        return [output for each in self._ranks for output in each.poll()]

    def tickets(self) -> list[RequestOutput]:
        """As :meth:`Handoffs.tickets`."""
        return [output for each in self._ranks for output in each.tickets()]

    def keep(self, renewed: Sequence[bytes], released: Sequence[bytes]) -> None:
        """As :meth:`Handoffs.keep`."""
        for each in self._ranks:
            each.keep(renewed, released)

    def announced(self, ticket: HandoffTicket, prompt: array[int], namespace: bytes) -> None:
        """As :meth:`Handoffs.announced`, at the rank that is to have the request."""
        rank = self._promised.get(ticket.transfer_id)
        if rank is None:
            if not prompt:  # its first announcement has been forgotten
                return
            while len(self._promised) >= _MOST_PROMISED:
                del self._promised[next(iter(self._promised))]
            rank = self._promised[ticket.transfer_id] = self._choose([len(prompt)] * len(self._ranks))
        self._ranks[rank].announced(ticket, prompt, namespace)

    def take_rank(self, ticket: HandoffTicket | None) -> int | None:
        """Returns and forgets the rank that has read a request's pages; None: no rank has."""
        return None if ticket is None else self._promised.pop(ticket.transfer_id, None)


# Merges the KV events of ranks with a prefix cache each: a block exists as long as any rank has it.
_Block = tuple[Medium, bytes]


class MergedEvents:
    """What each rank has, and the part of it that the other ranks have too. O(blocks that change) times ranks; O(cached blocks)
    of memory.

    Args:
        ranks: Their number.
    """

    def __init__(self, ranks: int) -> None:
        # Parents stand before their children.
        self._held: list[dict[_Block, None]] = [{} for _ in range(ranks)]

    def merge(self, events: Sequence[Sequence[KvEvent]]) -> list[KvEvent]:
        """The changes in the merged cache of all ranks.

        Args:
            events: Each rank's since the last call.
        """
        merged: list[KvEvent] = []
        for rank, own in enumerate(events):
            for event in own:
                match event:
                    case BlockStored():
                        merged += self._stored(rank, event)
                    case BlockRemoved(hashes, medium):
                        merged += self._removed(rank, [(medium, each) for each in split_hashes(hashes)])
                    case AllBlocksCleared():
                        merged += self._removed(rank, list(self._held[rank])[::-1])
        return merged

    def _stored(self, rank: int, event: BlockStored) -> list[KvEvent]:
        hashes = split_hashes(event.hashes)
        size = len(event.token_ids) // len(hashes)
        new = [not self._elsewhere(rank, (event.medium, each)) for each in hashes]
        self._held[rank].update(dict.fromkeys((event.medium, each) for each in hashes))
        found: list[KvEvent] = []
        for is_new, run in groupby(range(len(hashes)), new.__getitem__):
            places = list(run)
            if is_new:
                first, end = places[0], places[-1] + 1
                parent = hashes[first - 1] if first else event.parent
                blocks, tokens = slice(first * HASH_BYTES, end * HASH_BYTES), slice(first * size, end * size)
                found.append(
                    BlockStored(event.hashes[blocks], parent, event.token_ids[tokens], event.medium, event.lora)
                )
        return found

    def _removed(self, rank: int, blocks: Sequence[_Block]) -> list[KvEvent]:
        for block in blocks:
            self._held[rank].pop(block, None)
        gone = [block for block in blocks if not self._elsewhere(rank, block)]
        return [
            BlockRemoved(b"".join(each for _, each in run), medium)
            for medium, run in groupby(gone, lambda block: block[0])
        ]

    def _elsewhere(self, rank: int, block: _Block) -> bool:
        return any(block in held for other, held in enumerate(self._held) if other != rank)
