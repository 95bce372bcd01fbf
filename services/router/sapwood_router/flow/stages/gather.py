"""Stage 6 of an embedding request: its vectors come from the worker in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InternalError, SapwoodError
from sapwood_router.fleet.circuit_breaker import Permit
from sapwood_router.fleet.outcome import Outcome
from sapwood_router.fleet.worker import Lease
from sapwood_router.flow.stages.execution import Execution


class Gathering(Execution):
    """One worker's try at embedding something.

    Args:
        count: Vectors asked for.
        on_answer: Gets all of them, and the number of tokens that were embedded, when the try is over.
        lease, permit, on_over: See Execution.
    """

    def __init__(
        self,
        count: int,
        on_answer: Callable[[list[Sequence[float]], int], None],
        lease: Lease,
        permit: Permit,
        on_over: Callable[[SapwoodError | None], None],
    ) -> None:
        super().__init__(lease, permit, on_over)
        self._count = count
        self._on_answer = on_answer
        self._vectors: list[Sequence[float]] = []

    def vectors(self, part: worker_pb2.WorkerEmbedResponse) -> None:
        if not self._begun:
            self._answers()
        self._vectors.extend(item.values for item in part.embeddings)
        if not part.prompt_tokens:
            return
        if len(self._vectors) != self._count:
            self.failed(InternalError(f"the worker answered {len(self._vectors)} vectors for {self._count} inputs"))
            return
        self._end(Outcome.SUCCESS, None)
        self._on_answer(self._vectors, part.prompt_tokens)
