"""The front's side of embedding requests: each input is a request of its own to the scheduler, all answered together."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sapwood_common import errors
from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.ipc.messages import Abort, Submit, ToScheduler
from sapwood_worker.records.output import Pooling, RequestOutput
from sapwood_worker.records.terms import Terms

_SAMPLING = SamplingParams(max_tokens=1)


class EmbeddingCalls:
    """Embedding requests on their way. Lives on the engine's event loop.

    Args:
        send: Hands a message to the scheduler process; never blocks.
        serials: The engine's source of serial numbers.
        on_end: Called when a request has ended.
        most: Inputs of one request that are with the scheduler at a time: all of them might be more than it lets wait.

    Attributes:
        running: Requests that have not ended.
    """

    def __init__(
        self, send: Callable[[ToScheduler], None], serials: Iterator[int], on_end: Callable[[], None], most: int
    ) -> None:
        self._send = send
        self._serials = serials
        self._on_end = on_end
        self._most = most
        self.running = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def embed(
        self,
        request_id: str,
        inputs: Sequence[Sequence[int]],
        pooling: Pooling,
        terms: Terms,
        *,
        normalize: bool,
        dimensions: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """The embeddings of some inputs.

        Args:
            request_id: For logs.
            inputs: The token ids of each input.
            pooling: How hidden states become one vector.
            terms: Priority, tenant, namespace and deadline of all of them.
            normalize: Whether each vector is to have length 1.
            dimensions: How many of its numbers each is cut to first; None: all.

        Returns:
            float32 [inputs, dimensions or hidden_size].

        Raises:
            SapwoodError: An input was refused or failed, or the scheduler is gone; the others are aborted.
        """
        room = asyncio.Semaphore(self._most)

        async def ask(index: int, tokens: Sequence[int]) -> bytes:
            async with room:
                serial = next(self._serials)
                future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                self._waiting[serial] = future
                prompt = array("I", tokens).tobytes()
                self._send(Submit(serial, f"{request_id}/{index}", prompt, _SAMPLING, terms=terms, pooling=pooling))
                try:
                    return await future
                finally:
                    del self._waiting[serial]
                    if future.cancelled():  # with this task
                        self._send(Abort(serial))

        tasks = [asyncio.ensure_future(ask(index, tokens)) for index, tokens in enumerate(inputs)]
        self.running += 1
        try:
            raw = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.running -= 1
            self._on_end()
        vectors = np.frombuffer(b"".join(raw), np.float32).reshape(len(inputs), -1)[:, :dimensions]
        if normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def put(self, output: RequestOutput) -> None:
        """Takes an output, if it is of an embedding request."""
        future = self._waiting.get(output.serial)
        if future is None or future.done() or output.finish_reason is None:
            return
        if output.finish_reason == "error":
            future.set_exception(errors.InternalError(output.error))
        elif output.finish_reason == "deadline":
            future.set_exception(errors.DeadlineExceededError("the deadline passed"))
        else:
            future.set_result(output.embedding)

    def refuse(self, serial: int, error: errors.SapwoodError) -> None:
        """Fails the request of an input that the scheduler did not let in."""
        future = self._waiting.get(serial)
        if future is not None and not future.done():
            future.set_exception(error)

    def lost(self, error: errors.SapwoodError) -> None:
        """Fails all requests: the scheduler is gone."""
        for serial in tuple(self._waiting):
            self.refuse(serial, error)
