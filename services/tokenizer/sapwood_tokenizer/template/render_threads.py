"""Threads that render chat templates, so that those that take long do not keep others waiting.

A rendering begins in one of few quick places. If it uses more CPU time than a slice, it leaves its place to the next and goes on
in slices, taking turns with other slow renderings, one at a time. So all hostile renderings together have one thread's share of
the interpreter, and a new rendering waits for quick ones only. Handing on a turn is O(1); a slice's end is noticed where a
rendering checks its time (``sandbox``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sapwood_common.errors import ResourceExhaustedError

T = TypeVar("T")

_SLICE = 0.05
"""CPU seconds that a rendering has in its quick place, and wall seconds of a turn."""


class Turns:
    """Lets several threads run one at a time, first come first served. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    def take(self, timeout: float) -> bool:
        """Waits for the turn; False if it did not come in time."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(max(0.0, timeout)):
            return True
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return False
        return True  # the turn came at the last moment

    def hand_on(self) -> None:
        """Ends the caller's turn; the next thread has its own."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


class RenderThreads:
    """Runs renderings. Lives on one event loop; what it runs calls :meth:`Place.check` now and then.

    Args:
        quick: The number of quick places.
        slow: The most slow renderings at a time; one more is refused.
    """

    def __init__(self, quick: int = 4, slow: int = 64) -> None:
        self._places = asyncio.Semaphore(quick)
        self._turns = Turns()
        self._slow = slow
        self._count = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(quick + slow + 1, thread_name_prefix="render")

    async def enter(self) -> Place:
        """Waits for a quick place; the caller must call :meth:`run` at once."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        return Place(self, lambda: loop.call_soon_threadsafe(self._places.release))

    async def run(self, place: Place, work: Callable[[], T]) -> T:
        """Runs ``work`` on a thread, in the place; returns its result. Cancelling the call does not end the work.

        Raises:
            ResourceExhaustedError: The work is slow, and too many slow ones run.
        """
        future: Future[T] = self._threads.submit(place.run, work)
        # Work that is cancelled before a thread began it cannot give its place back itself.
        future.add_done_callback(lambda done: place.give_up() if done.cancelled() else None)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def enter_slow(self) -> Turns:
        """Counts one more slow rendering; returns the turns to take. Raises ResourceExhaustedError if too many run."""
        with self._lock:
            if self._count >= self._slow:
                raise ResourceExhaustedError("too many conversations take long to render", retry_after=1.0)
            self._count += 1
        return self._turns

    def leave_slow(self) -> None:
        """Counts one slow rendering less."""
        with self._lock:
            self._count -= 1


class Place:
    """Where one rendering runs. Used on its thread only.

    Args:
        threads: The threads that it belongs to.
        release: Gives the quick place to the next rendering.
    """

    def __init__(self, threads: RenderThreads, release: Callable[[], object]) -> None:
        self._threads = threads
        self._release = release
        self._turns: Turns | None = None
        self._has_turn = False
        self._cpu_end = 0.0
        self.next_check = 0.0
        """When :meth:`check` is due, on the monotonic clock."""

    def run(self, work: Callable[[], T]) -> T:
        """Calls ``work`` and gives up whatever it holds at the end."""
        self._cpu_end = time.thread_time() + _SLICE
        self.next_check = time.monotonic() + _SLICE
        try:
            return work()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Gives back the place or the turn when the rendering has ended."""
        if self._turns is None:
            self._release()
            return
        if self._has_turn:
            self._turns.hand_on()
        self._threads.leave_slow()

    def check(self, end: float) -> None:
        """Waits for its turn if the slice is over, at most until ``end`` on the monotonic clock.

        Raises:
            ResourceExhaustedError: The rendering has become slow, and too many slow ones run.
        """
        if self._turns is None:
            left = self._cpu_end - time.thread_time()
            if left > 0:  # it only waited for the CPU
                self.next_check = time.monotonic() + left
                return
            self._turns = self._threads.enter_slow()
            self._release()
        elif self._has_turn:
            self._turns.hand_on()
        self._has_turn = False
        self._has_turn = self._turns.take(end - time.monotonic())
        self.next_check = time.monotonic() + _SLICE
