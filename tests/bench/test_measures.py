"""Figures from made-up timings: against numpy, and against what can be said by hand."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from sapwood.bench.load import Run
from sapwood.bench.measures import Spread, measure
from sapwood.bench.slo import Slo
from sapwood.bench.targets.record import INTERRUPTED, Record


def answered(sent: float, arrivals: list[float], tokens: int | None = None, **fields: object) -> Record:
    record = Record(due=sent, sent=sent, arrivals=array("d", arrivals), ended=arrivals[-1])
    record.prompt_tokens, record.completion_tokens = (None, None) if tokens is None else (10, tokens)
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def run_of(*records: Record, open_loop: bool = False) -> Run:
    run = Run(0.0, open_loop)
    run.records += records
    return run


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999])
def test_spreads_are_numpys(count: int) -> None:
    values = [random.Random(count).expovariate(3.0) for _ in range(count)]
    spread = Spread.of(values)
    assert spread is not None
    assert (spread.count, spread.max) == (count, max(values))
    assert spread.mean == pytest.approx(np.mean(values))
    assert (spread.p50, spread.p90, spread.p99) == pytest.approx(tuple(np.percentile(values, (50, 90, 99))))


def test_nothing_has_no_spread() -> None:
    assert Spread.of([]) is None


def test_times_and_rates_are_those_of_the_answers() -> None:
    first = answered(1.0, [1.5, 1.6, 1.8], tokens=3, cached_tokens=4)
    second = answered(2.0, [2.1, 5.0], tokens=4, cached_tokens=0)  # three tokens came as one piece
    found = measure(run_of(first, second))
    assert found.seconds == 4.0
    assert found.ttft is not None and found.ttft.mean == pytest.approx((0.5 + 0.1) / 2)
    assert found.itl is not None and (found.itl.count, found.itl.max) == (3, pytest.approx(2.9))
    assert found.tpot is not None and found.tpot.mean == pytest.approx((0.3 / 2 + 2.9 / 3) / 2)
    assert found.e2e is not None and found.e2e.max == pytest.approx(3.0)
    assert (found.input_tokens, found.cached_tokens, found.output_tokens, found.pieces) == (20, 4, 7, 5)
    assert found.rate(found.output_tokens) == pytest.approx(7 / 4)
    assert found.warnings == ()


def test_failures_are_counted_by_kind_and_give_no_times() -> None:
    failures = [answered(1.0, [9.0], error="HTTP 503", message=f"no worker {number}") for number in range(2)]
    broken = answered(1.0, [1.1], error="cut off")
    stopped = answered(1.0, [1.1], error=INTERRUPTED)
    found = measure(run_of(answered(1.0, [1.2], tokens=1), *failures, broken, stopped))
    assert (found.requests, found.succeeded, found.failed, found.interrupted) == (5, 1, 3, 1)
    assert {kind: failure.count for kind, failure in found.failures.items()} == {"HTTP 503": 2, "cut off": 1}
    assert found.failures["HTTP 503"].example == "no worker 0"
    assert found.ttft is not None and found.ttft.max == pytest.approx(0.2)


def test_tokens_that_the_server_did_not_count_are_not_guessed() -> None:
    found = measure(run_of(answered(1.0, [1.1, 1.2]), answered(1.0, [1.1, 1.3], tokens=2)))
    assert (found.output_tokens, found.without_usage) == (2, 1)
    assert found.tpot is not None and found.tpot.count == 1
    assert "sent no usage for 1 answers" in found.warnings[0]


def test_a_load_of_nothing_has_figures_too() -> None:
    found = measure(run_of(), Slo.parse("ttft=1s"))
    assert (found.requests, found.seconds, found.rate(5), found.ttft, found.good) == (0, 0.0, 0.0, None, 0)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    records = [
        answered(1.0, [1.1, 1.15], tokens=2),
        answered(1.0, [1.3, 1.35], tokens=2),  # its first token is late
        answered(1.0, [1.1, 1.11, 1.29], tokens=3),  # one gap is long, though not on average
        answered(1.0, [1.1], tokens=1),
        answered(1.0, [1.1], error="timeout"),
    ]
    assert measure(run_of(*records), Slo.parse("ttft=200ms,itl=100ms")).good == 2
    assert measure(run_of(*records), Slo.parse("tpot=100ms")).good == 4
    assert measure(run_of(*records), Slo.parse("e2e=0.3s")).good == 3
    assert measure(run_of(*records)).good is None


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "speed=1s", "ttft=-1s", "itl=xms", "e2e=infs", ""])
def test_objectives_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ttft, itl, tpot, e2e|such as 200ms"):
        Slo.parse(text)


def test_a_load_generator_that_is_late_or_busy_says_so() -> None:
    run = run_of(answered(1.0, [1.1, 1.15], tokens=2), open_loop=True)
    run.lag.lateness = [0.0002] * 100
    assert measure(run).warnings == ()
    run.lag.lateness, run.lag.busy = [0.02] * 100, 0.97
    run.records[0].due = 0.9
    busy, late, arrivals = measure(run).warnings
    assert "computed 97% of the time" in busy
    assert "20.0 ms late" in late
    assert "sent 100.0 ms late" in arrivals


def test_answers_that_were_to_be_json_are_looked_at() -> None:
    good, bad = answered(1.0, [1.1], tokens=1), answered(1.0, [1.1], tokens=1)
    good.pieces, bad.pieces = ['{"a"', ": 1}"], ['{"a"']
    assert measure(run_of(good, bad), expects_json=True).invalid_json == 1
