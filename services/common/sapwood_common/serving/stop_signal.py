"""When a process is asked to stop; knows no gRPC, for processes that serve none."""

from __future__ import annotations

import asyncio
import logging
import signal

logger = logging.getLogger(__name__)


def stop_signal() -> asyncio.Event:
    """An event set by SIGTERM or SIGINT. A second signal gives up waiting: it raises in the main thread.

    Must be called in a running event loop.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        logger.info("%s: draining", number.name)
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
