"""The runs of one HTTP request: none outlives its answer, or its client."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.flow.pipeline import Pipeline, Run
from sapwood_router.request.context import RequestContext


class Running:
    """Opens a run of each context; they end with the ``with`` block, and as soon as the client leaves."""

    def __init__(self, exchange: Exchange, pipeline: Pipeline, contexts: Sequence[RequestContext]) -> None:
        self._exchange = exchange
        self._pipeline = pipeline
        self._contexts = contexts
        self._runs: list[Run] = []

    async def __aenter__(self) -> list[Run]:
        runs = self._runs = await self._pipeline.open_all(self._contexts)
        self._exchange.on_disconnect(lambda: self._pipeline.close_all(runs))
        return runs

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipeline.close_all(self._runs)
