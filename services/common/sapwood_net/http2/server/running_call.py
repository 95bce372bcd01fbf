"""A handler at work on a call: its task, its deadline, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc

from sapwood_net.errors import CallError, InvalidArgumentError
from sapwood_net.http2.server.call import ServerCall
from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.server.waiting_line import Place

logger = logging.getLogger(__name__)

_DEADLINE_SLACK = 0.1
"""Seconds past the deadline that a handler has to end the call by itself, with a status of its own."""

Handler = Any
"""``grpc.RpcMethodHandler``, whose attributes the stubs do not know."""

Enter = Callable[[Callable[[], None], ServerCall], Place | None]


class RunningCall:
    """One call. Whatever happens, it ends with exactly one status, and the task ends with it.

    Args:
        call: The call.
        handler: Answers it.
        running: The calls that run; this is one of them until it is over.
        enter: Begins the call when it is its turn; returns its place if it has to wait.
    """

    __slots__ = ("_call", "_enter", "_exits", "_handler", "_place", "_running", "_task", "_timer")

    def __init__(
        self, call: ServerCall, handler: Handler, running: set[RunningCall], enter: Enter, exits: Turnstile
    ) -> None:
        self._enter = enter
        self._exits = exits
        self._call = call
        self._handler = handler
        self._running = running
        self._place: Place | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        running.add(self)
        if call.deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(call.deadline + _DEADLINE_SLACK, self._expire)

    def start(self) -> None:
        """Starts the handler when it is its turn. To be called once."""
        self._place = self._enter(self._begin, self._call)

    def cancel(self) -> None:
        """Ends the handler: the client has left."""
        if self._task is not None:
            self._exits.enter(self._task.cancel)
        else:
            if self._place is not None:
                self._place.leave()
                self._place = None  # it refers to this one: thousands would wait for the collector
            self._end()

    def shut(self) -> None:
        """Ends call and handler: the server stops."""
        self._call.end(grpc.StatusCode.UNAVAILABLE, "this service is shutting down")
        self.cancel()

    async def over(self, seconds: float) -> bool:
        """Returns once the handler has ended, and after ``seconds`` in any case; says whether it has."""
        return self._task is None or bool((await asyncio.wait((self._task,), timeout=seconds))[0])

    def _begin(self) -> None:
        self._place = None
        if self in self._running:  # unless it is over already
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._done)

    def _expire(self) -> None:
        self._call.give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        self.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("a call failed", exc_info=task.exception())
        self._end()

    def _end(self) -> None:
        self._task = None  # a cancelled task's exception refers to this
        self._running.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._call.end(grpc.StatusCode.CANCELLED, "the call was cancelled")

    async def _run(self) -> None:
        call = self._call
        try:
            await self._answer()
            call.end()
        except grpc.aio.AbortError:
            call.end()
        except CallError as error:  # raised by reading the request: the interceptor reports those of handlers
            call.fail(error)
        except Exception:
            logger.exception("a handler failed")
            call.end(grpc.StatusCode.UNKNOWN, "the handler failed; the service's log has the details")

    async def _answer(self) -> None:
        call, handler = self._call, self._handler
        request: Any = call
        if not handler.request_streaming:
            request = await call.read()
            if request is grpc.aio.EOF:
                raise InvalidArgumentError("the call has no request")
        if not handler.response_streaming:
            behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
            response = await behavior(request, call)
            call.write_now(response)
            return
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        responses = behavior(request, call)
        if not hasattr(responses, "__aiter__"):  # the handler writes by itself
            await responses
            return
        async with aclosing(responses):
            async for response in responses:
                if call.done():  # also for a handler that ignored its cancellation
                    raise asyncio.CancelledError
                call.write_now(response)
                if not call.is_ready():
                    await call.drained()
