"""The scheduler process's loop: take messages, plan a step, run it, hand out its tokens."""

from __future__ import annotations

import logging
from array import array
from typing import Protocol

from sapwood_common.errors import SapwoodError
from sapwood_worker.messages import Abort, Flush, Flushed, FromScheduler, Refused, Shutdown, Step, Submit, ToScheduler
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.output import RequestOutput, Runner
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Failed steps in a row after which the runner is beyond help: a broken GPU context fails for ever."""


class Mailbox(Protocol):
    """Where the loop gets its messages and sends its answers."""

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        """Removes and returns all messages that are there.

        Args:
            wait: If there is none, wait for one; may still return an empty list.
        """
        ...

    def send(self, message: FromScheduler) -> None:
        """Hands a message on, in order; never blocks."""
        ...


class EventLoop:
    """Runs one scheduler and one runner, a step at a time: the normal loop, without overlap.

    A step that the runner fails ends the requests in it; an error of the scheduler itself ends the process.

    Args:
        scheduler: The core.
        runner: The model.
        mailbox: The way to the gRPC front.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, mailbox: Mailbox) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._failures = 0
        self._reported: Load | None = None

    def run(self) -> None:
        """Loops until told to shut down.

        Raises:
            RuntimeError: The runner failed several steps in a row; its state cannot be trusted.
            AssertionError: The scheduler found a page leaked or freed twice.
        """
        self._report([])
        while True:
            for message in self._mailbox.receive(wait=not self._scheduler.has_work):
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            worked = self._scheduler.has_work
            self._report(self._step() if worked else [])
            if worked and not self._scheduler.has_work:
                self._scheduler.check_idle()

    def _take(self, message: ToScheduler) -> None:
        match message:
            case Submit(serial, request_id, token_ids, sampling):
                prompt = array("I", token_ids)
                try:
                    self._scheduler.add(Request(serial, request_id, prompt, sampling))
                except SapwoodError as error:
                    self._mailbox.send(
                        Refused(serial, type(error).__name__, error.message, error.field, error.retry_after)
                    )
            case Abort(serial):
                self._scheduler.abort(serial)
            case Flush(call):
                self._mailbox.send(Flushed(call, self._scheduler.flush_cache()))

    def _step(self) -> list[RequestOutput]:
        planned = self._scheduler.schedule()
        if not planned.requests:  # all there was to do has been aborted
            return []
        try:
            result = self._runner.execute(planned)
        except Exception as error:
            names = ", ".join(request.request_id for request in planned.requests)
            logger.exception("step %d failed; it was computing %s", planned.step, names)
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                raise RuntimeError(f"{MOST_FAILURES} steps in a row failed") from error
            return self._scheduler.fail_step("the model failed to compute this step; the worker's log has the details")
        self._failures = 0
        return self._scheduler.update(result)

    def _report(self, outputs: list[RequestOutput]) -> None:
        load = self._scheduler.load()
        events = self._scheduler.take_kv_events()
        if outputs or events or load != self._reported:
            self._reported = load
            self._mailbox.send(Step(outputs, load, events))
