"""Stage 6: tokens flow from the worker to the detokenizer, or past it, no faster than the client takes what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from sapwood_common.errors import SapwoodError
from sapwood_router.fleet.circuit_breaker import Permit
from sapwood_router.fleet.outcome import Outcome, outcome_of
from sapwood_router.fleet.output import WorkerOutput
from sapwood_router.fleet.session import WorkerStream
from sapwood_router.fleet.worker import Lease
from sapwood_router.request.context import FinishReason, RequestContext
from sapwood_router.request.output_stream import OutputStream


class Execution:
    """One worker's try at a request. Implements ``StreamSink``: takes outputs as they come, without a task of its own.

    Args:
        context: ``output_ids``, ``worker_finish`` and ``cached_tokens`` are filled.
        stream: Takes the tokens.
        lease: The request's share of the worker's load; released when the try is over.
        permit: From the worker's breaker; ended with the first token, or with the failure.
        end_tokens: Tokens that end a generation and stand for no text.
        on_over: Called once, when the try is over: with None if the worker finished the generation or the try was given up, else
            with what went wrong. Must not raise.
    """

    def __init__(
        self,
        context: RequestContext,
        stream: OutputStream,
        lease: Lease,
        permit: Permit,
        end_tokens: Collection[int],
        on_over: Callable[[SapwoodError | None], None],
    ) -> None:
        self._context = context
        self._end_tokens = end_tokens
        self._stream = stream
        self._lease = lease
        self._permit = permit
        self._worker_stream: WorkerStream | None = None
        self._held = False
        self._begun = False
        self._ended = False
        self._on_over: Callable[[SapwoodError | None], None] | None = on_over

    def begin(self, worker_stream: WorkerStream) -> None:
        """The request was sent."""
        self._worker_stream = worker_stream

    def token(self, token_id: int) -> None:
        relay = self._stream.relay
        if relay is None or not self._begun or not relay(token_id):
            self.output(WorkerOutput([token_id]))

    def output(self, output: WorkerOutput) -> None:
        context, token_ids = self._context, output.token_ids
        if token_ids:
            if context.whole and context.first_token is None:  # who reads the whole learns of it at the end only
                context.first_token = time.perf_counter()
            if not self._begun:
                self._begun = True
                self._lease.prefilled()
                self._permit.end(Outcome.SUCCESS)
        if output.cached_tokens is not None and not context.resumptions:
            context.cached_tokens = output.cached_tokens
        context.output_ids.extend(token_ids)
        context.logprobs.extend(output.logprobs)
        if output.prompt_logprobs and not context.resumptions:
            context.prompt_logprobs = output.prompt_logprobs
        if output.finish is None:
            if self._stream.push(token_ids):
                self._hold()
            return
        context.worker_finish = output.finish
        # A worker knows no stop strings: it stops at an end token, which is part of the tokens but not of the text, or where
        # the grammar allows no more.
        stopped = output.finish is FinishReason.STOP and len(token_ids) > 0 and token_ids[-1] in self._end_tokens
        self._stream.push(token_ids[:-1] if stopped else token_ids, end=True)
        self._end(Outcome.SUCCESS, None)

    def failed(self, error: SapwoodError) -> None:
        self._end(outcome_of(error), error)

    def close(self, error: SapwoodError | None = None) -> None:
        """Gives the try up, for ``error`` if it was not the client who left. May be called again, and after its end."""
        self._end(Outcome.NEUTRAL, error)

    def _end(self, outcome: Outcome, error: SapwoodError | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._permit.end(outcome)
        self._lease.release()
        if self._worker_stream is not None:
            self._worker_stream.close()
        # Who is called knows this try: if it knew them, too, the request's tokens would wait for the collector.
        on_over, self._on_over = self._on_over, None
        assert on_over is not None
        on_over(error)

    def _hold(self) -> None:
        """The worker keeps what it generates until the client has read some."""
        if not self._held and self._worker_stream is not None:
            self._held = True
            self._worker_stream.pause()
            self._stream.call_when_room(self._resume)

    def _resume(self) -> None:
        self._held = False
        if self._worker_stream is not None:
            self._worker_stream.resume()
