"""The front's side of one call: the streams of its continuations, one owner, one way to end it early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sapwood_common import errors
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import FinishReason, RequestOutput, TokenLogprobs


class _Continuation:
    """What the reader has not taken of one continuation yet; ``last`` is its latest output, None when all is taken."""

    __slots__ = ("finished", "last", "logprobs", "prompt_logprobs", "ticket", "tokens")

    def __init__(self) -> None:
        self.finished = False
        self.drop()

    def drop(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.last: RequestOutput | None = None
        self.ticket: HandoffTicket | None = None

    def add(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.last = output
        if output.ticket is not None:
            before = self.ticket if output.finish_reason is None else None
            self.ticket = output.ticket if before is None else before.joined(output.ticket)

    def merged(self, index: int) -> RequestOutput:
        """What was added since the last call, as one; there must be something."""
        last = self.last
        assert last is not None
        reason: FinishReason | None = last.finish_reason
        result = RequestOutput(
            last.serial,
            self.tokens,
            reason,
            last.prompt_tokens,
            last.completion_tokens,
            last.cached_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            index=index,
            drafted_tokens=last.drafted_tokens,
            accepted_tokens=last.accepted_tokens,
            ticket=self.ticket,
        )
        self.drop()
        return result


class Generation:
    """One call. Whoever has it reads it to its end (``async for``, or :meth:`listen` and :meth:`take`) or closes it; one
    reader only.

    Outputs that the reader has not taken yet are merged into one for each continuation: a slow reader loses nothing, and what
    is kept for it is at most its request's own tokens. A continuation that hands off ends when its ticket is taken: until then
    nobody else knows of the pages that are kept for it.

    Args:
        request_id: The client's name for the request.
        count: How many continuations; each is a request to the scheduler.
        on_close: Called once, when it ends or is closed, with the indices of the continuations the scheduler may still be at.
    """

    def __init__(self, request_id: str, count: int, on_close: Callable[[list[int]], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._continuations = [_Continuation() for _ in range(count)]
        self._open = count
        # Indices with something to take, in order of their first untaken output.
        self._ready: dict[int, None] = {}
        self._error: errors.SapwoodError | None = None
        self._closed = False
        self._wake: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        """The outputs of some continuation since they were last taken, as one.

        Raises:
            RequestCancelledError: It was aborted.
            SapwoodError: The scheduler refused or failed it, or is gone.
        """
        while (output := self.take()) is None:
            if self._closed:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return output

    @property
    def ended(self) -> bool:
        """Whether nothing more comes and all is taken."""
        return self._closed and not self._ready and self._error is None

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` from now on whenever :meth:`take` may have something; at once if it has already."""
        self._listener = listener
        if self._ready or self._closed:
            listener()

    def take(self) -> RequestOutput | None:
        """The outputs of some continuation since they were last taken, as one; None if there are none. Never waits.

        Raises:
            SapwoodError: As reading does.
        """
        if not self._ready:
            if self._error is not None:
                raise self._error
            return None
        index = next(iter(self._ready))
        del self._ready[index]
        output = self._continuations[index].merged(index)
        if output.finish_reason == "handoff":
            self._finished(index)
        return output

    def close(self) -> None:
        """Ends the call, wherever it stands; does nothing if it has ended. What was not read is dropped."""
        self._ready.clear()
        for continuation in self._continuations:
            continuation.drop()
        if not self._closed:
            self._end()
            self._notify()

    def put(self, index: int, output: RequestOutput) -> None:
        """Adds a step's output of one continuation."""
        if self._closed:
            return
        if output.finish_reason in ("deadline", "error"):
            self._continuations[index].finished = True
        if output.finish_reason == "deadline":
            self.fail(errors.DeadlineExceededError("the deadline passed"))
            return
        if output.finish_reason == "error":
            self.fail(
                errors.InvalidArgumentError(output.error, field=output.error_field)
                if output.error_field
                else errors.InternalError(output.error)
            )
            return
        self._continuations[index].add(output)
        if output.token_ids or output.ticket is not None or output.finish_reason is not None:
            self._ready[index] = None
        if output.finish_reason is not None and output.finish_reason != "handoff":
            self._finished(index)
        self._notify()

    def refuse(self, index: int, error: errors.SapwoodError) -> None:
        """Ends the call with the error for which the scheduler did not let a continuation in."""
        self._continuations[index].finished = True
        self.fail(error)

    def fail(self, error: errors.SapwoodError) -> None:
        """Ends the call with an error, which the reader gets after what came before it."""
        if not self._closed:
            self._error = error
            self._end()
            self._notify()

    def _finished(self, index: int) -> None:
        self._continuations[index].finished = True
        self._open -= 1
        if not self._open and not self._closed:
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._on_close([index for index, each in enumerate(self._continuations) if not each.finished])

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if self._listener is not None:
            self._listener()
