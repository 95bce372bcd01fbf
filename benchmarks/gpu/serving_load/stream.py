"""What a client saw of one streamed answer, and what many of them come to."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Stream(msgspec.Struct):
    """Times are seconds on ``time.monotonic``'s clock, which the processes of a machine share.

    Attributes:
        began: When the request was sent.
        arrivals: When each piece of the answer came that had tokens.
        tokens: Output tokens, all pieces together.
        error: Why it failed; empty if it did not.
    """

    began: float = 0.0
    arrivals: list[float] = []
    tokens: int = 0
    error: str = ""


class Summary(msgspec.Struct, frozen=True):
    """Figures of a run, times in seconds. A gap is the time between two pieces of an answer, whatever tokens a piece has."""

    output_rate: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    mean_p50: float
    mean_p99: float
    """Of each answer's mean time between two tokens."""
    tokens_a_piece: float


def summarize(streams: list[Stream]) -> Summary:
    """Sums up streams none of which failed."""
    tokens = sum(stream.tokens for stream in streams)
    seconds = max(stream.arrivals[-1] for stream in streams) - min(stream.began for stream in streams)
    first = [stream.arrivals[0] - stream.began for stream in streams]
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    ]
    means = [
        (stream.arrivals[-1] - stream.arrivals[0]) / (stream.tokens - 1) for stream in streams if stream.tokens > 1
    ]
    pieces = sum(len(stream.arrivals) for stream in streams)
    return Summary(
        tokens / seconds,
        percentile(first, 0.5),
        percentile(first, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        percentile(means, 0.5),
        percentile(means, 0.99),
        tokens / pieces,
    )


def percentile(values: Iterable[float], share: float) -> float:
    """A percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
