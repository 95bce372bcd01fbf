"""Continuous batching: decides, step by step, which tokens of which requests are computed.

Algorithm (iteration-level scheduling as in Orca, chunked prefill as in Sarathi-Serve, paged KV as in vLLM): a step takes one
token of every request that decodes, then fills its token budget with chunks of prompts, running requests before waiting
ones. Waiting requests are admitted in order (``admission_order.py``) while rows, budget and pages last; one that does not fit, or
that waits for a prefix which a running request is computing, is not overtaken. When pages run out, prefixes nobody uses are
evicted; if that is not enough, requests are retracted (``retraction.py``, where it stands why every request ends). Where
priorities count, requests are also retracted to make room for one of a higher priority.

Complexity: a step costs O(running) and what the radix tree takes for the admitted prompts; it does not depend on the number of
cached tokens. Bound: at most ``max_running`` rows and ``max_waiting`` queued requests.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.cache.hierarchical import HierarchicalCache
from sapwood_worker.cache.kv_events import KvEvent, KvEventLog
from sapwood_worker.cache.page_allocator import PageAllocator
from sapwood_worker.cache.page_table import PageTable
from sapwood_worker.cache.prefix_cache import PrefixCache
from sapwood_worker.scheduler.admission_order import AdmissionOrder
from sapwood_worker.scheduler.config import SchedulerConfig
from sapwood_worker.scheduler.deadlines import Deadlines
from sapwood_worker.scheduler.fairness import TenantFairness
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.output import (
    FinishReason,
    ModelOutput,
    RequestOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from sapwood_worker.scheduler.policy import make_policy
from sapwood_worker.scheduler.prefill_adder import PrefillAdder
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.retraction import NewTokenRatio, choose_victim
from sapwood_worker.scheduler.running_batch import RunningBatch
from sapwood_worker.scheduler.state import RequestState
from sapwood_worker.scheduler.waiting_queue import WaitingQueue

_NO_LOGPROBS: list[TokenLogprobs] = []


class _Item(NamedTuple):
    """What a step in flight computes of a request, and whether it samples."""

    request: Request
    tokens: int
    samples: bool


class Scheduler:
    """The core of the worker. Single-threaded.

    ``schedule`` and ``update`` alternate, or ``schedule`` runs ahead of ``update`` by one step.

    Args:
        config: See :class:`SchedulerConfig`.
        clock: Seconds; what the deadlines of requests go by.
        tiers: The KV cache's tiers below the device's pages; None: there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tiers: HierarchicalCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._tiers = tiers
        self._limit = min(config.context_length, config.num_pages * config.page_size)
        self._allocator = PageAllocator(config.num_pages)
        table = PageTable(config.max_running, -(-self._limit // config.page_size))
        self._kv_events = KvEventLog() if config.kv_events else None
        if tiers is not None and self._kv_events is not None:
            tiers.host.announce(self._kv_events)
        self._cache = PrefixCache(
            self._allocator,
            table,
            config.page_size,
            enabled=config.prefix_cache,
            eviction=config.eviction,
            below=tiers,
            events=self._kv_events,
        )
        self._waiting = WaitingQueue(config.max_waiting)
        self._running = RunningBatch(table, self._cache, config.page_size)
        self._requests: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self._fairness = TenantFairness()
        self._order = AdmissionOrder(
            make_policy(config.policy, self._match_length, self._match_path),
            self._fairness,
            by_priority=config.policy == "priority",
            starved_after=config.starved_after,
        )
        self._ratio = NewTokenRatio(config.conservativeness)
        self._in_flight: deque[list[_Item]] = deque()
        self._steps = 0
        self._arrivals = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._paused = self._retract_all = False
        self.num_retractions = 0
        """Retractions for want of pages since the start."""
        self.num_preemptions = 0
        """Retractions to make room for a higher priority since the start."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def paused(self) -> bool:
        """Whether nothing is scheduled until :meth:`resume`."""
        return self._paused

    @property
    def can_step(self) -> bool:
        """Whether :meth:`schedule` would have something to do for a request."""
        return bool(self._requests) and (not self._paused or self._retract_all)

    @property
    def has_copies(self) -> bool:
        """Whether a step is due even without requests, because pages wait to be copied or a copy's end to be reported."""
        return self._tiers is not None and self._tiers.busy

    def wait_for_storage(self, seconds: float) -> None:
        """Returns when the cache's third tier has something for the next step, or after so many seconds."""
        if self._tiers is not None and self._tiers.storage is not None and self._tiers.storage.busy:
            self._tiers.storage.wait(seconds)
        else:
            time.sleep(seconds)

    def add(self, request: Request) -> None:
        """Lets a request in; its first tokens are computed in one of the next steps.

        Raises:
            InvalidArgumentError: It can never run: its prompt leaves no room in the context.
            ResourceExhaustedError: The queue is full.
        """
        assert request.serial not in self._requests, f"serial {request.serial} is taken"
        if not request.prompt_length:
            raise InvalidArgumentError("token_ids is empty: there is no prompt", field="token_ids")
        if request.prompt_length >= self._limit + bool(request.pooling):
            raise InvalidArgumentError(
                f"prompt of {request.prompt_length} tokens leaves no room in the context of {self._limit} tokens",
                field="token_ids",
            )
        if not self._order.by_priority:
            request.priority = 0
        request.whole = self._config.whole_prompts
        self._waiting.add(request)
        self._requests[request.serial] = request
        self._fairness.arrived(request.tenant)
        if request.deadline is not None:
            self._deadlines.add(request.serial, request.deadline, self._requests)
        request.max_length = min(self._limit, request.max_length)
        request.arrival = self._arrivals
        request.queued_at = self._steps
        self._arrivals += 1
        if self._tiers is not None:
            cached = self._cache.probe(request.reusable, request.namespace)[0]
            request.held = self._tiers.queued(request.serial, request.reusable[:-1], request.namespace, cached)

    def abort(self, serial: int) -> bool:
        """Ends a request; its pages are free before the next step (after the steps in flight, if it is part of one).

        Returns:
            Whether there was such a request. It gets no further output.
        """
        request = self._requests.get(serial)
        if request is None or request.over:
            return False
        self._end(request)
        return True

    def expire(self) -> list[RequestOutput]:
        """Ends the requests whose deadline has passed, as :meth:`abort` does; what they get."""
        outputs: list[RequestOutput] = []
        for serial in self._deadlines.passed(self._clock()):
            request = self._requests.get(serial)
            if request is not None and not request.over:
                outputs.append(self._output(request, [], "deadline"))
                self.abort(serial)
        self._cache.expire_pins(self._clock())
        return outputs

    def pause(self, *, retract: bool = False) -> None:
        """Schedules nothing until :meth:`resume`; requests may still come, end by the step in flight, and be aborted.

        Args:
            retract: Send the running requests back to the queue, so that no page is held, now or, if a step is in flight, when
                :meth:`schedule` is called next; else they keep theirs.
        """
        self._paused = True
        self._retract_all = retract
        self._halt()

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = self._retract_all = False

    @property
    def plans_ahead(self) -> bool:
        """Whether the next step may be planned while one is in flight: a grammar must see each token before the next."""
        return len(self._in_flight) < 2 and not any(
            item.samples and item.request.grammar is not None for step in self._in_flight for item in step
        )

    def schedule(self) -> SchedulerOutput:
        """Plans the next step; it is false if there is nothing to do, or nothing until :meth:`update`.

        With a step in flight (``plans_ahead`` must be true then) the next one goes on where that one will end: its tokens are
        taken to be no end tokens. What this computes too much is thrown away, and no request is retracted meanwhile.
        """
        assert self.plans_ahead, "a step in flight was not updated"
        for serial in self._tiers.poll() if self._tiers is not None else ():
            self._requests[serial].held = False
        if self._paused:
            self._halt()
            return SchedulerOutput(self._steps, self._running.rows, [])
        if self._order.by_priority and len(self._running) and len(self._waiting):
            obstructed = self._preempt()
            if obstructed:
                return SchedulerOutput(self._steps, self._running.rows, [])
        decodes, retracted = self._plan_decodes()
        if decodes is None:
            return SchedulerOutput(self._steps, self._running.rows, [])
        budget = max(1, self._config.max_step_tokens - len(decodes))
        computing = [(item.request, item.tokens) for each in self._in_flight for item in each]
        adder = PrefillAdder(self._running, budget, self._ratio, computing)
        adder.continue_running()
        if not retracted:
            self._ratio.step()
            self._admit(adder)
        step = decodes + adder.chunks
        copies = self._tiers.take() if self._tiers is not None else None
        output = SchedulerOutput(self._steps, self._running.rows, [_scheduled(*item) for item in step], copies)
        if output:
            self._in_flight.append([_launched(*item) for item in step])
            self._steps += 1
        return output

    def update(self, output: ModelOutput) -> list[RequestOutput]:
        """Takes the tokens of the step longest in flight; returns what each request gets."""
        assert output.step == self._steps - len(self._in_flight)
        step = self._in_flight.popleft()
        assert len(step) == len(output.token_ids)
        if self._tiers is not None:
            self._tiers.ended(output.copied)
        outputs: list[RequestOutput] = []
        for index, ((request, count, samples), token) in enumerate(zip(step, output.token_ids, strict=True)):
            if index in output.prompt_logprobs:
                request.add_prompt_logprobs(request.computed, output.prompt_logprobs[index])
            request.computed += count
            request.in_flight -= 1
            request.unknown -= samples
            if request.over:
                if not request.in_flight:
                    self._finish(request)
                continue
            if request.pooling:
                request.add_pooled(request.computed - count, output.pooled[index])
                if request.computed == request.prompt_length:
                    outputs.append(self._output(request, [], "stop", embedding=request.embedding))
                    self._finish(request)
                    continue
            prefill = count > 1 or request.generated == 0
            if samples:
                outputs.append(self._take_token(request, token, output.logprobs.get(index)))
            if prefill and request.state is RequestState.RUNNING:
                self._running.commit(request)  # who shares the prompt finds it from now on
        return outputs

    def fail_step(self, error: str) -> list[RequestOutput]:
        """The steps in flight came to nothing: ends their requests, and nothing more of them is shared."""
        outputs: list[RequestOutput] = []
        failed = {item.request.serial: item.request for step in self._in_flight for item in step}
        self._in_flight.clear()
        for request in failed.values():
            if not request.over:
                outputs.append(self._output(request, [], "error", error))
            request.in_flight = 0
            request.shared = False
            self._finish(request)
        return outputs

    def flush_cache(self) -> int:
        """Empties the prefix cache of what no running request and no pin holds; returns the number of pages freed."""
        return self._cache.flush()

    def pin(self, name: str, token_ids: Sequence[int], namespace: bytes = b"", seconds: float | None = None) -> int:
        """Keeps what is cached of a prefix from eviction until it is unpinned or its time is over.

        Args:
            name: What to call it; what was pinned under this name before no longer is.
            token_ids: The prefix.
            namespace: Of the requests that are to find it.
            seconds: For how long; None: until it is unpinned.

        Returns:
            How many tokens are pinned: those that are cached, in whole pages.

        Raises:
            ResourceExhaustedError: There would not be enough pages left for the longest request; nothing changed.
        """
        until = None if seconds is None else self._clock() + seconds
        most = self._config.num_pages - -(-self._limit // self._config.page_size)
        return self._cache.pin(name, array("I", token_ids), namespace, most, until)

    def unpin(self, name: str) -> bool:
        """Lets go of a pinned prefix; returns whether there was one of this name."""
        return self._cache.unpin(name)

    def take_kv_events(self) -> list[KvEvent]:
        """Removes and returns what the prefix cache stored and removed since the last call, in order."""
        return [] if self._kv_events is None else self._kv_events.take()

    def load(self) -> Load:
        """The load now. O(running)."""
        prefill = sum(request.remaining for request in self._running.requests if request.remaining > 1)
        return Load(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            queued_tokens=self._waiting.num_tokens + prefill,
            used_pages=self._allocator.num_used,
            evictable_pages=self._cache.num_evictable,
            num_pages=self._config.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def check_idle(self) -> None:
        """Checks that nothing is held while there is no work; vectorised.

        Raises:
            AssertionError: Something leaked.
        """
        assert not self._requests and not len(self._running) and not len(self._waiting), "there is work"
        assert self._waiting.num_tokens == 0, "the queue's tokens were miscounted"
        self._cache.check_idle()

    def check(self) -> None:
        """Checks everything against everything, page by page; for tests.

        Raises:
            AssertionError: Something is wrong.
        """
        self._cache.check()
        if self._tiers is not None:
            self._tiers.check()
        found: set[Request] = set()
        tokens = 0
        for request in self._waiting:
            assert request.state is RequestState.WAITING and request.slot < 0
            tokens += request.remaining
            found.add(request)
        assert tokens == self._waiting.num_tokens and len(found) == len(self._waiting), "the queue is miscounted"
        ranks = [request.rank for request in self._running.requests]
        assert ranks == sorted(ranks), "what runs is not in order"
        flights = Counter(item.request.serial for step in self._in_flight for item in step)
        for request in self._running.requests:
            assert request.state is RequestState.RUNNING and request.slot >= 0
            assert request.in_flight == flights[request.serial], "steps in flight are miscounted"
            assert request.in_flight or (request.planned == request.computed and not request.unknown)
            assert request.in_flight or not request.over, "a request is over, but still there"
            found.add(request)
        assert len(found) == len(self._waiting) + len(self._running), "a request is in two places"
        assert found == set(self._requests.values()), "a request is nowhere"
        if not self._requests:
            self.check_idle()

    def _plan_decodes(self) -> tuple[list[tuple[Request, int]] | None, bool]:
        """One token of each request that decodes, by rank, and whether any was retracted to make room.

        None: one would have to be retracted that a step in flight may compute.
        """
        decodes: list[tuple[Request, int]] = []
        retracted = False
        make_room = self._running.make_room
        for request in tuple(self._running.requests):
            known = len(request.token_ids) + request.unknown
            # The second: the token in flight is its last.
            if known - request.planned != 1 or known >= request.max_length + (not request.unknown) or request.over:
                continue
            if retracted and request.state is not RequestState.RUNNING:
                continue
            while not make_room(request):
                if self._in_flight:
                    return None, False
                self._retract(choose_victim(self._running.requests))
                retracted = True
                if request.state is not RequestState.RUNNING:
                    break
            else:
                decodes.append((request, 1))
        return decodes, retracted

    def _retract(self, request: Request) -> None:
        """Sends the last running request back for want of pages; it has no part in the step yet, as those of a higher rank are
        planned first."""
        self._put_back(request)
        self._ratio.retracted(self._running.requests)
        self.num_retractions += 1

    def _put_back(self, request: Request) -> None:
        self._running.stop(request, RequestState.WAITING)
        request.retractions += 1
        request.queued_at = self._steps
        self._waiting.put_back(request)

    def _halt(self) -> None:
        if not self._in_flight:
            while self._retract_all and self._running.requests:
                self._put_back(choose_victim(self._running.requests))
            self._retract_all = False

    def _preempt(self) -> bool:
        """Makes room for the first waiting request at the cost of running ones of a lower level.

        Returns:
            Whether it cannot be done while a step is in flight.
        """
        first = next(self._order.order(self._waiting, self._steps), None)
        if first is None:  # all of them wait for pages that are being fetched
            return False
        level = self._order.level(first, self._steps)
        running = self._running.requests
        while running and -running[-1].rank[0] < level:
            if self._running.num_free_slots and PrefillAdder(self._running, 1, self._ratio).fits(first):
                return False
            if self._in_flight:
                return True
            self._put_back(running[-1])
            self.num_preemptions += 1
        return False

    def _admit(self, adder: PrefillAdder) -> None:
        if adder.num_admissible < 1 or not len(self._waiting):
            return
        for request in self._order.order(self._waiting, self._steps):
            if adder.num_admissible < 1 or adder.should_wait(request):
                break
            tokens = request.remaining
            request.rank = (-self._order.level(request, self._steps), request.arrival)
            if not adder.admit(request):
                break
            self._waiting.remove(request, tokens)
            if self._tiers is not None:
                self._tiers.settle(request.serial)
            request.waited += self._steps - request.queued_at
            if request.cached is None:
                request.cached = request.computed
                self._prompt_tokens += request.prompt_length
                self._cached_tokens += request.cached
                self._fairness.charge(request.tenant, request.remaining)

    def _take_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        if token < 0:
            request.shared = False
            output = self._output(request, [], "error", "the model's logits are not finite numbers")
            self._end(request)
            return output
        if request.grammar is not None and not request.grammar.accept(token):
            output = self._output(request, [], "error", f"grammar: {request.grammar.error}", "grammar")
            self._end(request)
            return output
        request.token_ids.append(token)
        self._fairness.charge(request.tenant, 1)
        reason = self._finish_reason(request, token)
        output = self._output(request, [token], reason, logprobs=[] if logprobs is None else [logprobs])
        if request.prompt_logprobs:
            request.prompt_logprobs = []
        if reason is not None:
            self._end(request)
        return output

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self._config.eos_token_ids and not sampling.ignore_eos):
            return "stop"
        if request.grammar is not None and request.grammar.finished:
            return "stop"
        return "length" if len(request.token_ids) >= request.max_length else None

    def _output(
        self,
        request: Request,
        tokens: list[int],
        reason: FinishReason | None,
        error: str = "",
        error_field: str = "",
        logprobs: list[TokenLogprobs] = _NO_LOGPROBS,
        embedding: bytes = b"",
    ) -> RequestOutput:
        return RequestOutput(
            request.serial,
            tokens,
            reason,
            request.prompt_length,
            request.generated,
            request.cached or 0,
            error,
            error_field,
            logprobs,
            request.prompt_logprobs,
            embedding=embedding,
        )

    def _end(self, request: Request) -> None:
        """Ends a request once no step in flight computes it."""
        if request.in_flight:
            request.over = True
        else:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request, request.remaining)
            request.become(RequestState.FINISHED)
            if self._tiers is not None:
                self._tiers.settle(request.serial)
        else:
            self._running.stop(request, RequestState.FINISHED, keep=request.shared)
        if request.grammar is not None:
            request.grammar.close()
        self._fairness.ended(request.tenant)
        del self._requests[request.serial]

    def _match_length(self, request: Request) -> int:
        return self._cache.probe(request.reusable, request.namespace)[0]

    def _match_path(self, request: Request) -> list[int]:
        return self._cache.path(request.reusable, request.namespace)


def _launched(request: Request, count: int) -> _Item:
    """Notes that a step is on its way."""
    request.planned += count
    request.in_flight += 1
    samples = request.remaining == 0 and not request.pooling
    request.unknown += samples
    return _Item(request, count, samples)


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    start = request.planned
    end = start + count
    known = request.token_ids
    if count == 1:
        token_ids = [known[start] if start < len(known) else -1]
    else:
        token_ids = known[start:end].tolist()
        if len(token_ids) < count:
            token_ids.append(-1)
    return ScheduledRequest(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=token_ids,
        start=start,
        samples=end == len(request.token_ids) + request.unknown and not request.pooling,
        sampling=request.sampling,
        grammar=request.grammar,
        admission=request.admission,
        history=request.token_ids,
        output_start=request.output_start,
        prompt_length=request.prompt_length,
        prompt_logprobs=request.wanted_prompt_logprobs,
        serial=request.serial,
        pooling=request.pooling,
    )
