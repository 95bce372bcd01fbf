"""``/v1/batches``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import msgspec

from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_router.edges.batches.records import BatchObject, BatchStore, new_batch_id
from sapwood_router.edges.files.store import FileStore
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http.listing import no_item, page_body, page_query
from sapwood_router.edges.http.metadata import checked_metadata
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.flow.generation import Pipeline

PATH = "/v1/batches"
_BELOW = f"{PATH}/"
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)
"""The paths that lines may name."""
_CANCEL = "cancel"
_MOST_OPEN = 100
"""Unfinished batches of a tenant."""
_WINDOW = re.compile(r"([0-9]{1,4})(m|h|d)")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


class BatchRequest(msgspec.Struct):
    """``POST /v1/batches``; ``completion_window`` is a number of minutes, hours or days, such as ``24h``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchesApi:
    """The paths.

    Args:
        batches, files: What is kept.
        most_seconds: The longest window.
        look: Tells the runner of batches that there is something new.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        most_seconds: float,
        look: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._files = files
        self._most_seconds = most_seconds
        self._look = look

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Post(PATH, self.create, summary="Begins a batch", takes=(BatchRequest,), gives=BatchObject),
            Ask(PATH, self.list, summary="Lists the batches"),
            Post(_BELOW, self.cancel, summary="ID/cancel: ends a batch early", gives=BatchObject),
            Ask(_BELOW, self.show, summary="ID: shows a batch", gives=BatchObject),
        ]

    async def create(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Begins a batch. Its lines are checked before any is run, after this has answered.

        Raises:
            SapwoodError: The request is wrong, or the tenant has too many.
        """
        request = convert(decode_object(body), BatchRequest, {"output_expires_after": ()}, left_out=exchange.left_out)
        if request.endpoint not in ENDPOINTS:
            raise InvalidArgumentError(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
        file = await self._files.get(exchange.tenant, request.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise InvalidArgumentError("the file's purpose must be batch", field="input_file_id")
        if await self._batches.count_open(exchange.tenant, _MOST_OPEN) >= _MOST_OPEN:
            raise ResourceExhaustedError(f"there may be {_MOST_OPEN} unfinished batches")
        now = int(time.time())
        made = BatchObject(
            id=new_batch_id(),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + self._window(request.completion_window),
            metadata=checked_metadata(request.metadata) or None,
        )
        await self._files.check_room(exchange.tenant, len(msgspec.json.encode(made)))
        await self._batches.create(exchange.tenant, made)
        self._look()
        await exchange.send_body(200, msgspec.json.encode(made))

    async def list(self, exchange: Exchange) -> None:
        """Lists batches, the latest first.

        Raises:
            SapwoodError: The query makes no sense, or names a batch that there is not.
        """
        asked = page_query(exchange.query)
        found = await self._batches.page(
            exchange.tenant, asked.limit + 1, newest_first=asked.newest_first, after=asked.after
        )
        if found is None:
            raise no_item(asked.after or "")
        page = [msgspec.to_builtins(each) for each in found[: asked.limit]]
        await exchange.send_body(200, page_body(page, more=len(found) > asked.limit))

    async def show(self, exchange: Exchange) -> None:
        """Shows a batch.

        Raises:
            NotFoundError: There is none.
        """
        batch = await self._batches.get(exchange.tenant, exchange.path.removeprefix(_BELOW))
        await exchange.send_body(200, msgspec.json.encode(batch))

    async def cancel(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Ends a batch early: lines that are being answered are given up, results that are there are kept.

        Raises:
            NotFoundError: There is none.
            InvalidArgumentError: It has ended.
        """
        batch_id, _, below = exchange.path.removeprefix(_BELOW).partition("/")
        if below != _CANCEL:
            raise HttpError(404, f"{exchange.path} takes no POST; a batch does at {PATH}/ID/{_CANCEL}")

        def cancelling(known: BatchObject) -> bool:
            if known.status not in ("validating", "in_progress"):
                return False
            known.enter("cancelling")
            return True

        batch = await self._batches.change(exchange.tenant, batch_id, cancelling)
        if not batch.is_open:
            raise InvalidArgumentError(f"the batch is {batch.status}", field="batch_id")
        self._look()
        await exchange.send_body(200, msgspec.json.encode(batch))

    def _window(self, given: str) -> int:
        found = _WINDOW.fullmatch(given)
        seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
        if not 0 < seconds <= self._most_seconds:
            raise InvalidArgumentError(
                f"completion_window must be a time such as 24h, at most {self._most_seconds / 3600:g}h",
                field="completion_window",
            )
        return seconds
