"""The figures of a load's requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sapwood.bench.load import Run
from sapwood.bench.slo import Slo
from sapwood.bench.targets.record import INTERRUPTED, Record

LATE_SECONDS = 0.005
"""Lateness of the load generator below this distorts nothing worth a warning."""
LATE_SHARE = 0.1
"""Lateness above this share of the inter-token latency, or of the time to first token, distorts it."""
BUSY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The distribution of the values; None of none."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted values, linear between two of them, as numpy's."""
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class Failure:
    """How often requests failed in one way, and what the first of them said."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Measures:
    """Times are seconds, rates are a second over ``seconds``: from the first request's sending to the last one's end.

    Attributes:
        seconds: How long the load took.
        requests: How many were sent.
        succeeded: How many were answered to the end.
        interrupted: How many were broken off by the client; they count neither as successes nor as failures.
        failures: The other ones, by kind.
        ttft: Time to first token: until the first piece of the answer.
        itl: Inter-token latency: between one piece of an answer and the next.
        tpot: Time per output token after the first, of each request.
        e2e: Until the end of the answer.
        input_tokens: Tokens of the prompts that were answered, by the server's usage.
        cached_tokens: How many of them the server found in its cache; None if it does not report it.
        output_tokens: Tokens of the answers.
        pieces: Pieces in which they came.
        without_usage: Answers without the server's usage; no figure of tokens has them.
        good: Requests that kept the objectives; None without objectives.
        invalid_json: Answers of requests with a schema that are no JSON; None without such requests.
        dispatch_lag: How much later than due requests were sent.
        loop_lag: How much later than due the load generator's event loop came to what it had to do.
        busy: The share of a core that the event loop took.
        warnings: What makes the figures doubtful.
    """

    seconds: float
    requests: int
    succeeded: int
    interrupted: int
    failures: dict[str, Failure]
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    pieces: int
    without_usage: int
    good: int | None
    invalid_json: int | None
    dispatch_lag: Spread | None
    loop_lag: Spread | None
    busy: float
    warnings: tuple[str, ...]

    @property
    def failed(self) -> int:
        """How many failed."""
        return sum(failure.count for failure in self.failures.values())

    def rate(self, count: int) -> float:
        """``count`` a second."""
        return count / self.seconds if self.seconds > 0 else 0.0


def measure(run: Run, slo: Slo | None = None, *, expects_json: bool = False) -> Measures:
    """Sums up a run.

    Args:
        run: The load.
        slo: The limits that good requests keep.
        expects_json: Whether the answers were to be JSON.
    """
    sent = [record for record in run.records if record.sent]
    done = [record for record in sent if not record.error]
    failed = [record for record in sent if record.error and record.error != INTERRUPTED]
    with_usage = [record for record in done if record.completion_tokens is not None]
    seconds = max((record.ended for record in sent), default=0.0) - min((record.sent for record in sent), default=0.0)
    ttft = Spread.of(record.ttft for record in done if record.ttft is not None)
    itl = Spread.of(gap for record in done for gap in record.gaps)
    dispatch = Spread.of(record.sent - record.due for record in sent) if run.open_loop else None
    loop = Spread.of(run.lag.lateness)
    without_usage = len(done) - len(with_usage)
    cached = [record.cached_tokens for record in with_usage if record.cached_tokens is not None]
    invalid = sum(not _is_json(record.text) for record in done) if expects_json else None
    return Measures(
        seconds=seconds,
        requests=len(sent),
        succeeded=len(done),
        interrupted=len(sent) - len(done) - len(failed),
        failures=_failures(failed),
        ttft=ttft,
        itl=itl,
        tpot=Spread.of(record.tpot for record in done if record.tpot is not None),
        e2e=Spread.of(record.e2e for record in done),
        input_tokens=sum(record.prompt_tokens or 0 for record in with_usage),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(record.completion_tokens or 0 for record in with_usage),
        pieces=sum(len(record.arrivals) for record in done),
        without_usage=without_usage,
        good=None if slo is None else sum(slo.is_kept_by(record) for record in done),
        invalid_json=invalid,
        dispatch_lag=dispatch,
        loop_lag=loop,
        busy=run.lag.busy,
        warnings=tuple(_warnings(ttft, itl, dispatch, loop, run.lag.busy, without_usage)),
    )


def _failures(failed: list[Record]) -> dict[str, Failure]:
    found: dict[str, Failure] = {}
    for record in failed:
        before = found.get(record.error, Failure(0, record.message))
        found[record.error] = Failure(before.count + 1, before.example)
    return dict(sorted(found.items(), key=lambda item: -item[1].count))


def _warnings(
    ttft: Spread | None,
    itl: Spread | None,
    dispatch: Spread | None,
    loop: Spread | None,
    busy: float,
    without_usage: int,
) -> list[str]:
    found = []
    if busy > BUSY_SHARE:
        found.append(
            f"the load generator is too slow: it computed {busy:.0%} of the time; what it says of the server is its own limit"
        )
    if loop is not None and loop.p99 > _bound(itl or ttft):
        late = loop.p99 * 1000
        found.append(
            f"the load generator's event loop was {late:.1f} ms late (p99): times of that order are its own, not the server's"
        )
    if dispatch is not None and dispatch.p99 > _bound(ttft):
        late = dispatch.p99 * 1000
        found.append(f"requests were sent {late:.1f} ms late (p99): the arrivals were not those asked for")
    if without_usage:
        found.append(f"the server sent no usage for {without_usage} answers: figures of tokens leave them out")
    return found


def _bound(measured: Spread | None) -> float:
    """The lateness that does not yet distort what was measured."""
    return max(LATE_SECONDS, LATE_SHARE * measured.p50 if measured is not None else 0.0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
