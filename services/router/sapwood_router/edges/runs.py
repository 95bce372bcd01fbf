"""The runs of one HTTP request: none outlives its answer, or its client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.flow.pipeline import Pipeline, Run, close_all
from sapwood_router.request.context import RequestContext


@contextmanager
def running(exchange: Exchange, pipeline: Pipeline, contexts: Sequence[RequestContext]) -> Iterator[list[Run]]:
    """Opens a run of each; they end with the block, and as soon as the client leaves."""
    runs = [pipeline.open(context) for context in contexts]
    exchange.on_disconnect(lambda: close_all(runs))
    try:
        yield runs
    finally:
        close_all(runs)
