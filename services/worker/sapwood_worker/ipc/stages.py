"""Debug lines that say when messages about KV transfers pass, for ``benchmarks/gpu/bench_handoff.py --stages``.

Nothing of it runs unless the log level is ``debug``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from sapwood_worker.ipc.messages import AnnouncePages, FromScheduler, Step, Submit, ToScheduler
from sapwood_worker.records.handoff import log_stage

logger = logging.getLogger(__name__)


def stages_are_logged() -> bool:
    """True if the log level is debug."""
    return logger.isEnabledFor(logging.DEBUG)


def staged_send(send: Callable[[ToScheduler], None]) -> Callable[[ToScheduler], None]:
    """Sends as ``send`` does, with a line for each message of a KV transfer."""

    def staged(message: ToScheduler) -> None:
        send(message)
        for stage in _asked(message):
            log_stage(f"{stage} passed on")

    return staged


def staged_receive(receive: Callable[[FromScheduler], None]) -> Callable[[FromScheduler], None]:
    """Receives as ``receive`` does, with a line for each message with tokens or pages."""

    def staged(message: FromScheduler) -> None:
        for stage in _answered(message):
            log_stage(f"{stage} at front")
        receive(message)

    return staged


class Mailbox(Protocol):
    """What the scheduler's loop has messages from."""

    def receive(self, *, wait: bool) -> list[ToScheduler]: ...

    def send(self, message: FromScheduler) -> None: ...


class StagedMailbox:
    """Implements :class:`~sapwood_worker.core.event_loop.Mailbox` over another one.

    Args:
        mailbox: The other one.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        """The messages of the other mailbox."""
        messages = self._mailbox.receive(wait=wait)
        for message in messages:
            for stage in _asked(message):
                log_stage(f"{stage} taken")
        return messages

    def send(self, message: FromScheduler) -> None:
        """Sends a message over the other mailbox."""
        self._mailbox.send(message)
        for stage in _answered(message):
            log_stage(f"{stage} sent")


def _asked(message: ToScheduler) -> Iterator[str]:
    if isinstance(message, Submit) and (message.hands_off or message.ticket is not None):
        yield "request"
    elif isinstance(message, AnnouncePages):
        yield "pages"


def _answered(message: FromScheduler) -> Iterator[str]:
    if isinstance(message, Step):
        if message.outputs:
            yield "tokens"
        if any(output.ticket is not None for output in message.outputs):
            yield "ticket" if any(output.finish_reason == "handoff" for output in message.outputs) else "pages"
