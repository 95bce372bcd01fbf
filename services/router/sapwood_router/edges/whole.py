"""Answers in one piece: all output of a request's runs."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.edges.http1.head import Headers
from sapwood_router.flow.delivery import Delivery
from sapwood_router.flow.pipeline import Run
from sapwood_router.request.context import Delta, RequestContext
from sapwood_router.request.output import Output, OutputBuffer
from sapwood_router.request.output_stream import Relay

WORKER_HEADER, RESUMPTIONS_HEADER = b"x-sapwood-worker", b"x-sapwood-resumptions"


async def collect(runs: Sequence[Run]) -> list[Delta]:
    """Each run's whole output; the last delta's finish is in it.

    Raises:
        SapwoodError: One of the requests failed; the caller ends the others.
    """
    client = _WholeClient(len(runs))
    await Delivery(client).carry(runs)
    return client.wholes()


def told_headers(contexts: Sequence[RequestContext]) -> Headers:
    """What an answer in one piece says of how it came about, as gRPC's trailing metadata does."""
    resumptions = sum(context.resumptions for context in contexts)
    return ((WORKER_HEADER, contexts[0].worker.encode()), (RESUMPTIONS_HEADER, b"%d" % resumptions))


class _WholeClient:
    """Keeps the output of a request's runs until all of it is there."""

    def __init__(self, count: int) -> None:
        self._outputs = [OutputBuffer() for _ in range(count)]
        self._wholes = [Delta(Output(), [], logprobs=[]) for _ in range(count)]

    def writable(self) -> bool:
        """Always: there is no client to wait for."""
        return True

    async def drained(self) -> None:
        """Returns at once: there is no client to wait for."""

    def write(self, index: int, delta: Delta) -> bool:
        self._outputs[index].add(delta.output)
        whole = self._wholes[index]
        whole.token_ids += delta.token_ids
        whole.text_tokens += delta.text_tokens
        whole.logprobs = [*whole.logprobs, *delta.logprobs] if delta.logprobs else whole.logprobs
        whole.finish = delta.finish
        return True

    def token_writer(self, index: int) -> Relay | None:
        """None: tokens are kept as deltas only."""
        return None

    def wholes(self) -> list[Delta]:
        """Each run's output as one delta."""
        for output, whole in zip(self._outputs, self._wholes, strict=True):
            whole.output = output.take()
        return self._wholes
