"""What happens to a request outside its steps: it arrives, gets a step's results, is transferred to another worker, and ends."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Container, Sequence

import numpy as np

from sapwood_common.contract.page_hash import weights_namespace
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.prefix import PrefixCache
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.scheduler.batch import RunningBatch, StepInFlight
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.joining import Join, prompt_key
from sapwood_worker.core.scheduler.request import Request, RequestState
from sapwood_worker.core.scheduler.score_walk import Branch, ScoreWalk
from sapwood_worker.core.scheduler.waiting import TenantFairness, WaitingQueue
from sapwood_worker.records.grammar_state import GrammarState
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import FinishReason, RequestOutput, TokenLogprobs
from sapwood_worker.records.step import ModelOutput


class StepResults:
    """Takes the results of steps, O(requests) each.

    Args:
        waiting: The queue, where those stay that join a step.
        running: The requests that steps compute.
        lifecycle: Ends those that are done.
        fairness: Counts the tokens that prompts' last chunks sampled.
        handoffs: Keeps the pages of prompts for other workers.

    Attributes:
        forced_tokens: Tokens that grammars have forced since the start.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningBatch,
        lifecycle: Lifecycle,
        fairness: TenantFairness,
        handoffs: Handoffs,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._lifecycle = lifecycle
        self._fairness = fairness
        self._handoffs = handoffs
        self.forced_tokens = 0

    def take(self, step: StepInFlight, output: ModelOutput) -> list[RequestOutput]:
        """Takes the results of a step; returns each request's output, and ends complete requests."""
        outputs: list[RequestOutput] = []
        for request, tokens in step.saved:
            self._running.took_state(request, tokens)
        for part, failure in output.failures.items():
            step.requests[part].failure = failure
        logprobs = output.logprobs
        for index, (request, sampled) in enumerate(zip(step.decodes, output.token_ids, strict=False)):
            request.computed += 1
            request.in_flight -= 1
            request.unknown -= 1
            if request.over:
                if not request.in_flight:
                    self._lifecycle.finish(request)
                continue
            taken = (
                take_tokens(request, sampled, logprobs.get(index, [])) if logprobs else take_tokens(request, sampled)
            )
            if request.jumps:
                self.forced_tokens += max(0, len(taken.token_ids) - len(sampled))
            outputs.append(taken)
            if taken.finish_reason is not None:
                self._lifecycle.end(request)
        for (request, number), logprob in zip(step.scored, output.scored, strict=True):
            assert request.walk is not None
            request.walk.put(number, logprob)
        first = len(step.decodes)
        for index, ((request, count), samples) in enumerate(zip(step.chunks, step.samples, strict=True), first):
            got = self._take_chunk(request, count, samples, index, output)
            if got is not None:
                outputs.append(got)
        for index, join in enumerate(step.joins, len(step.plan.rows)):
            got = self._take_joined(join, index, output, step.plan.number + 1)
            if got is not None:
                outputs.append(got)
        return outputs

    def fail(self, steps: Sequence[StepInFlight], begun: Sequence[Request], error: str) -> list[RequestOutput]:
        """Ends the requests of failed steps, and those that the steps were to fill pages for by copies; none of their further
        pages enters the cache."""
        outputs: list[RequestOutput] = []
        for step in steps:
            step.release_grammars()
            for join in step.joins:
                self._running.take_row(join.slot)
        failed = {request.serial: request for step in steps for request in step.requests}
        for request in (failed | {request.serial: request for request in begun}).values():
            if not request.over:
                outputs.append(end_output(request, "error", error))
            request.in_flight = 0
            request.shared = False
            self._lifecycle.end(request)
        return outputs

    def _take_joined(self, join: Join, index: int, output: ModelOutput, step: int) -> RequestOutput | None:
        """Takes the first token of a request that joined the step, at ``index`` in the output; returns the request's output.

        If it goes on, it waits from ``step`` on to be started.
        """
        request = join.request
        self._running.take_row(join.slot)
        request.in_flight -= 1
        request.held = False
        if request.over:
            self._lifecycle.finish(request)
            return None
        self._fairness.charge(request.tenant, 1)
        tokens = output.token_ids[index]
        self._waiting.remove(request, request.remaining)
        taken = take_tokens(request, tokens, output.logprobs.get(index, []))
        request.queued_at = step
        self._waiting.put_back(request)
        self.forced_tokens += max(0, len(taken.token_ids) - len(tokens))
        if taken.finish_reason is not None:
            self._lifecycle.end(request)
        return taken

    def _take_chunk(
        self, request: Request, count: int, samples: bool, index: int, output: ModelOutput
    ) -> RequestOutput | None:
        """Takes a computed chunk of a prompt, the step's ``index``-th part; returns the request's outputs."""
        start = request.computed
        if index in output.prompt_logprobs:
            request.add_prompt_logprobs(start, output.prompt_logprobs[index])
        request.computed += count
        request.in_flight -= 1
        request.unknown -= samples
        if request.over:
            if not request.in_flight:
                self._lifecycle.finish(request)
            return None
        taken: RequestOutput | None = None
        if request.pooling:
            request.add_pooled(start, output.pooled[index])
            if request.computed == request.prompt_length:
                taken = end_output(request, "stop", embedding=request.embedding)
        elif request.walk is not None:
            if request.computed == len(request.token_ids):
                taken = self._advance(request, request.walk)
        elif samples:
            self._fairness.charge(request.tenant, 1)
            tokens = output.token_ids[index]
            taken = take_tokens(request, tokens, output.logprobs.get(index, []))
            self.forced_tokens += max(0, len(taken.token_ids) - len(tokens))
        if taken is not None and taken.finish_reason is not None:
            self._lifecycle.end(request)
        elif taken is not None and request.hands_off:
            self._handoffs.offer_whole(request)
            self._lifecycle.end(request)
        elif request.hands_off:  # more of the prompt is to come
            self._handoffs.offer(request)
        if request.state is RequestState.RUNNING:
            self._running.commit(request)  # other requests find the prompt from now on
        return taken

    def _advance(self, request: Request, walk: ScoreWalk) -> RequestOutput | None:
        """Goes on with the next branch of a computed one; returns the request's output if there is none."""
        branch = walk.advance()
        if branch is None:
            if not all(map(math.isfinite, walk.logprobs)):
                request.shared = False
                return end_output(request, "error", "the model's logits are not finite numbers")
            request.prompt_logprobs = [TokenLogprobs(logprob) for logprob in walk.logprobs]
            del request.token_ids[request.prompt_length :]
            request.computed = request.planned = request.prompt_length
            return end_output(request, "stop")
        if self._running.rewinds:
            request.enter_branch(branch)
        else:
            self._lifecycle.restart(request, branch)
        return None


def accept_drafts(step: StepInFlight, output: ModelOutput, fairness: TenantFairness) -> None:
    """Counts the tokens that came of a step's drafts as computed."""
    for request, draft, tokens in zip(step.decodes, step.drafts, output.token_ids, strict=False):
        if draft:
            right = len(tokens) - 1
            request.computed += right
            request.planned += right
            fairness.charge(request.tenant, right)


# Appends sampled tokens and the tokens that a grammar then forces to their request; ends the request if it must; reports.
#
# O(1) a token. Forced tokens are computed in the next step together, as a chunk of a prompt is.


_NO_LOGPROBS: list[TokenLogprobs] = []


def stop_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def may_jump(request: Request) -> bool:
    """Whether tokens that the request's grammar forces may be appended without running the model.

    They may not if the client asks for log probabilities, or if the runner counts tokens (penalties), bans tokens or calls logit
    processors.
    """
    sampling = request.sampling
    unbiased = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    free = not (
        sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words_ids or sampling.logit_processors
    )
    return request.grammar is not None and sampling.logprobs is None and unbiased and free


def may_draft(request: Request) -> bool:
    """Whether several tokens of the request may be checked in one step: logit processors see one position at a time."""
    return request.sampling.speculate and not request.sampling.logit_processors


_FIRST_FORCED_RATE = 0.9
"""The rate of a new request's drafts of forced text."""


def take_tokens(request: Request, sampled: list[int], logprobs: list[TokenLogprobs] = _NO_LOGPROBS) -> RequestOutput:
    """Appends the tokens that a step sampled, up to one that ends the request, and those that the grammar forces then.

    The caller ends the request if the answer has a ``finish_reason``.

    Args:
        request: The tokens' request. Mutated.
        sampled: At least one; becomes part of the answer. -1: the model's logits were not finite numbers; the request has
            failed and nothing more of it is shared.
        logprobs: The tokens' log probabilities, if asked for.
    """
    grammar = request.grammar
    known = request.token_ids
    before = len(known)
    reason: FinishReason | None = None
    error = field = ""
    for token in sampled:
        if token < 0:
            request.shared = False
            reason, (error, field) = "error", _no_token(request)
            break
        if grammar is not None and not grammar.accept(token):
            reason, error, field = "error", f"grammar: {grammar.error}", "grammar"
            break
        known.append(token)
        if token in request.stops or (grammar is not None and grammar.finished):
            reason = "stop"
            break
        if len(known) >= request.max_length:
            reason = "length"
            break
    if reason is None and request.jumps and grammar is not None:
        reason = _jump(request, grammar)
    taken = len(known) - before
    output = RequestOutput(
        request.serial,
        sampled if taken == len(sampled) else known[before:].tolist(),
        reason,
        request.prompt_length,
        len(known) - request.prompt_length,
        request.cached or 0,
        error,
        field,
        logprobs[:taken] if logprobs else logprobs,
        request.prompt_logprobs,
        drafted_tokens=0 if request.drafts is None else request.drafts.drafted,
        accepted_tokens=0 if request.drafts is None else request.drafts.accepted,
    )
    if request.prompt_logprobs:
        request.prompt_logprobs = []
    return output


def _jump(request: Request, grammar: GrammarState) -> FinishReason | None:
    """Appends the tokens that the grammar forces; returns why the request ends, if it does."""
    while (token := grammar.forced()) is not None:
        accepted = grammar.accept(token)
        assert accepted, f"the grammar forces token {token}, but does not accept it"
        request.token_ids.append(token)
        if token in request.stops or grammar.finished:
            return "stop"
        if len(request.token_ids) >= request.max_length:
            return "length"
    return None


def _no_token(request: Request) -> tuple[str, str]:
    """Why no token could be sampled, and the faulty field if the request is to blame."""
    sampling = request.sampling
    if sampling.logit_processors:
        why = request.failure or "the logit processors left no token: all logits are forbidden or not finite numbers"
        return why, "sampling.logit_processors"
    if sampling.allowed_token_ids or sampling.bad_words_ids:
        return "every token is forbidden by allowed_token_ids, bad_words_ids and what else the request asks for", ""
    return "the model's logits are not finite numbers", ""


def end_output(
    request: Request, reason: FinishReason, error: str = "", error_field: str = "", embedding: bytes = b""
) -> RequestOutput:
    """The last output of a request that ends without a token."""
    return RequestOutput(
        request.serial,
        [],
        reason,
        request.prompt_length,
        request.generated,
        request.cached or 0,
        error,
        error_field,
        _NO_LOGPROBS,
        request.prompt_logprobs,
        embedding=embedding,
    )


# The scheduler's part in KV transfers: which prompts and pages it offers to other workers, and which pages it reads from them.
#
# A request of a KV transfer ends here with its prompt; its pages are kept for the worker that continues it (``leases.py``).
# That worker reads the pages, possibly before the request arrives (``reads.py``).
#
# Complexity: O(pages of the prompt) for each prompt, O(leases) a poll.


class Handoffs:
    """Offers, keeps and reads pages.

    Args:
        tiers: The KV cache's lower tiers; None: there are no KV transfers.
        cache: The prefix cache.
        running: Knows the pages of running requests.
        page_size: Tokens in a page.

    Attributes:
        weights: Stands for the weights in use, in the names of pages; empty: they are those of the start.
    """

    weights = b""

    def __init__(
        self, tiers: HierarchicalCache | None, cache: PrefixCache, running: RunningBatch, page_size: int
    ) -> None:
        self._tiers = tiers
        self._cache = cache
        self._running = running
        self._page_size = page_size

    @property
    def _leases(self) -> TransferLeases | None:
        return None if self._tiers is None else self._tiers.leases

    def offer(self, request: Request) -> None:
        """Offers a prompt once a chunk of it has been computed. Each page is kept from the moment it is in host memory."""
        assert self._leases is not None, "the front lets no such request through"
        prompt = request.keyed[: request.prompt_length]
        if request.pictures and self._tiers is not None:
            self._leases.offer_pages(request.serial, self._tiers.keys(prompt, request.namespace))
        else:
            self._leases.offer(request.serial, prompt, request.namespace)

    def offer_whole(self, request: Request) -> None:
        """Does what :meth:`offer` does, for a computed prompt: the prompt's last ticket follows."""
        self.offer(request)
        assert self._leases is not None
        self._leases.computed(request.serial)

    def offer_chunks(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Offers the pages that the coming step fills, if they are many of one prompt: other workers read them while the step
        computes.

        Args:
            chunks: The step's chunks: requests, and how many tokens the step computes of each.
        """
        if self._tiers is None or self._leases is None or not self._leases.in_parts:
            return
        for request, count in chunks:
            end = min(request.planned + count, request.prompt_length)
            first, last = request.planned // self._page_size, end // self._page_size
            if request.hands_off and not request.over and last - first >= self._leases.in_parts:
                pages, _ = self._running.pages_of(np.array([request.slot]), np.array([end]))
                width = -(-end // self._page_size)
                filled = pages.reshape(-1, width)[:, first:last]
                prompt = request.keyed[: request.prompt_length]
                self._tiers.computes(request.slot, request.serial, prompt, first, filled)

    def withdraw(self, request: Request) -> None:
        """Withdraws the offer of a request that ends before its prompt has been computed."""
        if request.hands_off and self._leases is not None:
            self._leases.withdraw(request.serial)

    def cancel(self, serial: int) -> bool:
        """Releases the pages kept for an aborted request; returns true if its last ticket had not been given yet."""
        return self._leases is not None and self._leases.cancel(serial)

    @property
    def owes_tickets(self) -> bool:
        """Whether computed prompts still wait for :meth:`poll` to give their tickets."""
        return self._leases is not None and self._leases.offering

    def poll(self) -> list[RequestOutput]:
        """Ends leases whose time is over, releases announced pages that no message has named for long, and returns outputs as
        :meth:`tickets` does.

        Call this right after all messages were taken: renewals wait during a step, and a step may last longer than a lease.
        """
        if self._tiers is None:
            return []
        if self._tiers.reads is not None:
            self._tiers.reads.lapse()
        return [] if self._leases is None else _outputs(self._leases.poll())

    def tickets(self) -> list[RequestOutput]:
        """Outputs for requests whose pages are now kept for another worker.

        While the prompt is still being computed, an output names the pages so far; the request's last output names all.
        """
        return [] if self._leases is None else _outputs(self._leases.tickets())

    def keep(self, renewed: Sequence[bytes], released: Sequence[bytes]) -> None:
        """Renews the leases of some tickets and ends those of others, by transfer id; unknown ids are ignored."""
        if self._leases is not None:
            self._leases.renew(renewed)
            self._leases.release(released)

    def announced(self, ticket: HandoffTicket, prompt: array[int], namespace: bytes) -> None:
        """Reads pages for a request that will probably come, unless this worker has them already.

        Args:
            ticket: For some of its prompt's pages.
            prompt: Empty if an earlier call for the same transfer had it.
            namespace: The request's.
        """
        if self._tiers is not None and self._tiers.reads is not None:
            namespace = weights_namespace(namespace, self.weights)
            self._tiers.announced(ticket, prompt, namespace, self._cache.probe(prompt, namespace)[0])


def _outputs(given: Sequence[tuple[int, HandoffTicket, bool]]) -> list[RequestOutput]:
    return [
        RequestOutput(serial, [], "handoff" if complete else None, ticket=ticket) for serial, ticket, complete in given
    ]


# How requests enter and leave the scheduler: accepted or refused, aborted, expired, ended. Each request ends exactly once.
# Complexity: O(1) and a lookup in the cache's third tier when a request arrives; O(its pages) when it ends.


class Lifecycle:
    """Begins and ends requests.

    Args:
        config: The scheduler's.
        limit: Most tokens of a request, prompt and output together.
        waiting: The queue of accepted requests.
        running: The batch that admission moves them to.
        fairness: Learns which tenants are busy.
        cache: The prefix cache.
        tiers: The KV cache's lower tiers; None: there are none.
        handoffs: Keeps pages of requests for other workers.

    Attributes:
        requests: Those that have not ended, by serial.
        loras: How many of them each adapter has.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limit: int,
        waiting: WaitingQueue,
        running: RunningBatch,
        fairness: TenantFairness,
        cache: PrefixCache,
        tiers: HierarchicalCache | None,
        handoffs: Handoffs,
    ) -> None:
        self._config = config
        self._limit = limit
        self._waiting = waiting
        self._running = running
        self._fairness = fairness
        self._cache = cache
        self._tiers = tiers
        self._handoffs = handoffs
        self._deadlines = Deadlines()
        self._arrivals = self._step = 0
        self.requests: dict[int, Request] = {}
        self.loras: Counter[int] = Counter()

    def add(self, request: Request, step: int) -> None:
        """Accepts a request before step ``step``; one of the next steps computes its first tokens.

        Raises:
            InvalidArgumentError: It can never run: its prompt leaves no room in the context.
            ResourceExhaustedError: The queue is full.
        """
        assert request.serial not in self.requests, f"serial {request.serial} is taken"
        if not request.prompt_length:
            raise InvalidArgumentError("token_ids is empty: there is no prompt", field="token_ids")
        if request.walk is not None and request.max_length > self._limit:
            raise InvalidArgumentError(
                f"prompt and continuations of {request.max_length} tokens are longer than the context of {self._limit} tokens",
                field="continuations",
            )
        if request.prompt_length >= self._limit + bool(request.pooling):
            raise InvalidArgumentError(
                f"prompt of {request.prompt_length} tokens leaves no room in the context of {self._limit} tokens",
                field="token_ids",
            )
        if self._config.policy != "priority":
            request.priority = 0
        request.whole, request.unsplit = self._config.whole_prompts, self._config.whole_pictures
        request.prompt_key = prompt_key(request) if self._running.spares_prompts else None
        self._waiting.add(request)
        self.requests[request.serial] = request
        if request.lora:
            self.loras[request.lora] += 1
        self._fairness.arrived(request.tenant)
        if request.deadline is not None:
            self._deadlines.add(request.serial, request.deadline, self.requests)
        request.max_length = min(self._limit, request.max_length)
        request.stops = stop_tokens(request.sampling, self._config.eos_token_ids)
        request.jumps = self._config.jump_forward and may_jump(request)
        request.forced_rate = _FIRST_FORCED_RATE if self._config.jump_forward and may_draft(request) else 0.0
        request.arrival = self._arrivals
        request.queued_at = self._step = step
        request.size = None
        self._arrivals += 1
        if self._tiers is not None:
            cached = self._cache.probe(request.reusable, request.namespace)[0]
            request.held = self._tiers.queued(
                request.serial, request.reusable[:-1], request.namespace, cached, request.ticket
            )

    def restart(self, request: Request, branch: Branch) -> None:
        """Sends a running request back to the queue, to begin a branch of its walk with what is cached of the prompt. Without all
        pages of its windows, or the state, it cannot go back in its row."""
        self._running.stop(request, RequestState.WAITING)
        request.enter_branch(branch)
        request.queued_at = self._step
        self._waiting.put_back(request)

    def give_away(self, request: Request | None, suits: Callable[[Request], bool]) -> Request | None:
        """Removes and returns a waiting request for another scheduler, if it has never run and ``suits`` that scheduler."""
        if request is None or request.cached is not None or not suits(request):
            return None
        self._waiting.remove(request, request.remaining)
        if self._tiers is not None:
            self._tiers.settle(request.serial)
        self._fairness.ended(request.tenant)
        self._forget_lora(request)
        return self.requests.pop(request.serial)

    def abort(self, serial: int) -> bool:
        """Ends a request; its pages are free before the next step (after the steps in flight, if it is part of one).

        Returns:
            Whether there was such a request. It gets no further output.
        """
        request = self.requests.get(serial)
        if request is None or request.over:
            return self._handoffs.cancel(serial)
        self.end(request)
        return True

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends the requests whose deadline has passed by ``now``, as :meth:`abort` does; returns their last outputs."""
        outputs: list[RequestOutput] = []
        for serial in self._deadlines.passed(now):
            request = self.requests.get(serial)
            if request is not None and not request.over:
                outputs.append(end_output(request, "deadline"))
                self.abort(serial)
        return outputs

    def end(self, request: Request) -> None:
        """Ends a request once no step in flight computes it."""
        self._handoffs.withdraw(request)
        if request.in_flight:
            request.over = True
        else:
            self.finish(request)

    def finish(self, request: Request) -> None:
        """Ends a request that no step in flight computes; its computed pages stay in the cache, if they may be shared."""
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
        self._forget_lora(request)
        del self.requests[request.serial]

    def _forget_lora(self, request: Request) -> None:
        if request.lora:
            self.loras[request.lora] -= 1
            if not self.loras[request.lora]:
                del self.loras[request.lora]


# Deadlines of waiting and running requests, in a heap. Entries of ended requests are dropped when they reach the top.
#
# O(log n) for each request. Bound: when entries of ended requests outnumber the others, the heap is rebuilt.
_LEAST = 64


class Deadlines:
    """Deadlines by serial."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._rebuild_at = _LEAST

    def add(self, serial: int, deadline: float, unfinished: Container[int]) -> None:
        """Notes a deadline; ``unfinished`` are the serials of requests that have not ended."""
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[1] in unfinished]
            heapq.heapify(self._heap)
            self._rebuild_at = max(_LEAST, 2 * len(self._heap))
        heapq.heappush(self._heap, (deadline, serial))

    def passed(self, now: float) -> list[int]:
        """Takes out and returns the serials whose deadline has passed, the earliest first; some may have ended before."""
        passed: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[1])
        return passed
