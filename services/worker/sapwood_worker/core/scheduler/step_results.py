"""Hands what a step computed to its requests: tokens, embeddings, or that the step failed."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.completion import end_output, take_tokens
from sapwood_worker.core.scheduler.handoffs import Handoffs
from sapwood_worker.core.scheduler.lifecycle import Lifecycle
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.running.step_in_flight import StepInFlight
from sapwood_worker.core.scheduler.state import RequestState
from sapwood_worker.core.scheduler.waiting.fairness import TenantFairness
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step import ModelOutput


class StepResults:
    """Takes the results of steps, O(requests) each.

    Args:
        running: The requests that steps compute.
        lifecycle: Ends those that are done.
        fairness: Is told of the tokens that prompts' last chunks sampled.
        handoffs: Keeps the pages of prompts for other workers.

    Attributes:
        forced_tokens: Tokens that grammars have forced since the start.
    """

    def __init__(
        self, running: RunningBatch, lifecycle: Lifecycle, fairness: TenantFairness, handoffs: Handoffs
    ) -> None:
        self._running = running
        self._lifecycle = lifecycle
        self._fairness = fairness
        self._handoffs = handoffs
        self.forced_tokens = 0

    def take(self, step: StepInFlight, output: ModelOutput) -> list[RequestOutput]:
        """Takes what a step computed; returns what each request gets, and ends those that are complete."""
        outputs: list[RequestOutput] = []
        for part, failure in output.failures.items():
            step.requests[part].failure = failure
        logprobs = output.logprobs
        for index, (request, tokens) in enumerate(zip(step.decodes, output.token_ids, strict=False)):
            request.computed += 1
            request.in_flight -= 1
            request.unknown -= 1
            if request.over:
                if not request.in_flight:
                    self._lifecycle.finish(request)
                continue
            taken = take_tokens(request, tokens, logprobs.get(index, [])) if logprobs else take_tokens(request, tokens)
            if request.jumps:
                self.forced_tokens += max(0, len(taken.token_ids) - len(tokens))
            outputs.append(taken)
            if taken.finish_reason is not None:
                self._lifecycle.end(request)
        first = len(step.decodes)
        for index, ((request, count), samples) in enumerate(zip(step.chunks, step.samples, strict=True), first):
            got = self._take_chunk(request, count, samples, index, output)
            if got is not None:
                outputs.append(got)
        return outputs

    def fail(self, steps: Sequence[StepInFlight], error: str) -> list[RequestOutput]:
        """Ends the requests of steps that have failed; nothing more of them is put into the cache."""
        outputs: list[RequestOutput] = []
        for step in steps:
            step.release_grammars()
        for request in {request.serial: request for step in steps for request in step.requests}.values():
            if not request.over:
                outputs.append(end_output(request, "error", error))
            request.in_flight = 0
            request.shared = False
            self._lifecycle.end(request)
        return outputs

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
