"""The last hour of the fleet: samples and events, for the page's Fleet view.

Algorithm: two rings. Each SAMPLE_SECONDS the counters of workers are read and their growth since the last sample is kept as
rates. A worker's state is compared with the last one after each change of the registry, and differences become events.
Complexity: O(workers) a sample and a change, O(1) a request.
Bound: MOST_SAMPLES samples of MOST_WORKERS workers, MOST_EVENTS events.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sapwood_router.observe.status import RouterState, WorkerState
from sapwood_router.routing.worker_view import Load

SAMPLE_SECONDS = 10.0
MOST_SAMPLES = 360
MOST_EVENTS = 256
MOST_WORKERS = 64
"""Workers with series of their own; all of them count in the series of the fleet."""

COLUMNS = (
    "first_token_ms", "token_ms", "running", "waiting", "tokens_per_second", "hit_rate", "cache_used", "host_used",
    "device_hits_per_second", "host_hits_per_second", "storage_hits_per_second",
)  # fmt: skip
"""What a sample has of a worker and of the fleet: means over the sample in ms; requests; tokens a second; shares from 0 to 1, of
prompt tokens that were cached and of pages in use by tier; tokens found by tier, a second."""
_NOTHING = float("nan")


class Event(msgspec.Struct):
    """Something that happened; ``at`` in Unix seconds. ``kind``: up, down, draining, removed, resumed, weights."""

    number: int
    at: float
    kind: str
    worker: str
    text: str


class SampleView(msgspec.Struct):
    """A sample: values in the order of COLUMNS, None where there is none; ``workers`` by address."""

    number: int
    at: float
    together: list[float | None]
    workers: dict[str, list[float | None]]


class HistoryView(msgspec.Struct):
    """What is new since a number."""

    seconds: float
    columns: tuple[str, ...]
    samples: list[SampleView]
    events: list[Event]
    next: int


@dataclass(slots=True)
class _Sums:
    """What requests of a worker took since the last sample."""

    first: float = 0.0
    firsts: int = 0
    token: float = 0.0
    tokens: int = 0


class History:
    """Keeps the rings. Runs on the event loop; not thread-safe.

    Args:
        snapshot: The state of router and workers.
        clock: Unix seconds.
    """

    def __init__(
        self,
        snapshot: Callable[[], RouterState],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._samples: deque[tuple[int, float, array[float], dict[str, array[float]]]] = deque(maxlen=MOST_SAMPLES)
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._next = 1
        self._sums: dict[str, _Sums] = {}
        self._loads: dict[str, Load] = {}
        self._sampled_at = clock()
        self._states: dict[str, tuple[str, str]] = {}
        self._resumptions = 0

    def ended(self, worker: str, first_token: float, seconds_per_token: float | None) -> None:
        """A request ended; seconds. None: it had one token."""
        if worker not in self._sums and len(self._sums) >= MOST_WORKERS:
            return
        sums = self._sums.setdefault(worker, _Sums())
        sums.first += first_token
        sums.firsts += 1
        if seconds_per_token is not None:
            sums.token += seconds_per_token
            sums.tokens += 1

    def look(self) -> None:
        """Notes what has changed of the workers and of resumed streams."""
        state = self._snapshot()
        now = {worker.address: (worker.state, worker.weights) for worker in state.workers}
        problems = {worker.address: worker.problem for worker in state.workers}
        for address, (kind, weights) in now.items():
            before = self._states.get(address)
            if (before is None and kind != "down") or (before is not None and before[0] != kind):
                self._note(kind, address, problems[address])
            if before is not None and weights and before[1] and before[1] != weights:
                self._note("weights", address, weights)
        for address in self._states.keys() - now.keys():
            self._note("removed", address, "")
        if state.resumptions > self._resumptions:
            self._note("resumed", "", f"{state.resumptions - self._resumptions} streams continued on another worker")
        self._states, self._resumptions = now, state.resumptions

    def sample(self) -> None:
        """Takes a sample."""
        self.look()
        now, state = self._clock(), self._snapshot()
        seconds = max(now - self._sampled_at, 1e-3)
        growths = [(worker, _growth(self._loads.get(worker.address), worker.load)) for worker in state.workers]
        workers = {
            worker.address: _row([worker], [growth], seconds, [self._sums.get(worker.address, _Sums())])
            for worker, growth in growths[:MOST_WORKERS]
        }
        every = [worker for worker, _ in growths]
        together = _row(every, [growth for _, growth in growths], seconds, list(self._sums.values()), state.queued)
        self._samples.append((self._number(), now, together, workers))
        self._loads = {worker.address: worker.load for worker in state.workers}
        self._sums.clear()
        self._sampled_at = now

    async def run(self) -> None:
        """Takes samples for ever. Cancel it to stop."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()

    def since(self, number: int) -> HistoryView:
        """What came after a number; 0: all there is."""
        samples = [
            SampleView(at_number, at, _values(together), {name: _values(row) for name, row in workers.items()})
            for at_number, at, together, workers in self._samples
            if at_number > number
        ]
        events = [event for event in self._events if event.number > number]
        return HistoryView(SAMPLE_SECONDS, COLUMNS, samples, events, self._next - 1)

    def _note(self, kind: str, worker: str, text: str) -> None:
        self._events.append(Event(self._number(), self._clock(), kind, worker, text))

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


_COUNTED = ("prompt_tokens", "cached_tokens", "device_hit_tokens", "host_hit_tokens", "storage_hit_tokens")


def _growth(before: Load | None, now: Load) -> tuple[int, ...]:
    """How much a worker's counters have grown; a worker that began again counts from 0."""
    if before is None:
        return (0,) * len(_COUNTED)
    since = before if before.epoch == now.epoch else Load()
    return tuple(max(0, getattr(now, name) - getattr(since, name)) for name in _COUNTED)


def _row(
    workers: Sequence[WorkerState],
    growths: Sequence[tuple[int, ...]],
    seconds: float,
    sums: Sequence[_Sums],
    queued: int = 0,
) -> array[float]:
    prompt, cached, device, host, storage = (sum(column) for column in zip((0,) * len(_COUNTED), *growths, strict=True))
    pages = sum(worker.load.num_pages for worker in workers)
    host_pages = sum(worker.load.host_num_pages for worker in workers)
    firsts, tokens = sum(each.firsts for each in sums), sum(each.tokens for each in sums)
    values = (
        1000 * sum(each.first for each in sums) / firsts if firsts else _NOTHING,
        1000 * sum(each.token for each in sums) / tokens if tokens else _NOTHING,
        sum(worker.load.running_requests for worker in workers),
        queued + sum(worker.load.waiting_requests for worker in workers),
        sum(worker.tokens_per_second for worker in workers),
        cached / prompt if prompt else _NOTHING,
        sum(worker.load.used_pages for worker in workers) / pages if pages else _NOTHING,
        sum(worker.load.host_used_pages for worker in workers) / host_pages if host_pages else _NOTHING,
        device / seconds,
        host / seconds,
        storage / seconds,
    )
    return array("f", values)


def _values(row: array[float]) -> list[float | None]:
    return [None if value != value else float(f"{value:.4g}") for value in row]
