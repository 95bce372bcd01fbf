"""Continuous batching: decides, step by step, which tokens of which requests are computed.

Algorithm (iteration-level scheduling as in Orca, chunked prefill as in Sarathi-Serve, paged KV as in vLLM): a step takes one
token of every request that decodes, then fills its token budget with chunks of prompts, running requests before waiting
ones. Waiting requests are admitted in the policy's order while rows, budget and pages last; one that does not fit, or that
waits for a prefix which a running request is computing, is not overtaken. When pages run out, prefixes nobody uses are
evicted; if that is not enough, requests are retracted (``retraction.py``, where it stands why every request ends).

Complexity: a step costs O(running) and what the radix tree takes for the admitted prompts; it does not depend on the number of
cached tokens. Bound: at most ``max_running`` rows and ``max_waiting`` queued requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.cache.eviction import EvictionName
from sapwood_worker.cache.hierarchical import HierarchicalCache
from sapwood_worker.cache.kv_events import KvEvent, KvEventLog
from sapwood_worker.cache.page_allocator import PageAllocator
from sapwood_worker.cache.page_table import PageTable
from sapwood_worker.cache.prefix_cache import PrefixCache
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.output import (
    FinishReason,
    ModelOutput,
    RequestOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from sapwood_worker.scheduler.policy import PolicyName, make_policy
from sapwood_worker.scheduler.prefill_adder import PrefillAdder
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.retraction import NewTokenRatio, choose_victim
from sapwood_worker.scheduler.running_batch import RunningBatch
from sapwood_worker.scheduler.state import RequestState
from sapwood_worker.scheduler.waiting_queue import WaitingQueue

_NO_LOGPROBS: list[TokenLogprobs] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a scheduler must know.

    Attributes:
        page_size: Tokens a page.
        num_pages: Pages in the pool.
        context_length: Most tokens of prompt and output together.
        eos_token_ids: The model's end tokens.
        max_running: Most requests in a batch.
        max_waiting: Most requests in the queue.
        max_step_tokens: Token budget of a step; a decode counts one. Prefill always gets at least one token.
        policy: Order of admission.
        prefix_cache: Whether finished work is kept for requests to come.
        eviction: Which cached prefix goes first when room is needed.
        kv_events: Whether to note what the prefix cache stores and removes; :meth:`Scheduler.take_kv_events` must then be
            called after each step.
        conservativeness: How much of the pages that running requests are expected to need is kept for them at admission.
    """

    page_size: int
    num_pages: int
    context_length: int
    eos_token_ids: frozenset[int] = frozenset()
    max_running: int = 64
    max_waiting: int = 1024
    max_step_tokens: int = 512
    policy: PolicyName = "fcfs"
    prefix_cache: bool = True
    eviction: EvictionName = "lru"
    kv_events: bool = False
    conservativeness: float = 1.0


class Scheduler:
    """The core of the worker. Single-threaded; ``schedule`` and ``update`` alternate.

    Args:
        config: See :class:`SchedulerConfig`.
        tiers: The KV cache's tiers below the device's pages; None: there are none.
    """

    def __init__(self, config: SchedulerConfig, tiers: HierarchicalCache | None = None) -> None:
        self._config = config
        self._tiers = tiers
        self._limit = min(config.context_length, config.num_pages * config.page_size)
        self._allocator = PageAllocator(config.num_pages)
        table = PageTable(config.max_running, -(-self._limit // config.page_size))
        self._kv_events = KvEventLog() if config.kv_events else None
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
        self._policy = make_policy(config.policy, self._match_length)
        self._ratio = NewTokenRatio(config.conservativeness)
        self._in_flight: list[tuple[Request, int]] | None = None
        self._steps = 0
        self._arrivals = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.num_retractions = 0
        """Retractions since the start."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def has_copies(self) -> bool:
        """Whether a step is due even without requests, because pages wait to be copied or a copy's end to be reported."""
        return self._tiers is not None and self._tiers.busy

    def add(self, request: Request) -> None:
        """Lets a request in; its first tokens are computed in one of the next steps.

        Raises:
            InvalidArgumentError: It can never run: its prompt leaves no room in the context.
            ResourceExhaustedError: The queue is full.
        """
        assert request.serial not in self._requests, f"serial {request.serial} is taken"
        if not request.prompt_length:
            raise InvalidArgumentError("token_ids is empty: there is no prompt", field="token_ids")
        if request.prompt_length >= self._limit:
            raise InvalidArgumentError(
                f"prompt of {request.prompt_length} tokens leaves no room in the context of {self._limit} tokens",
                field="token_ids",
            )
        self._waiting.add(request)
        self._requests[request.serial] = request
        request.max_length = min(self._limit, request.max_length)
        request.arrival = self._arrivals
        request.queued_at = self._steps
        self._arrivals += 1

    def abort(self, serial: int) -> bool:
        """Ends a request; its pages are free before the next step (after the step in flight, if it is part of one).

        Returns:
            Whether there was such a request. It gets no further output.
        """
        request = self._requests.get(serial)
        if request is None or request.aborted:
            return False
        if self._in_flight is not None and any(request is scheduled for scheduled, _ in self._in_flight):
            request.aborted = True
        else:
            self._finish(request)
        return True

    def schedule(self) -> SchedulerOutput:
        """Plans the next step; it is false if there is nothing to do.

        ``update`` or ``fail_step`` must follow before the next call, unless it is false.
        """
        assert self._in_flight is None, "the last step was not updated"
        decodes, retracted = self._plan_decodes()
        budget = max(1, self._config.max_step_tokens - len(decodes))
        adder = PrefillAdder(self._running, budget, self._ratio)
        adder.continue_running()
        if not retracted:
            self._ratio.step()
            self._admit(adder)
        step = decodes + adder.chunks
        copies = self._tiers.take() if self._tiers is not None else None
        output = SchedulerOutput(self._steps, self._running.rows, [_scheduled(*item) for item in step], copies)
        if output:
            self._in_flight = step
            self._steps += 1
        return output

    def update(self, output: ModelOutput) -> list[RequestOutput]:
        """Takes a step's tokens; returns what each request gets."""
        step, self._in_flight = self._in_flight, None
        assert step is not None and len(step) == len(output.token_ids) and output.step == self._steps - 1
        if self._tiers is not None:
            self._tiers.ended(output.copied)
        outputs: list[RequestOutput] = []
        for index, ((request, count), token) in enumerate(zip(step, output.token_ids, strict=True)):
            if index in output.prompt_logprobs:
                request.add_prompt_logprobs(request.computed, output.prompt_logprobs[index])
            request.computed += count
            if request.aborted:
                self._finish(request)
                continue
            prefill = count > 1 or request.generated == 0
            if request.remaining == 0:
                outputs.append(self._take_token(request, token, output.logprobs.get(index)))
            if prefill and request.state is RequestState.RUNNING:
                self._running.commit(request)  # who shares the prompt finds it from now on
        return outputs

    def fail_step(self, error: str) -> list[RequestOutput]:
        """The step in flight came to nothing: ends its requests, and nothing more of them is shared."""
        step, self._in_flight = self._in_flight, None
        outputs: list[RequestOutput] = []
        for request, _ in step or ():
            if not request.aborted:
                outputs.append(self._output(request, [], "error", error))
            self._finish(request, keep=False)
        return outputs

    def flush_cache(self) -> int:
        """Empties the prefix cache of what no running request holds; returns the number of pages freed."""
        return self._cache.flush()

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
        waiting = [*self._waiting.retracted(), *self._waiting.new()]
        assert sum(request.remaining for request in waiting) == self._waiting.num_tokens
        assert all(request.state is RequestState.WAITING and request.slot < 0 for request in waiting)
        assert all(request.state is RequestState.RUNNING for request in self._running.requests)
        assert {*waiting, *self._running.requests} == set(self._requests.values()), (
            "a request is nowhere or in two places"
        )
        if not self._requests:
            self.check_idle()

    def _plan_decodes(self) -> tuple[list[tuple[Request, int]], bool]:
        """One token of each request that decodes, oldest first, and whether any was retracted to make room."""
        decodes: list[tuple[Request, int]] = []
        retracted = False
        for request in tuple(self._running.requests):
            if request.remaining != 1 or request.state is not RequestState.RUNNING:
                continue
            while request.state is RequestState.RUNNING and not self._running.make_room(request):
                self._retract(choose_victim(self._running.requests))
                retracted = True
            if request.state is RequestState.RUNNING:
                decodes.append((request, 1))
        return decodes, retracted

    def _retract(self, request: Request) -> None:
        """Sends the youngest running request back; it has no part in the step yet, as the older ones are planned first."""
        self._running.stop(request, RequestState.WAITING)
        request.retractions += 1
        request.queued_at = self._steps
        self._waiting.put_back(request)
        self._ratio.retracted(self._running.requests)
        self.num_retractions += 1

    def _admit(self, adder: PrefillAdder) -> None:
        if adder.num_admissible < 1 or not len(self._waiting):
            return
        for request in self._policy.order(self._waiting, adder.num_admissible, self._steps):
            if adder.num_admissible < 1 or adder.should_wait(request):
                break
            tokens = request.remaining
            if not adder.admit(request):
                break
            self._waiting.remove(request, tokens)
            if request.cached is None:
                request.cached = request.computed
                self._prompt_tokens += request.prompt_length
                self._cached_tokens += request.cached

    def _take_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        if token < 0:
            output = self._output(request, [], "error", "the model's logits are not finite numbers")
            self._finish(request, keep=False)
            return output
        if request.grammar is not None and not request.grammar.accept(token):
            output = self._output(request, [], "error", f"grammar: {request.grammar.error}", "grammar")
            self._finish(request)
            return output
        request.token_ids.append(token)
        reason = self._finish_reason(request, token)
        output = self._output(request, [token], reason, logprobs=[] if logprobs is None else [logprobs])
        request.prompt_logprobs = []
        if reason is not None:
            self._finish(request)
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
        )

    def _finish(self, request: Request, *, keep: bool = True) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request, request.remaining)
            request.become(RequestState.FINISHED)
        else:
            self._running.stop(request, RequestState.FINISHED, keep=keep)
        if request.grammar is not None:
            request.grammar.close()
        del self._requests[request.serial]

    def _match_length(self, request: Request) -> int:
        return self._cache.probe(request.reusable, request.namespace)[0]


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    start = request.computed
    end = start + count
    return ScheduledRequest(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=request.token_ids[start:end].tolist(),
        start=start,
        samples=end == len(request.token_ids),
        sampling=request.sampling,
        grammar=request.grammar,
        admission=request.admission,
        history=request.token_ids,
        output_start=request.output_start,
        prompt_length=request.prompt_length,
        prompt_logprobs=request.wanted_prompt_logprobs,
        serial=request.serial,
    )
