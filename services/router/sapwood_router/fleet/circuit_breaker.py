"""Takes a worker that fails out of the choice for a while, and lets one request try it before the others come back.

Algorithm (Nygard, "Release It!", 2007): while closed, it counts. It opens after ``consecutive`` faults in a row, or when a
share of ``failure_rate`` or more failed of the last ``window`` seconds' requests, if they are at least ``least_requests``.
Open, it admits nothing for ``open_seconds``, then is half-open and admits exactly one request, the probe. The probe's success
closes it, its failure opens it for twice as long as before (at most ``most_open_seconds``), and a probe that says nothing about
the worker (its client left) gives its place to the next. Requests begun in an earlier state do not change the present one.

Complexity: O(1) a request, in time and in memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import InternalError, ResourceExhaustedError, SapwoodError, UnavailableError
from sapwood_net.pacing.sliding_count import SlidingCount


class Outcome(enum.Enum):
    """The outcome of an attempt, as its worker's breaker counts it."""

    SUCCESS = "success"
    SERVER_FAULT = "server_fault"
    """The worker failed, or is gone."""
    BUSY = "busy"
    """It refused because it has enough to do: that is no fault."""
    NEUTRAL = "neutral"
    """The client's fault, its leaving, or its deadline."""


class WorkerLostError(UnavailableError):
    """The connection to the worker broke or fell silent: its requests get no more output from it."""


class WorkerLeftError(WorkerLostError):
    """The worker went as planned, by an operator or after it said that it drains: nothing is wrong with it or the request."""


def outcome_of(error: SapwoodError) -> Outcome:
    """The meaning of a failure for the worker."""
    if isinstance(error, WorkerLostError):
        return Outcome.NEUTRAL  # the loss is one fault, counted where it is noticed, whatever was running
    if isinstance(error, UnavailableError | InternalError):
        return Outcome.SERVER_FAULT
    if isinstance(error, ResourceExhaustedError):
        return Outcome.BUSY
    return Outcome.NEUTRAL


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens and for how long; times in seconds."""

    consecutive: int = 5
    failure_rate: float = 0.5
    least_requests: int = 10
    window: float = 10.0
    open_seconds: float = 1.0
    most_open_seconds: float = 30.0


class BreakerState(enum.Enum):
    """Where a breaker stands; the values are metric labels."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Permit:
    """One request that the breaker let pass. Its holder calls :meth:`end`; the first call counts, and a fault after a success."""

    __slots__ = ("_answered", "_breaker", "_generation", "_open", "is_probe")

    def __init__(self, breaker: CircuitBreaker, generation: int, is_probe: bool) -> None:
        self._breaker = breaker
        self._generation = generation
        self._open = True
        self._answered = False
        self.is_probe = is_probe

    def end(self, outcome: Outcome) -> None:
        """Says how the request went, as soon as that is known: a first token is a success."""
        if self._open:
            self._open = False
            self._answered = outcome is Outcome.SUCCESS
            self._breaker.ended(self._generation, outcome)
        elif self._answered and outcome is Outcome.SERVER_FAULT:
            self._answered = False
            self._breaker.fault()


class CircuitBreaker:
    """One worker's breaker.

    Args:
        settings: When it opens.
        clock: Seconds, monotonic.
        on_change: Called with the new state after each change but the one that only time makes (open to half-open).

    Attributes:
        closed: Whether it is: :meth:`admits` and :attr:`state` for callers that ask often.
    """

    __slots__ = (
        "_clock", "_faults", "_generation", "_in_a_row", "_on_change", "_open_for", "_open_until", "_probing", "_requests",
        "_settings", "closed",
    )  # fmt: skip

    def __init__(
        self,
        settings: BreakerSettings,
        clock: Callable[[], float],
        on_change: Callable[[BreakerState], None] = lambda state: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self.closed = True
        self._open_until = 0.0
        """When it is half-open; unless it is closed."""
        self._open_for = settings.open_seconds
        self._probing = False
        self._generation = 0
        """Counts changes of state; a permit from before the last one says nothing any more."""
        self._in_a_row = 0
        self._requests = SlidingCount(settings.window, clock)
        self._faults = SlidingCount(settings.window, clock)

    @property
    def state(self) -> BreakerState:
        """Where it stands now."""
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    def admits(self) -> bool:
        """Whether a request may begin now. Changes nothing."""
        if self.closed:
            return True
        return not self._probing and self._clock() >= self._open_until

    def begin(self) -> Permit:
        """Admits a request; only while :meth:`admits` says so."""
        assert self.admits(), "the breaker admits nothing now"
        self._probing = not self.closed
        return Permit(self, self._generation, self._probing)

    def ended(self, generation: int, outcome: Outcome) -> None:
        """A permit's end; see :meth:`Permit.end`."""
        if generation != self._generation:
            return
        if self.closed:
            if outcome is Outcome.SUCCESS:
                self._in_a_row = 0
                self._requests.add()
            elif outcome is Outcome.SERVER_FAULT:
                self._count_fault()
            return
        assert self._probing, "while it is not closed only the probe is out"
        self._probing = False
        if outcome is Outcome.SUCCESS:
            self._close()
        elif outcome is Outcome.SERVER_FAULT:
            self._reopen()

    def fault(self) -> None:
        """The worker failed otherwise than by a permit's end: its connection broke, or a stream that had begun."""
        match self.state:
            case BreakerState.CLOSED:
                self._count_fault()
            case BreakerState.HALF_OPEN:
                self._reopen()
            case BreakerState.OPEN:
                pass  # it is out of the choice already

    def reset(self) -> None:
        """The worker has restarted: its earlier failures no longer count."""
        self._close(quiet=self.closed)

    def _count_fault(self) -> None:
        self._in_a_row += 1
        self._requests.add()
        self._faults.add()
        requests = self._requests.total()
        settings = self._settings
        if self._in_a_row >= settings.consecutive or (
            requests >= settings.least_requests and self._faults.total() >= settings.failure_rate * requests
        ):
            self._open()

    def _reopen(self) -> None:
        self._probing = False
        self._open_for = min(2 * self._open_for, self._settings.most_open_seconds)
        self._open()

    def _open(self) -> None:
        self.closed = False
        self._open_until = self._clock() + self._open_for
        self._generation += 1
        self._on_change(BreakerState.OPEN)

    def _close(self, *, quiet: bool = False) -> None:
        self.closed = True
        self._open_for = self._settings.open_seconds
        self._probing = False
        self._generation += 1
        self._in_a_row = 0
        self._requests.clear()
        self._faults.clear()
        if not quiet:
            self._on_change(BreakerState.CLOSED)
