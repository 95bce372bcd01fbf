"""Answers in one piece: all output of a request's runs."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.edges.http1.head import Headers
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.delivery import Delivery
from sapwood_router.flow.pipeline import Run
from sapwood_router.request.context import Delta, RequestContext
from sapwood_router.request.output import OutputBuffer
from sapwood_router.request.output_stream import Relay

WORKER_HEADER, RESUMPTIONS_HEADER = b"x-sapwood-worker", b"x-sapwood-resumptions"
NOTICE_HEADER = b"x-sapwood-notice"


async def collect(runs: Sequence[Run]) -> list[Delta]:
    """Each run's whole output; the last delta's finish is in it.

    Raises:
        SapwoodError: One of the requests failed; the caller ends the others.
    """
    client = _WholeClient(len(runs))
    await Delivery(client).carry(runs)
    return client.wholes()


def told_headers(workers: WorkerNames, contexts: Sequence[RequestContext]) -> Headers:
    """What an answer in one piece says of how it came about, as gRPC's trailing metadata does.

    Args:
        workers: Names workers for clients.
        contexts: The answer's.
    """
    resumptions = sum(context.resumptions for context in contexts)
    return (
        (WORKER_HEADER, workers.id_of(contexts[0].worker).encode()),
        (RESUMPTIONS_HEADER, b"%d" % resumptions),
        *notice_headers(contexts[0]),
    )


def notice_headers(context: RequestContext) -> Headers:
    """What the client is told beside its answer, which prepare found out: streams begin with it, too."""
    return ((NOTICE_HEADER, context.notice.encode()),) if context.notice else ()


class _WholeClient:
    """Keeps the output of a request's runs until all of it is there."""

    def __init__(self, count: int) -> None:
        self._wholes: list[Delta | None] = [None] * count
        self._outputs: dict[int, OutputBuffer] = {}
        """Index of a run -> its output so far, for runs that send more than one delta."""

    def writable(self) -> bool:
        """Always: there is no client to wait for."""
        return True

    async def drained(self) -> None:
        """Returns at once: there is no client to wait for."""

    def write(self, index: int, delta: Delta) -> bool:
        whole = self._wholes[index]
        if whole is None:
            self._wholes[index] = delta
            return True
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = OutputBuffer()
            output.add(whole.output)
        output.add(delta.output)
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
        wholes = [whole for whole in self._wholes if whole is not None]
        for index, output in self._outputs.items():
            wholes[index].output = output.take()
        return wholes
