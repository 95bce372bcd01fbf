"""What all backends share: the thread of blocking calls."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import CancelledError

import pytest

import sapwood.lang as sl
from sapwood.lang.backends.base import Loop
from tests.lang.conftest import Computed


@sl.function
def program(s: sl.State) -> None:
    s += "a" + sl.gen("b")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "sapwood.lang"}


def assure_end(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


def test_the_thread_of_blocking_calls_ends_with_a_backend_that_nobody_has_any_more() -> None:
    before = threads()
    backend = Computed()
    assert program.run(backend=backend)["b"]
    (thread,) = threads() - before
    assert thread.is_alive()
    del backend
    gc.collect()
    assure_end(thread)


def test_a_call_that_waits_when_its_loop_is_closed_is_cancelled() -> None:
    loop, before = Loop(), threads()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    def close() -> None:
        begun.wait()
        time.sleep(0.01)
        loop.close()

    threading.Thread(target=close).start()
    with pytest.raises(CancelledError):
        loop.wait(work())
    for thread in threads() - before:
        assure_end(thread)
    assert loop.wait(asyncio.sleep(0, "again")) == "again"  # it starts anew
