"""The runs of one HTTP request: none outlives its answer, or its client."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.flow.pipeline import Pipeline, Run, close_all
from sapwood_router.request.context import RequestContext


class Running:
    """Opens a run of each context; they end with the ``with`` block, and as soon as the client leaves."""

    def __init__(self, exchange: Exchange, pipeline: Pipeline, contexts: Sequence[RequestContext]) -> None:
        self._runs = runs = pipeline.open_all(contexts)
        exchange.on_disconnect(lambda: close_all(runs))

    def __enter__(self) -> list[Run]:
        return self._runs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_all(self._runs)
