"""Gives the device's adapter (LoRA) slots to the running requests.

A slot holds one adapter, and a slot that a running request uses does not change. An adapter without a slot gets one when a
request with it starts: an empty slot, else the one that has been unused for longest. A slot stays with its adapter until then,
so the next request finds the adapter there.

Where running requests use all slots, a request without one waits, and others start past it. After ``PATIENCE`` steps its
adapter claims a slot: the slot is closed, which means that no request starts in it until it is handed over. That happens when
the requests that run in it have ended, or after ``MOST_STEPS`` steps, when they are sent back to the queue. (Their pages stay
cached.)

Fairness. The claims of tenants with few slots come first. A claim takes a slot of the tenant that has most slots, if that tenant
has at least two more than the claiming tenant, else one of the claiming tenant's own. A tenant without any slot, and a request
that has starved (:class:`~sapwood_worker.core.scheduler.waiting.AdmissionOrder`), may take any. Of equal slots the one held for
longest goes first.

Bound. With S slots, a request whose adapter has the c-th claim among those that may take any slot gets its slot after at most
``PATIENCE + ceil(c / S) * (MOST_STEPS + 1)`` steps. A request becomes such a one after ``starved_after`` steps at most.

O(1) to start and to end a request. O(slots + waiting requests) a step, but only while a request waits for a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.load import LoraLoads, LoraUse
from sapwood_worker.records.lora import LoraLoad

PATIENCE = 8
"""How many steps a request waits for a slot before its adapter claims one."""
MOST_STEPS = 256
"""How many steps the requests that run in a closed slot get to end."""
NO_LORA = 0
"""The number of no adapter."""


class SlotPool:
    """The slots of one scheduler.

    Args:
        count: How many there are; 0: no request has an adapter.
    """

    def __init__(self, count: int) -> None:
        self._numbers = [NO_LORA] * count
        self._slot_of: dict[int, int] = {}
        # The tenants of the requests that run in each slot, and how many each has.
        self._users: list[Counter[str]] = [Counter() for _ in range(count)]
        # Slots that no running request uses, the one unused for longest first.
        self._unused: dict[int, None] = dict.fromkeys(range(count))
        # For each slot in use, the order in which it came into use.
        self._since = [0] * count
        self._turn = 0
        # Adapters that the next step loads, by slot.
        self._loads: dict[int, int] = {}
        # Closed slots: the adapter that gets the slot, and the step in which it was closed.
        self._closed: dict[int, tuple[int, int]] = {}
        self.num_loads = 0
        """Loads that steps were given since the start."""
        self.num_claims = 0
        """Slots that were closed since the start."""

    @property
    def num_unused(self) -> int:
        """Slots that no running request uses."""
        return len(self._unused)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The adapter in each slot; 0: none."""
        return tuple(self._numbers)

    @property
    def contended(self) -> bool:
        """Whether a request may have to wait for a slot: :meth:`claim` is due."""
        return bool(self._closed) or (bool(self._numbers) and not self._unused)

    def fits(self, number: int) -> bool:
        """Whether a request with this adapter could start now; 0 always could."""
        if number == NO_LORA:
            return True
        slot = self._slot_of.get(number)
        if slot is not None:
            return slot not in self._closed or self._closed[slot][0] == number
        return self._unused_for(number) is not None

    def take(self, number: int, tenant: str) -> int:
        """Gives a starting request its slot; -1 for no adapter. :meth:`fits` must be true."""
        if number == NO_LORA:
            return -1
        slot = self._slot_of.get(number)
        if slot is None:
            slot = self._unused_for(number)
            assert slot is not None, f"adapter {number} was started without a slot"
            self._put(slot, number)
        if not self._users[slot]:
            self._unused.pop(slot, None)
            self._turn += 1
            self._since[slot] = self._turn
        self._closed.pop(slot, None)  # it was closed for this adapter
        self._users[slot][tenant] += 1
        return slot

    def release(self, slot: int, tenant: str) -> None:
        """A request that ran in a slot (-1: in none) ended or went back to the queue. No step in flight computes it."""
        if slot < 0:
            return
        users = self._users[slot]
        users[tenant] -= 1
        if not users[tenant]:
            del users[tenant]
        if not users:
            self._unused[slot] = None

    def take_loads(self) -> tuple[LoraLoad, ...]:
        """The loads that the step being planned begins with: no step in flight uses these slots."""
        if not self._loads:
            return ()
        loads = tuple(LoraLoad(slot, number) for slot, number in self._loads.items())
        self._loads.clear()
        self.num_loads += len(loads)
        return loads

    def failed(self, loads: Iterable[LoraLoad]) -> None:
        """The step that began with these loads has failed: slots that still are for these adapters are loaded again."""
        for load in loads:
            if self._numbers[load.slot] == load.number:
                self._loads[load.slot] = load.number

    def forget(self, number: int) -> None:
        """The adapter is dropped: no slot holds it any more. No request that has not ended has it."""
        slot = self._slot_of.pop(number, None)
        if slot is None:
            return
        assert not self._users[slot], f"adapter {number} is dropped while requests run with it"
        self._numbers[slot] = NO_LORA
        self._loads.pop(slot, None)
        self._unused = {slot: None, **self._unused}

    def claim(
        self, waiting: Iterable[Request], step: int, level: Callable[[Request], int], starved: Callable[[Request], bool]
    ) -> list[int]:
        """Closes slots for requests that have waited long for one.

        Args:
            waiting: All waiting requests, in any order.
            step: The number of the step being planned.
            level: A request's priority; 0 for all unless priorities count.
            starved: Whether a request has starved.

        Returns:
            The closed slots whose requests have had their time: they go back to the queue.
        """
        lacking: dict[int, Request] = {}
        present = set()
        for request in waiting:
            if request.lora == NO_LORA or request.held:
                continue
            present.add(request.lora)
            if not self.fits(request.lora):
                known = lacking.get(request.lora)
                if known is None or request.arrival < known.arrival:
                    lacking[request.lora] = request
        for slot, (number, _) in [*self._closed.items()]:
            if number not in present or number in self._slot_of:  # nobody waits for it any more
                del self._closed[slot]
        promised = {number for number, _ in self._closed.values()}
        claims = [each for number, each in lacking.items() if number not in promised]
        claims = [each for each in claims if each.waited + step - each.queued_at >= PATIENCE]
        if claims:
            held = self._held()
            claims.sort(key=lambda each: (-level(each), not starved(each), held[each.tenant], each.arrival))
            for request in claims:
                victim = self._victim(request, held, starved=starved(request))
                if victim is not None:
                    self._closed[victim] = request.lora, step
                    self.num_claims += 1
                    for tenant in self._users[victim]:
                        held[tenant] -= 1
                    held[request.tenant] += 1
        return [slot for slot, (_, since) in self._closed.items() if self._users[slot] and step - since >= MOST_STEPS]

    def load(self, unfinished: Mapping[int, int], running: Iterable[Request]) -> LoraLoads | None:
        """What runs and waits for adapters; None without slots.

        Args:
            unfinished: For each adapter, its requests that have not ended.
            running: The running requests.
        """
        if not self._numbers:
            return None
        counts = dict.fromkeys((number for number in unfinished if number), 0)
        if counts:
            for request in running:
                if request.lora:
                    counts[request.lora] += 1
        uses = tuple(LoraUse(number, ran, unfinished[number] - ran) for number, ran in counts.items())
        return LoraLoads(self.numbers, self.num_unused, uses, self.num_loads, self.num_claims)

    def check(self, running: Iterable[Request]) -> None:
        """Checks that slots and running requests agree; for tests.

        Raises:
            AssertionError: They do not.
        """
        users: list[Counter[str]] = [Counter() for _ in self._numbers]
        for request in running:
            assert (request.lora_slot >= 0) == (request.lora != NO_LORA), "a request runs without its adapter"
            if request.lora_slot >= 0:
                assert self._numbers[request.lora_slot] == request.lora, "a slot has two adapters"
                users[request.lora_slot][request.tenant] += 1
        assert users == self._users, "the users of slots were miscounted"
        assert {slot for slot, each in enumerate(users) if not each} == set(self._unused)
        assert {number: slot for slot, number in enumerate(self._numbers) if number} == self._slot_of
        assert all(self._numbers[slot] == number for slot, number in self._loads.items())

    def _unused_for(self, number: int) -> int | None:
        """The slot that an adapter without a slot would get; None: there is none."""
        other = None
        for slot in self._unused:
            promised = self._closed.get(slot)
            if promised is None:
                other = slot if other is None else other
            elif promised[0] == number:
                return slot
        return other

    def _put(self, slot: int, number: int) -> None:
        before = self._numbers[slot]
        if before:
            del self._slot_of[before]
        self._numbers[slot] = number
        self._slot_of[number] = slot
        self._loads[slot] = number

    def _held(self) -> Counter[str]:
        """How many slots each tenant's running requests use, or are promised."""
        held: Counter[str] = Counter()
        for slot, users in enumerate(self._users):
            if slot not in self._closed:
                held.update(users.keys())
        return held

    def _victim(self, request: Request, held: Counter[str], *, starved: bool) -> int | None:
        """The slot to close for a request; None: it has to wait."""
        own = held[request.tenant]
        best: tuple[int, int, int] | None = None
        for slot, users in enumerate(self._users):
            if not users or slot in self._closed:
                continue
            least = min(held[tenant] for tenant in users)
            if not (starved or own == 0 or least >= own + 2 or users.keys() == {request.tenant}):
                continue
            found = (-least, self._since[slot], slot)
            best = found if best is None or found < best else best
        return None if best is None else best[2]
