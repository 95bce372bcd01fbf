"""The requests of a session. Each can be begun, can write the new part of its answer into a message, and can be closed."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.network.channel import MAX_MESSAGE_BYTES
from sapwood_common.telemetry.logs import is_valid_request_id, request_id_var, traceparent_var
from sapwood_worker.front.convert import is_one_token, to_response
from sapwood_worker.front.generation import Generation

ENOUGH_BYTES = 8 * 1024 * 1024
"""Once a message has so many bytes of log probabilities, further streams wait for the next message."""
_MOST_BYTES = MAX_MESSAGE_BYTES - 2 * ENOUGH_BYTES
"""Most bytes of one output's log probabilities. A message that is too large would end the session, and every stream with it."""
_PART_BYTES = 256 * 1024
_PART_WEIGHT = 8
"""How many bytes of log probabilities a byte of a vector counts as: vectors can wait, other requests' tokens cannot."""

Start = Callable[[worker_pb2.WorkerGenerateRequest, float | None], Awaitable[Generation]]
"""Checks a request and submits it; gets the seconds to its deadline, None if it has none."""
Embed = Callable[[worker_pb2.WorkerEmbedRequest, float | None], Awaitable[tuple[npt.NDArray[np.float32], int]]]
"""Embeds a request's inputs; returns the vectors and the number of tokens that were embedded."""


class SessionStream(ABC):
    """One request of a session. Its log lines are written in ``context``, which holds its request and trace ids.

    Args:
        request_id: For logs; may be anything.
        traceparent: The trace context it belongs to; may be empty.

    Attributes:
        starting: Runs :meth:`begin`.
        error: Why it failed.
        timer: Ends it at its deadline.
        paused: Whether its output waits for the client to read.
    """

    def __init__(self, request_id: str, traceparent: str) -> None:
        self.context = contextvars.copy_context()
        if is_valid_request_id(request_id):
            self.context.run(request_id_var.set, request_id)
        if traceparent:
            self.context.run(traceparent_var.set, traceparent)
        self.starting: asyncio.Task[None] | None = None
        self.error: SapwoodError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False

    @abstractmethod
    async def begin(self, seconds: float | None, ready: Callable[[], None]) -> None:
        """Checks and submits the request.

        Args:
            seconds: To its deadline; None: it has none.
            ready: Called whenever there is output; never after :meth:`close`.

        Raises:
            SapwoodError: It is refused, or failed.
        """

    @abstractmethod
    def write(self, response: worker_pb2.SessionResponse, stream_id: int, *, packs_tokens: bool) -> int:
        """Puts the new part of the answer, if there is any, into a message; returns the bytes that it counts as.

        Raises:
            SapwoodError: It failed.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all of the answer was written."""

    @property
    def has_more(self) -> bool:
        """Whether there is more to write than the last :meth:`write` took."""
        return False

    def close(self) -> None:
        """Ends it, wherever it is."""
        if self.timer is not None:
            self.timer.cancel()
        if self.starting is not None:
            self.starting.cancel()


class GenerationStream(SessionStream):
    """A generation.

    Args:
        request: Its request.
        start: Starts it.
    """

    def __init__(self, request: worker_pb2.WorkerGenerateRequest, start: Start) -> None:
        super().__init__(request.request_id, request.traceparent)
        self._request = request
        self._start = start
        self._generation: Generation | None = None

    async def begin(self, seconds: float | None, ready: Callable[[], None]) -> None:
        self._generation = await self._start(self._request, seconds)
        self._generation.listen(ready)

    def write(self, response: worker_pb2.SessionResponse, stream_id: int, *, packs_tokens: bool) -> int:
        size = 0
        while self._generation is not None and (output := self._generation.take()) is not None:
            if packs_tokens and is_one_token(output):
                response.token_streams.append(stream_id)
                response.tokens.append(output.token_ids[0])
                response.positions.append(output.completion_tokens - 1)
            else:
                message = to_response(output)
                size += _measured(message)
                response.outputs.add(stream_id=stream_id, response=message)
        return size

    @property
    def ended(self) -> bool:
        return self._generation is not None and self._generation.ended

    def close(self) -> None:
        super().close()
        if self._generation is not None:
            self._generation.close()


class EmbeddingStream(SessionStream):
    """An embedding request. Its vectors go out in parts, so that other requests' tokens need not wait for all of them.

    Args:
        request: The request.
        embed: Embeds.
    """

    def __init__(self, request: worker_pb2.WorkerEmbedRequest, embed: Embed) -> None:
        super().__init__(request.request_id, request.traceparent)
        self._request = request
        self._embed = embed
        self._parts: deque[npt.NDArray[np.float32]] = deque()
        self._prompt_tokens = 0

    async def begin(self, seconds: float | None, ready: Callable[[], None]) -> None:
        vectors, self._prompt_tokens = await self._embed(self._request, seconds)
        rows = max(1, _PART_BYTES // max(1, vectors[0].nbytes))
        self._parts.extend(vectors[start : start + rows] for start in range(0, len(vectors), rows))
        ready()

    def write(self, response: worker_pb2.SessionResponse, stream_id: int, *, packs_tokens: bool) -> int:
        if not self._parts:
            return 0
        part = self._parts.popleft()
        output = response.outputs.add(stream_id=stream_id)
        for vector in part:
            output.embeddings.embeddings.add(values=vector.tolist())
        if not self._parts:
            output.embeddings.prompt_tokens = self._prompt_tokens
        return part.nbytes * _PART_WEIGHT

    @property
    def ended(self) -> bool:
        return self._prompt_tokens > 0 and not self._parts

    @property
    def has_more(self) -> bool:
        return bool(self._parts)


def _measured(output: worker_pb2.WorkerGenerateResponse) -> int:
    """The bytes of an output's log probabilities."""
    if not (output.logprobs or output.prompt_logprobs):
        return 0
    size = output.ByteSize()
    if size > _MOST_BYTES:
        # The request is at fault: on another worker it would be computed again and fail again.
        raise InvalidArgumentError(
            f"log probabilities of {size} bytes: more than a message may have",
            field="sampling.prompt_logprobs" if output.prompt_logprobs else "sampling.logprobs",
        )
    return size
