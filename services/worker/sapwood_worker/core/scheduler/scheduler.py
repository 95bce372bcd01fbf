"""Continuous batching: decides, step by step, which tokens of which requests are computed.

Algorithm (iteration-level scheduling as in Orca, chunked prefill as in Sarathi-Serve, paged KV as in vLLM): a step takes one
token of every request that decodes, then shares its prompt tokens between tenants, and in each between long and short prompts
(``admission.py``). The number of prompt tokens keeps the step short (``batch.py``). Waiting requests start in order
(:class:`AdmissionOrder`) while rows, budget and pages last. When pages run out, unused prefixes are evicted. If that is not
enough, requests are retracted (``admission.py`` explains why every request still ends). Requests are also retracted to make room
for one of a higher priority, where priorities count, and for a tenant with no running request.

Complexity: a step costs O(running), and O(pages) of the admitted prompts in the radix tree, however much is cached. Bound: at
most ``max_running`` rows and ``max_waiting`` queued requests.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec

from sapwood_common.contract.page_hash import weights_namespace
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.page_key import KvEventLog, PictureNames
from sapwood_worker.core.cache.pages import PageAllocator, PageTable
from sapwood_worker.core.cache.prefix import PrefixCache
from sapwood_worker.core.scheduler.admission import Admission, NewTokenRatio, PrefillAdder, Retraction
from sapwood_worker.core.scheduler.batch import MicroBatches, RunningBatch, StepInFlight, StepPace
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.lora_slots import SlotPool
from sapwood_worker.core.scheduler.request import Request, RequestState
from sapwood_worker.core.scheduler.results import Handoffs, Lifecycle, StepResults, accept_drafts, end_output
from sapwood_worker.core.scheduler.speculation.costs import StepCosts
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.core.scheduler.speculation.forced_drafts import ForcedDrafts
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel, DraftPages, ModelDrafter
from sapwood_worker.core.scheduler.speculation.ngram_drafter import NgramDrafter
from sapwood_worker.core.scheduler.speculation.speculation import FEWEST_POSITIONS, Speculation
from sapwood_worker.core.scheduler.waiting import AdmissionOrder, TenantFairness, WaitingQueue, make_policy
from sapwood_worker.records.grammar_state import MaskFiller
from sapwood_worker.records.kv_events import KvEvent
from sapwood_worker.records.load import Load, LoraLoads
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step import ModelOutput, Step
from sapwood_worker.records.weights import InFlight

# Measures a scheduler's load. O(running).


class Demand(NamedTuple):
    """What a scheduler's next step could compute.

    Attributes:
        rows: Running requests.
        context: Tokens that they have cached.
        prompts: Prompt tokens still to be computed, including those of the next few waiting requests that have rows.
    """

    rows: int
    context: int
    prompts: int


_LOOKED_AT = 8
"""The most waiting requests whose uncached tokens are counted."""


def measure_demand(running: RunningBatch, admissible: Iterable[Request], cached: Callable[[Request], int]) -> Demand:
    """The demand now; changes nothing.

    Args:
        running: What runs.
        admissible: The waiting requests that there are rows for, in their order.
        cached: Returns how many tokens of a request the prefix cache has.
    """
    prompts = sum(request.remaining - cached(request) for request in islice(admissible, _LOOKED_AT))
    context = 0
    for request in running.requests:
        context += request.planned
        if (left := request.remaining) > 1:
            prompts += left
    return Demand(len(running), context, prompts)


def measure_load(
    waiting: WaitingQueue,
    running: RunningBatch,
    admission: Admission,
    allocator: PageAllocator,
    cache: PrefixCache,
    tiers: HierarchicalCache | None,
    page_size: int,
    forced_tokens: int,
    speculation: Speculation | None,
    loras: LoraLoads | None = None,
) -> Load:
    """The load now; changes nothing."""
    # ``Request.remaining`` is written out here, because calling it would take longer than everything else.
    left = [len(each.token_ids) + each.unknown - each.planned for each in running.requests]
    load = Load(
        running_requests=len(running),
        waiting_requests=len(waiting),
        queued_tokens=waiting.num_tokens + sum(tokens for tokens in left if tokens > 1),
        running_tokens=sum(each.planned for each in running.requests),
        used_pages=allocator.num_used,
        evictable_pages=cache.num_evictable,
        num_pages=allocator.num_pages,
        prompt_tokens=admission.prompt_tokens,
        cached_tokens=admission.cached_tokens,
        device_hit_tokens=admission.cached_tokens,
        forced_tokens=forced_tokens,
        drafted_tokens=0 if speculation is None else speculation.drafted_tokens,
        accepted_tokens=0 if speculation is None else speculation.accepted_tokens,
        drafts=0 if speculation is None else speculation.drafts,
        drafter="" if speculation is None else speculation.drafter_name,
        window_pages=sum(window.num_pages for window in cache.windows),
        used_window_pages=sum(window.num_used for window in cache.windows),
        passed_window_pages=sum(window.num_freed for window in cache.windows),
        state_slots=0 if cache.states is None else cache.states.num_slots,
        used_state_slots=0 if cache.states is None else cache.states.num_used,
        evicted_states=0 if cache.states is None else cache.states.num_evicted,
        part_page_tokens=cache.part_tokens,
        prefix_page_tokens=cache.found_tokens,
        prefix_state_tokens=cache.state_tokens,
        loras=loras,
    )
    return load if tiers is None else _with_tiers(load, tiers, page_size)


def _with_tiers(load: Load, tiers: HierarchicalCache, page_size: int) -> Load:
    """The load with the counts of the tiers below the device."""
    load = msgspec.structs.replace(
        load,
        device_hit_tokens=tiers.counters.device_hits * page_size + load.part_page_tokens,
        host_hit_tokens=tiers.counters.host_hits * page_size,
        host_used_pages=tiers.host.num_ready,
        host_num_pages=tiers.host.num_pages,
    )
    if tiers.leases is not None:
        given = tiers.leases.counters
        load = msgspec.structs.replace(
            load,
            handoff_tickets=given.tickets,
            handoff_renewals=given.renewals,
            handoff_expired=given.expired,
            handoff_pages=tiers.leases.num_pinned,
        )
    if tiers.reads is not None:
        pulled = tiers.reads.counters
        load = msgspec.structs.replace(
            load,
            pulled_pages=pulled.pages,
            pulled_bytes=pulled.pages * tiers.reads.page_bytes,
            pulled_early_bytes=pulled.early * tiers.reads.page_bytes,
            pulled_part_bytes=tiers.reads.part_bytes,
            pull_failures=pulled.failures,
            pull_stale_pages=pulled.stale,
            pull_fallbacks=pulled.fallbacks,
        )
    if tiers.storage is None:
        return load
    store, page_bytes = tiers.storage.counters, tiers.storage.page_bytes
    return msgspec.structs.replace(
        load,
        storage_hit_tokens=store.fetched * page_size,
        store_read_bytes=store.fetched * page_bytes,
        store_written_bytes=store.written * page_bytes,
        store_failures=tiers.storage.failures,
        store_rejected_pages=store.rejected,
        store_dropped_pages=store.dropped,
        store_timeouts=store.timeouts,
        storage_id=tiers.storage.store_id,
    )


class Scheduler:
    """The core of the worker. Single-threaded.

    ``schedule`` and ``update`` alternate, or ``schedule`` is ahead of ``update``: by one step, or by the number of
    micro-batches.

    Args:
        config: Its limits and choices.
        clock: Seconds, the clock of the requests' deadlines.
        tiers: The KV cache's tiers below the device's pages; None: there are none.
        masks: Fills the masks of requests with a grammar while the model computes; None: no such requests come.
        drafter: The drafter, or the draft model, if ``config`` asks for drafts; None: ``make_speculation`` chooses.

    Attributes:
        micro_batches, depth: ``count`` and ``depth`` of :class:`MicroBatches`.
        handoffs: Its part in KV transfers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tiers: HierarchicalCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        masks: MaskFiller | None = None,
        drafter: Drafter | DraftModel | None = None,
    ) -> None:
        self._config = config
        self._masks = masks
        self._clock = clock
        self._tiers = tiers
        self._limit = min(config.context_length, config.num_pages * config.page_size)
        self._allocator = PageAllocator(config.num_pages)
        table = PageTable(config.max_running, -(-self._limit // config.page_size))
        self._pictures = PictureNames() if tiers is None else tiers.pictures
        self._kv_events = KvEventLog(self._pictures) if config.kv_events else None
        if tiers is not None and self._kv_events is not None:
            tiers.announce(self._kv_events)
        self._cache = PrefixCache(
            self._allocator,
            table,
            config.page_size,
            enabled=config.prefix_cache,
            eviction=config.eviction,
            below=tiers,
            events=self._kv_events,
            windows=config.windows,
            states=config.states,
            pictures=self._pictures,
        )
        self._waiting = WaitingQueue(config.max_waiting)
        self._loras = SlotPool(config.lora_slots)
        self._running = RunningBatch(
            table, self._cache, config.page_size, self._loras, rewinds=not config.windows and config.states is None
        )
        self._fairness = TenantFairness()
        self._order = AdmissionOrder(
            make_policy(
                config.policy, self.cached_tokens, lambda each: self._cache.path(each.reusable, each.namespace)
            ),
            self._fairness,
            by_priority=config.policy == "priority",
            starved_after=config.starved_after,
        )
        self._ratio = NewTokenRatio(config.conservativeness)
        self._retraction = Retraction(self._running, self._waiting, self._ratio)
        self._admission = Admission(
            self._waiting,
            self._running,
            self._order,
            self._fairness,
            self._retraction,
            self._ratio,
            tiers,
            self.cached_tokens,
            self._loras,
            config.max_step_tokens // 2,
        )
        self.handoffs = Handoffs(tiers, self._cache, self._running, config.page_size)
        self._lifecycle = Lifecycle(
            config, self._limit, self._waiting, self._running, self._fairness, self._cache, tiers, self.handoffs
        )
        self._requests = self._lifecycle.requests
        self._in_flight: deque[StepInFlight] = deque()
        self._steps = 0
        if tiers is not None:
            tiers.steps = lambda: (self._steps, self._steps - len(self._in_flight))
        self._results = StepResults(self._waiting, self._running, self._lifecycle, self._fairness, self.handoffs)
        self._speculation = make_speculation(config, drafter, self._cache, self._running, table, self._allocator)
        self._paused = self._retract_all = self._asleep = False
        self._weights = b""
        # A draft's pages and its check belong to one step, so with drafts there is one micro-batch.
        self.micro_batches = config.micro_batches if self._speculation is None else 1
        self._forced: ForcedDrafts | None = None
        if config.jump_forward and self.micro_batches == 1 and config.states is None:
            self._forced = ForcedDrafts(most_positions(config), self._running.draftable)
        self._pace = StepPace(config.step_seconds / self.micro_batches, config.max_step_tokens)
        self._planned: deque[tuple[float, int]] = deque()
        self._updated = 0.0
        self._micro_batches = MicroBatches(self.micro_batches, config.micro_batches_from, chained=config.chained)
        self.depth = self._micro_batches.depth

    @property
    def num_retractions(self) -> int:
        """Retractions for want of pages since the start."""
        return self._retraction.num_retractions

    @property
    def num_preemptions(self) -> int:
        """Retractions to make room for a higher priority since the start."""
        return self._retraction.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def speculates(self) -> bool:
        """Whether anything drafts."""
        return self._speculation is not None

    @property
    def paused(self) -> bool:
        """Whether nothing is scheduled until :meth:`resume` or :meth:`wake_up`."""
        return self._paused or self._asleep

    @property
    def can_step(self) -> bool:
        """Whether :meth:`schedule` would have something to do for a request."""
        return bool(self._requests) and (not self.paused or self._retract_all)

    @property
    def has_copies(self) -> bool:
        """Whether a step is needed even without requests: pages wait to be copied, or a finished copy waits to be reported."""
        return self._tiers is not None and self._tiers.busy

    def wait_for_storage(self, seconds: float) -> None:
        """Waits until the cache's third tier has something for the next step, or the given seconds are over."""
        if self._tiers is not None:
            self._tiers.wait(seconds)
        else:
            time.sleep(seconds)

    def add(self, request: Request) -> None:
        """Takes a request; one of the next steps computes its first tokens. Raises as :meth:`Lifecycle.add`."""
        request.namespace = weights_namespace(request.namespace, self._weights)
        if request.pictures:
            request.name_pictures(self._pictures)
        self._lifecycle.add(request, self._steps)

    def abort(self, serial: int) -> bool:
        """Ends a request; its pages are free before the next step (after the steps in flight, if it is part of one).

        Returns:
            Whether there was such a request. It gets no further output.
        """
        return self._lifecycle.abort(serial)

    def expire(self) -> list[RequestOutput]:
        """Ends the requests whose deadline has passed, as :meth:`abort` does; returns their last outputs."""
        self._cache.pins.expire(self._clock())
        return self._lifecycle.expire(self._clock())

    def pause(self, *, retract: bool = False) -> None:
        """Schedules nothing until :meth:`resume`. Requests may still arrive, end with the step in flight, and be aborted.

        Args:
            retract: Send the running requests back to the queue, so that they hold no pages. If a step is in flight, this
                happens when :meth:`schedule` is called next.
        """
        self._paused = True
        if self._speculation is not None:
            self._speculation.halted()
        self._retract_all = retract
        self._halt()

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = self._retract_all = False

    @property
    def plans_ahead(self) -> bool:
        """Whether the next step may be planned now. It may not while its plan depends on tokens of a step in flight."""
        if self._in_flight and self._speculation is not None and self._speculation.waits:
            return False
        if self.micro_batches > 1:
            prompts = any(step.chunks for step in self._in_flight)
            return len(self._in_flight) < self._micro_batches.most_in_flight(
                len(self._running.requests), prompts=prompts
            )
        return len(self._in_flight) < 2 and not any(step.awaits_tokens for step in self._in_flight)

    @property
    def decodes_planned(self) -> int:
        """How many tokens of decoding requests the last planned step computes, with drafts."""
        step = self._in_flight[-1]
        return len(step.plan.token_ids) - sum(count for _, count in step.chunks)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._waiting)

    def num_waiting_of(self, tenant: str) -> int:
        """Those of a tenant that wait for the first time."""
        return self._waiting.num_of(tenant)

    @property
    def demand(self) -> Demand:
        """How much the next step could compute. Takes O(running), and a cache lookup for a few waiting requests."""
        first = islice(self._order.order(self._waiting, self._steps), self._config.max_running - len(self._running))
        return measure_demand(self._running, first, self.cached_tokens)

    def give_away(self, suits: Callable[[Request], bool]) -> Request | None:
        """Removes and returns the next request to admit, if it has never run and ``suits`` another scheduler."""
        return self._lifecycle.give_away(next(self._order.order(self._waiting, self._steps), None), suits)

    def cached_tokens(self, request: Request) -> int:
        """How many tokens of a request the prefix cache has."""
        return self._cache.find(request.reusable, request.namespace)

    def schedule(self, most_tokens: int | None = None) -> Step:
        """Plans the next step. The step is false if there is nothing to do, or nothing before the next :meth:`update`.

        While a step is in flight (``plans_ahead`` must then be true), the next one continues where that one will end, as if no
        request ended; with micro-batches it has other requests. Tokens of requests that did end are thrown away. Until then no
        request is retracted. ``most_tokens`` is the step's token budget; None: the configured budget.
        """
        assert self.plans_ahead, "a step in flight was not updated"
        for serial in self._tiers.poll() if self._tiers is not None else ():
            self._requests[serial].held = False
        if self.paused:
            self._halt()
            return Step(self._steps)
        in_flight = bool(self._in_flight)
        if self._admission.preempt(self._steps, in_flight=in_flight):
            return Step(self._steps)
        retractions = self.num_retractions
        plan = plan_running(self._running, self._retraction, self._steps, self._micro_batches, in_flight=in_flight)
        if plan is None:
            return Step(self._steps)
        paced = self._pace.tokens(len(plan.decodes)) if most_tokens is None else most_tokens
        most = (most_tokens or self._config.max_step_tokens) - len(plan.decodes) - len(plan.last_tokens)
        budget = max(1, min(most, paced))
        computing = [chunk for step in self._in_flight for chunk in step.chunks]
        cost = self._pace.scored_cost
        adder = PrefillAdder(self._running, budget, self._ratio, computing, self._config.picture_tokens, cost)
        calm = self.num_retractions == retractions
        if calm:
            self._ratio.step(self._micro_batches.shares(len(self._running)))
        self._admission.admit(adder, plan.unfinished, self._steps, new=calm)
        chunks = [*((request, 1) for request in plan.last_tokens), *adder.chunks]
        drafts = self._forced.plan(plan.decodes) if self._forced is not None and not chunks else []
        forced = bool(drafts)
        if self._speculation is not None and not chunks and not forced:
            drafts = self._speculation.plan(plan.decodes)
        joins = self._admission.join(adder, len(plan.decodes) + len(plan.last_tokens), self._steps)
        self.handoffs.offer_chunks(chunks)
        copies = self._tiers.take() if self._tiers is not None else None  # all pages of the step have been allocated
        step = StepInFlight(
            self._steps,
            plan.decodes,
            chunks,
            self._running,
            copies,
            self._masks,
            drafts,
            forced=forced,
            joins=joins,
        )
        step.plan.page_copies = self._cache.take_page_copies()
        step.plan.lora_loads = self._loras.take_loads()
        if drafts and not forced and self._speculation is not None:
            step.plan.late = self._speculation.late
        if step.plan:
            self._in_flight.append(step)
            self._planned.append((self._clock(), adder.scored))
            self._steps += 1
        return step.plan

    def update(self, output: ModelOutput) -> list[RequestOutput]:
        """Takes the tokens of the step longest in flight; returns what each request gets."""
        assert output.step == self._steps - len(self._in_flight)
        step = self._in_flight.popleft()
        assert len(step) == len(output.token_ids)
        step.release_grammars()
        planned, scored = self._planned.popleft()
        now, began = self._clock(), max(planned, self._updated)
        self._updated = now
        if not step.drafts:
            self._pace.took(len(step.decodes), sum(count for _, count in step.chunks), now - began, scored)
        self._cache.confirm(step.written)
        if self._tiers is not None:
            if step.plan.copies is not None and step.plan.copies.during is not None:
                self._tiers.computed(step.plan.copies.during)
            self._tiers.ended(output.copied)
        self._fairness.charge_each(step.decodes)
        if self._speculation is not None and not step.forced:
            self._speculation.settle(step, output)
        accept_drafts(step, output, self._fairness)
        if step.forced and self._forced is not None:
            self._forced.took(step, output)
        if self._speculation is not None:
            if step.forced:
                self._speculation.halted()
            else:
                self._speculation.took(step, output, now)
        return self._results.take(step, output)

    def in_flight(self) -> list[str]:
        """The ids of the requests that the steps in flight compute, each once."""
        return list(
            {request.serial: request.request_id for step in self._in_flight for request in step.requests}.values()
        )

    def fail_step(self, error: str) -> list[RequestOutput]:
        """Ends the requests of the steps in flight, which have failed. What the steps computed does not enter the cache."""
        failed, self._in_flight = self._in_flight, deque()
        self._planned.clear()
        for step in failed:
            copies = step.plan.copies
            if self._tiers is not None and copies is not None and copies.during is not None:
                self._tiers.failed(copies.during)
            self._loras.failed(step.plan.lora_loads)
        begun = [each for each in self._running.requests if self._cache.arriving(each.slot)]
        return self._results.fail(failed, begun, error)

    def abort_all(self) -> list[RequestOutput]:
        """Ends all requests with what there is of their output; returns their last outputs."""
        outputs: list[RequestOutput] = []
        for request in [each for each in self._requests.values() if not each.over]:
            outputs.append(end_output(request, "abort"))
            self._lifecycle.end(request)
        return outputs

    def sleep(self, *, abort: bool) -> list[RequestOutput]:
        """Holds no page until :meth:`wake_up`. No step may be in flight.

        Args:
            abort: Whether requests end; else they wait.

        Returns:
            The last outputs of requests that end.
        """
        assert not self._in_flight, "a step is being computed"
        outputs = self.abort_all() if abort else []
        self._asleep = True
        while self._running.requests:
            self._retraction.put_back(self._running.requests[-1], self._steps)
        self._cache.pins.clear()
        self.flush_cache()  # the second tier, too: pages may be on their way there
        return outputs

    def wake_up(self) -> None:
        """Ends a sleep."""
        self._asleep = False

    def change_weights(self, digest: bytes, in_flight: InFlight, *, flush: bool) -> list[RequestOutput]:
        """Lets no request find pages of other weights from now on. No step may be in flight. O(requests), and O(pages) to flush.

        Args:
            digest: 16 bytes that stand for the new weights; empty: they are those of the start.
            in_flight: What becomes of requests that have begun.
            flush: Whether to forget all prefixes that no request holds.

        Returns:
            The last outputs of requests that end.
        """
        assert not self._in_flight, "a step computes with the old weights"
        self._weights = self.handoffs.weights = digest
        if self._speculation is not None:
            self._speculation.halted()
        outputs: list[RequestOutput] = []
        if in_flight == "abort":
            outputs = self.abort_all()
        elif in_flight == "retract":
            while self._running.requests:
                self._retraction.put_back(self._running.requests[-1], self._steps)
        for request in self._running.requests:
            self._cache.keep_private(request.slot)
        for request in self._requests.values():
            request.namespace = weights_namespace(request.namespace, digest)
            if request.held and self._tiers is not None:
                self._tiers.settle(request.serial)
                request.held = False
        self._cache.pins.clear()
        if flush:
            self.flush_cache()
        return outputs

    def lora_requests(self, number: int) -> int:
        """How many requests with an adapter have not ended, those among them that are over for their client."""
        return self._lifecycle.loras[number]

    def forget_lora(self, number: int) -> None:
        """No slot holds an adapter any more; no request with it may be left."""
        assert not self._lifecycle.loras[number], f"adapter {number} is dropped while requests need it"
        self._loras.forget(number)

    def flush_cache(self) -> int:
        """Forgets all prefixes that no running request and no pin holds, on the device and in the host's memory.
        A store is left alone, because other workers share it. Returns the number of device pages freed.
        """
        freed = self._cache.flush()
        if self._tiers is not None:
            self._tiers.clear_host()
        return freed

    def clear_device(self) -> int:
        """Forgets prefixes on the device only; as with an eviction, they may move to the host's memory. Returns the number of
        pages freed."""
        return self._cache.flush(keep=True)

    def pin(self, name: str, token_ids: Sequence[int], namespace: bytes = b"", seconds: float | None = None) -> int:
        """Protects the cached part of a prefix from eviction until it is unpinned or its time is over.

        Args:
            name: The pin's name; an older pin of this name is replaced.
            token_ids: The prefix.
            namespace: The namespace of the requests that are to find it.
            seconds: For how long; None: until it is unpinned.

        Returns:
            How many tokens are pinned: those that are cached, in whole pages.

        Raises:
            ResourceExhaustedError: There would not be enough pages left for the longest request; nothing changed.
        """
        until = None if seconds is None else self._clock() + seconds
        most = self._config.num_pages - -(-self._limit // self._config.page_size)
        namespace = weights_namespace(namespace, self._weights)
        return self._cache.pin(name, array("I", token_ids), namespace, most, until)

    def unpin(self, name: str) -> bool:
        """Releases a pinned prefix; returns whether there was a pin of this name."""
        return self._cache.pins.remove(name)

    def take_kv_events(self) -> list[KvEvent]:
        """Returns the KV events since the last call, in order: what the prefix cache stored and removed. Forgets them."""
        return [] if self._kv_events is None else self._kv_events.take()

    def take_rank_kv_events(self) -> list[list[KvEvent]]:
        """Empty: there is one prefix cache only, and :meth:`take_kv_events` has its events."""
        return []

    def load(self) -> Load:
        """The load now. O(running)."""
        return measure_load(
            self._waiting,
            self._running,
            self._admission,
            self._allocator,
            self._cache,
            self._tiers,
            self._config.page_size,
            self._results.forced_tokens + (0 if self._forced is None else self._forced.accepted_tokens),
            self._speculation,
            self._loras.load(self._lifecycle.loras, self._running.requests),
        )

    def check_idle(self) -> None:
        """Checks that no page or row is held while there is no work; vectorised.

        Raises:
            AssertionError: Something leaked.
        """
        assert not self._requests and not len(self._running) and not len(self._waiting), "there is work"
        assert self._waiting.num_tokens == 0, "the queue's tokens were miscounted"
        self._cache.check_idle()

    def check(self) -> None:
        """Checks that requests, batch, cache and ledger agree, page by page; for tests.

        Raises:
            AssertionError: They do not.
        """
        self._cache.check()
        if self._tiers is not None:
            self._tiers.check()
        check_requests(self._requests, self._waiting, self._running, self._in_flight)
        self._loras.check(self._running.requests)
        if not self._requests:
            self.check_idle()

    def _halt(self) -> None:
        if not self._in_flight:
            while self._retract_all and self._running.requests:
                self._retraction.put_back(self._running.requests[-1], self._steps)
            self._retract_all = False


# Compares the queue and the batch with each other, request by request; for tests. O(requests).
def check_requests(
    requests: Mapping[int, Request], waiting: WaitingQueue, running: RunningBatch, in_flight: Sequence[StepInFlight]
) -> None:
    """Compares all unfinished requests, by serial, with the queue, the batch and the steps in flight.

    Raises:
        AssertionError: A request is nowhere or in two places, in a wrong state, or miscounted.
    """
    found: set[Request] = set()
    tokens = 0
    flights = Counter(request.serial for step in in_flight for request in step.requests)
    for request in waiting:
        assert request.state is RequestState.WAITING and request.slot < 0
        assert request.in_flight == flights[request.serial] <= request.held, "a join is miscounted"
        tokens += request.remaining
        found.add(request)
    assert tokens == waiting.num_tokens and len(found) == len(waiting), "the queue is miscounted"
    rank: tuple[int, int] | None = None
    lent = [join.slot for step in in_flight for join in step.joins]
    rows = {request.slot for request in running.requests}.union(lent)
    assert len(rows) == len(running) + len(lent), "two requests have one row"
    assert running.num_rows == running.num_free_slots + len(rows), "a row is lost"
    for request in running.requests:
        assert rank is None or rank <= request.rank, "what runs is not in order"
        rank = request.rank
        assert request.state is RequestState.RUNNING and request.slot >= 0
        assert request.in_flight == flights[request.serial], "steps in flight are miscounted"
        assert request.in_flight or (request.planned == request.computed and not request.unknown)
        assert request.in_flight or not request.over, "a request is over, but still there"
        assert request.planned <= request.capacity == running.capacity(request), "tokens without a page"
        assert request.planned <= request.reach, "tokens without a page of a window"
        found.add(request)
    assert len(found) == len(waiting) + len(running), "a request is in two places"
    assert found == set(requests.values()), "a request is nowhere"


# What the running requests do in a step: decode, or compute more of their known tokens. O(running).
class RunningPlan(NamedTuple):
    """Running requests, each group by rank.

    Attributes:
        decodes: Those that decode one token.
        last_tokens: Requests with one prompt token left, or with one token to compute after a retraction.
        unfinished: Requests with more tokens left; some of them may have been retracted since.
    """

    decodes: list[Request]
    last_tokens: list[Request]
    unfinished: list[Request]


def plan_running(
    running: RunningBatch, retraction: Retraction, step: int, micro_batches: MicroBatches, *, in_flight: bool
) -> RunningPlan | None:
    """Gives each running request pages for its known tokens, retracting the last in rank if need be.

    Args:
        running: The batch. Mutated.
        retraction: Makes room by retracting the request with the last rank, which is not in the step yet.
        step: The number of the step being planned.
        micro_batches: How steps in flight share the requests.
        in_flight: Whether another step is in flight.

    Returns:
        None if a request that the step in flight may compute would have to be retracted.
    """
    decodes: list[Request] = []
    last_tokens: list[Request] = []
    unfinished: list[Request] = []
    shares = micro_batches.shares(len(running.requests))
    most = -(-len(running.requests) // shares)
    for request in tuple(running.requests):
        known = len(request.token_ids) + request.unknown
        left = known - request.planned
        if left <= 0 or request.over or request.slot < 0:
            continue
        decoding = left == 1 and request.planned >= request.prompt_length and not (request.enters or request.walk)
        if micro_batches.holds_back(request, step, shares) or (decoding and len(decodes) == most):
            continue
        if request.unknown and (request.hands_off or known >= request.max_length):
            continue  # the token that is in flight is the request's last
        while (known > request.capacity or request.planned >= request.reach) and not running.make_room(request, known):
            if in_flight:
                return None
            retraction.for_pages(step)
            if request.slot < 0:
                break
        else:
            if left > 1:
                unfinished.append(request)
            elif decoding:
                decodes.append(request)
            else:
                last_tokens.append(request)
    return RunningPlan(decodes, last_tokens, unfinished)


def make_speculation(
    config: SchedulerConfig,
    drafter: Drafter | DraftModel | None,
    cache: PrefixCache,
    running: RunningBatch,
    table: PageTable,
    ledger: PageAllocator,
) -> Speculation | None:
    """The planner of drafts for a scheduler's steps; None: nothing is drafted.

    Args:
        config: The scheduler's.
        drafter: The drafter, or the draft model; None: drafts are n-grams from the prefix cache and the request's own tokens.
        cache: The prefix cache.
        running: The running requests.
        table: The page table.
        ledger: Whose pages stand in it.
    """
    alone = drafter is None and config.speculate == "auto"
    if config.speculate == "off" or config.states is not None:
        return None
    if alone and config.micro_batches > 1:  # drafts would rule out micro-batches, which gain more
        return None
    if drafter is None:
        drafter = NgramDrafter(lambda request: cache.continuation(request.slot, request.keyed))
    elif isinstance(drafter, DraftModel):
        drafter = ModelDrafter(drafter, DraftPages(table, ledger, config.page_size))
    costs = StepCosts() if config.speculate == "auto" else None
    room = partial(running.draftable, further=drafter.computes)
    return Speculation(drafter, most_positions(config), costs, room)


def most_positions(config: SchedulerConfig) -> int:
    """Most sampled positions of a step."""
    return min(max(config.max_running, FEWEST_POSITIONS), config.max_step_tokens)
