"""Stage 6: tokens go from the worker to the detokenizer, or straight to the client, no faster than the client reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from sapwood_common.errors import SapwoodError
from sapwood_router.fleet.circuit_breaker import Permit
from sapwood_router.fleet.outcome import Outcome
from sapwood_router.fleet.output import WorkerOutput
from sapwood_router.fleet.worker import Lease
from sapwood_router.flow.stages.execution import Execution
from sapwood_router.request.context import FinishReason, RequestContext
from sapwood_router.request.output_stream import OutputStream
from sapwood_router.transport.held_tickets import HeldTicket


class Generating(Execution):
    """One worker's try at a generation.

    Args:
        context: ``output_ids``, ``worker_finish`` and ``cached_tokens`` are filled.
        stream: Takes the tokens.
        end_tokens: Tokens that end a generation and stand for no text.
        lease, permit, on_over: See Execution.
        on_first: Called when the first tokens come; None: nothing is called.
        on_announced: Called with a ticket for pages that the next worker may already read. It has to release the ticket.
        on_ticket: Called after ``on_over``, if this worker has computed the prompt and another one is to generate. It has to
            release the ticket.
    """

    def __init__(
        self,
        context: RequestContext,
        stream: OutputStream,
        end_tokens: Collection[int],
        lease: Lease,
        permit: Permit,
        on_over: Callable[[SapwoodError | None], None],
        on_announced: Callable[[HeldTicket], None],
        on_ticket: Callable[[HeldTicket], None],
        on_first: Callable[[], None] | None,
    ) -> None:
        super().__init__(lease, permit, on_over)
        self._on_announced: Callable[[HeldTicket], None] | None = on_announced
        self._on_ticket: Callable[[HeldTicket], None] | None = on_ticket
        self._on_first = on_first
        self._context = context
        self._stream = stream
        self._end_tokens = end_tokens
        self._held = False

    def token(self, token_id: int) -> None:
        if not self._begun:
            self.output(WorkerOutput([token_id]))
            return
        self._context.output_ids.append(token_id)
        if self._stream.push((token_id,)):
            self._hold()

    def output(self, output: WorkerOutput) -> None:
        context, token_ids = self._context, output.token_ids
        if output.announced is not None and self._on_announced is not None:
            self._on_announced(output.announced)
            if not token_ids:
                return
        if token_ids:
            # A client that takes the answer whole is sent nothing at its first token: that moment is noted here.
            if context.whole and context.first_token is None:
                context.first_token = time.perf_counter()
            if not self._begun:
                self._answers()
                on_first, self._on_first = self._on_first, None
                if on_first is not None:
                    on_first()
        first = not (context.resumptions or context.handoffs)
        if output.cached_tokens is not None and first:
            context.cached_tokens = output.cached_tokens
        context.output_ids.extend(token_ids)
        context.logprobs.extend(output.logprobs)
        if output.prompt_logprobs and first:
            context.prompt_logprobs = output.prompt_logprobs
        if output.ticket is not None:
            on_ticket = self._on_ticket
            self._stream.push(token_ids)
            self._end(Outcome.SUCCESS, None)
            if on_ticket is not None:
                on_ticket(output.ticket)
            return
        if output.finish is None:
            if self._stream.push(token_ids):
                self._hold()
            return
        context.worker_finish = output.finish
        context.accepted_prediction_tokens = output.accepted_prediction_tokens
        context.rejected_prediction_tokens = output.rejected_prediction_tokens
        # A worker knows no stop strings: it stops at an end token, which is part of the tokens but not of the text, or where
        # the grammar allows no more.
        stopped = output.finish is FinishReason.STOP and len(token_ids) > 0 and token_ids[-1] in self._end_tokens
        self._stream.push(token_ids[:-1] if stopped else token_ids, end=True)
        self._end(Outcome.SUCCESS, None)

    def _end(self, outcome: Outcome, error: SapwoodError | None) -> None:
        self._on_announced = self._on_ticket = self._on_first = None  # as with ``on_over``
        super()._end(outcome, error)

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
