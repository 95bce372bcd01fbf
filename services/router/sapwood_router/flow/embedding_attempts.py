"""Stages 2 to 6 for one embedding request. A large one goes in parts, one after the other, so that others get between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.status import row_of
from sapwood_router.admission.control import Place
from sapwood_router.fleet.convert import to_embed_request
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.session import MOST_TOKENS
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.attempts import Attempts, Shared
from sapwood_router.flow.stages.dispatch import dispatch
from sapwood_router.flow.stages.execution import Execution
from sapwood_router.flow.stages.gather import Gathering
from sapwood_router.flow.stages.select import choose
from sapwood_router.observe.metrics import RouterMetrics
from sapwood_router.request.embed_request import Embeddings, EmbedRequest
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.transport.shared_call import TOKENS_A_MESSAGE

_NOT_CACHED = "embeddings"
"""A cache salt that no worker caches under: to policies that look for cached prefixes, no worker holds any of the prompt."""


class EmbeddingAttempts(Attempts):
    """An embedding request's tries. Parts that a worker answered are not asked for again.

    Args:
        shared: Registry, policy and rules.
        model: Which workers it may go to.
        request: What its client asked.
        sequences: The tokens of each input; at least one.
        max_tokens: The worker cuts longer ones to so many; 0: as the model's files say.
        metrics: Counts choices and retries.

    Raises:
        InvalidArgumentError: An input is larger than a message may be.
    """

    def __init__(
        self,
        shared: Shared,
        model: str,
        request: EmbedRequest,
        sequences: Sequence[list[int]],
        max_tokens: int,
        metrics: RouterMetrics,
    ) -> None:
        super().__init__(shared, request.request_id, request.deadline)
        self._request = request
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._parts = _parts(sequences, request.names)
        self._prompt = PromptPages(sequences[0], request.caller.session, _NOT_CACHED)
        name, longest = max(zip(request.names, sequences, strict=True), key=lambda item: len(item[1]))
        tokens = 0 if max_tokens else len(longest)
        self._demand = Demand(
            model, tokens, name, embeds=True, classifies=request.classifies, refused_by=self._failover.refused_by
        )
        self._vectors: list[Sequence[float]] = []
        self._tokens = 0
        self._answer: asyncio.Future[Embeddings] = asyncio.get_running_loop().create_future()

    async def run(self, place: Place) -> Embeddings:
        """All vectors. The caller closes this, however it ends.

        Args:
            place: The request's.

        Raises:
            SapwoodError: There is no way on.
        """
        self._begin(place)
        return await self._answer

    def close(self) -> None:
        super().close()
        self._execution = None  # they refer to each other: a cycle would keep the vectors

    def _choose(self) -> tuple[Worker, Choice]:
        shared = self._shared
        worker, choice = choose(self._demand, self._prompt, shared.registry, shared.policies.of(self._demand.model))
        self._metrics.selections.at(reason=choice.reason).inc()
        return worker, choice

    def _acquire(self, worker: Worker, choice: Choice) -> Execution:
        part = self._parts[0]
        permit = worker.breaker.begin()
        lease = worker.lease(sum(map(len, part)), self._request.caller.tenant, embeds=True)
        return Gathering(len(part), self._answered, lease, permit, self._tried)

    def _send(self, worker: Worker, execution: Execution) -> None:
        dispatch(to_embed_request(self._request, self._parts[0], self._max_tokens), worker, self._deadline, execution)

    def _answered(self, vectors: list[Sequence[float]], tokens: int) -> None:
        self._vectors += vectors
        self._tokens += tokens
        del self._parts[0]
        if self._parts:
            self._do(self._next_part)
        elif not self._answer.done():
            self._answer.set_result(Embeddings(self._demand.model, self._vectors, self._tokens))

    async def _next_part(self) -> None:
        self._try(*await self._another(None))

    def _goes_on(self, error: SapwoodError) -> bool:
        self._metrics.retries.at(code=row_of(error).grpc.name).inc()
        return True

    def _fail_with(self, error: SapwoodError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


def _parts(sequences: Sequence[list[int]], names: Sequence[str]) -> list[list[list[int]]]:
    """The sequences in their order, as many together as go in one message."""
    parts: list[list[list[int]]] = []
    room = 0
    for sequence, name in zip(sequences, names, strict=True):
        if len(sequence) > MOST_TOKENS:
            raise InvalidArgumentError(f"an input of {len(sequence)} tokens: more than a message may have", field=name)
        if not parts or len(sequence) > room:
            parts.append([])
            room = TOKENS_A_MESSAGE
        parts[-1].append(sequence)
        room -= len(sequence)
    return parts
