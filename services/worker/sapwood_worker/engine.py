"""The front's side of the scheduler: one stream a request, one owner each, one way to end it early."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Iterable

from sapwood_common import errors
from sapwood_worker.kv_event_stream import KvEventStream
from sapwood_worker.messages import Abort, Flush, Flushed, FromScheduler, Refused, Step, Submit, ToScheduler
from sapwood_worker.observer import EngineObserver
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.output import RequestOutput

_REFUSALS: dict[str, type[errors.SapwoodError]] = {
    kind.__name__: kind for kind in (errors.InvalidArgumentError, errors.ResourceExhaustedError)
}


class Generation:
    """One request. Whoever has it reads it to its end (``async for``, or :meth:`listen` and :meth:`take`) or closes it; one
    reader only.

    Outputs that the reader has not taken yet are merged into one: a slow reader loses nothing, and what is kept for it is
    at most its request's own tokens.

    Args:
        request_id: Its client's name for it.
        on_close: Called once, when it ends or is closed, with whether the scheduler is still at it.
    """

    def __init__(self, request_id: str, on_close: Callable[[bool], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._tokens: list[int] = []
        self._last: RequestOutput | None = None
        self._error: errors.SapwoodError | None = None
        self._closed = False
        self._wake: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        """The outputs since the last call, as one.

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

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` from now on whenever :meth:`take` may have something; at once if it has already."""
        self._listener = listener
        if self._last is not None or self._closed:
            listener()

    def take(self) -> RequestOutput | None:
        """The outputs since the last call, as one; None if there are none. Never waits.

        Raises:
            SapwoodError: As reading does.
        """
        if self._last is None or not (self._tokens or self._last.finish_reason is not None):
            if self._error is not None:
                raise self._error
            return None
        last, tokens = self._last, self._tokens
        self._last, self._tokens = None, []
        return RequestOutput(
            last.serial, tokens, last.finish_reason, last.prompt_tokens, last.completion_tokens, last.cached_tokens
        )

    def close(self) -> None:
        """Ends the request, wherever it stands; does nothing if it has ended. What was not read is dropped."""
        self._tokens, self._last = [], None
        self._end(active=True)

    def put(self, output: RequestOutput) -> None:
        """Adds a step's output."""
        if output.finish_reason == "error":
            error = (
                errors.InvalidArgumentError(output.error, field=output.error_field)
                if output.error_field
                else errors.InternalError(output.error)
            )
            self.fail(error, active=False)
            return
        self._tokens += output.token_ids
        self._last = output
        if output.finish_reason is not None:
            self._end(active=False)
        self._notify()

    def fail(self, error: errors.SapwoodError, *, active: bool) -> None:
        """Ends the request with an error, which the reader gets after what came before it.

        Args:
            error: What it gets.
            active: Whether the scheduler is still at it.
        """
        if not self._closed:
            self._error = error
            self._end(active=active)

    def _end(self, *, active: bool) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(active)
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if self._listener is not None:
            self._listener()


class Engine:
    """Submits requests to the scheduler process and streams what comes back. Lives on one event loop.

    Args:
        send: Hands a message to the scheduler process; never blocks.
        observer: Told what happens.
    """

    def __init__(self, send: Callable[[ToScheduler], None], observer: EngineObserver) -> None:
        self._send = send
        self._observer = observer
        self._serials = itertools.count()
        self._running: dict[int, Generation] = {}
        self._serial_of: dict[str, int] = {}
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._lost: str | None = None
        self._load_changed = asyncio.Event()
        self.kv_events = KvEventStream()
        """What is cached."""
        self.load = Load()
        """The load after the last step."""
        self.load_version = 0
        """Goes up with each change of the load or of what is cached."""

    def submit(
        self,
        request_id: str,
        token_ids: Iterable[int],
        sampling: SamplingParams,
        grammar: bytes = b"",
        grammar_tokens: int = 0,
        traceparent: str | None = None,
    ) -> Generation:
        """Starts a request; the caller owns it and must read it to its end or close it.

        Args:
            request_id: Its client's name for it.
            token_ids: The prompt.
            sampling: How to sample.
            grammar: A compiled grammar that the output must match; empty for none.
            grammar_tokens: So many of ``token_ids``, at the end, were generated under the grammar before.
            traceparent: The trace context it belongs to.

        Raises:
            AlreadyExistsError: A request of this id is running.
            UnavailableError: The scheduler process is gone.
        """
        self._check()
        if request_id in self._serial_of:
            raise errors.AlreadyExistsError(f"request {request_id} is already running", field="request_id")
        serial = next(self._serials)

        def on_close(active: bool) -> None:
            del self._running[serial]
            del self._serial_of[request_id]
            self._observer.closed(serial, active=active)
            if active and self._lost is None:
                self._send(Abort(serial))

        generation = Generation(request_id, on_close)
        self._running[serial] = generation
        self._serial_of[request_id] = serial
        prompt = array("I", token_ids).tobytes()
        self._observer.submitted(serial, request_id, traceparent)
        self._send(Submit(serial, request_id, prompt, sampling, grammar, grammar_tokens))
        return generation

    def abort(self, request_id: str) -> bool:
        """Ends a request, whose reader gets RequestCancelledError. Returns whether there was one."""
        serial = self._serial_of.get(request_id)
        if serial is None:
            return False
        self._running[serial].fail(errors.RequestCancelledError(f"request {request_id} was aborted"), active=True)
        return True

    async def flush_cache(self) -> int:
        """Empties the prefix cache of what no request holds; returns the number of pages freed.

        Raises:
            UnavailableError: The scheduler process is gone.
        """
        self._check()
        call = next(self._serials)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes[call] = future
        try:
            self._send(Flush(call))
            return await future
        finally:
            del self._flushes[call]

    async def load_after(self, version: int) -> None:
        """Returns once :attr:`load_version` is not ``version`` any more."""
        while self.load_version == version:
            await self._load_changed.wait()

    def receive(self, message: FromScheduler) -> None:
        """Takes a message of the scheduler process."""
        match message:
            case Step(outputs, load, kv_events, times):
                self._observer.steps(times)
                self._observer.outputs(outputs)
                for output in outputs:
                    # One that was closed meanwhile is not there; its last tokens concern nobody.
                    if (generation := self._running.get(output.serial)) is not None:
                        generation.put(output)
                self.kv_events.apply(kv_events)
                if kv_events or load != self.load:
                    self.load = load
                    self.load_version += 1
                    self._load_changed.set()
                    self._load_changed = asyncio.Event()
            case Refused(serial, kind, text, field, retry_after):
                if (generation := self._running.get(serial)) is not None:
                    error = _REFUSALS.get(kind, errors.InternalError)(text, field=field, retry_after=retry_after)
                    generation.fail(error, active=False)
            case Flushed(call, freed_pages):
                future = self._flushes.get(call)
                if future is not None and not future.done():
                    future.set_result(freed_pages)

    def scheduler_lost(self, reason: str) -> None:
        """The scheduler process is gone: every request ends UNAVAILABLE, and so does every later one."""
        self._lost = reason
        for generation in tuple(self._running.values()):
            generation.fail(self._gone(), active=False)
        for future in self._flushes.values():
            if not future.done():
                future.set_exception(self._gone())

    def _check(self) -> None:
        if self._lost is not None:
            raise self._gone()

    def _gone(self) -> errors.UnavailableError:
        return errors.UnavailableError(f"the worker's scheduler stopped: {self._lost}", retry_after=1.0)
