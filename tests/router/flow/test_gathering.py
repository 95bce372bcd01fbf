"""What a worker answers to an embedding request, and what that says of the worker."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InternalError, SapwoodError
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.embedding import Gathering


class Tried:
    """A try at embedding two inputs."""

    def __init__(self) -> None:
        breaker = CircuitBreaker(BreakerSettings(consecutive=1), time.monotonic)
        self.worker = Worker("w", breaker, time.monotonic)
        self.ends: list[SapwoodError | None] = []
        self.answers: list[tuple[list, int]] = []
        owner: Any = self
        self.gathering = Gathering(owner, 2, self.worker.lease(5), breaker.begin())

    def tried(self, error: SapwoodError | None) -> None:
        self.ends.append(error)

    def answered(self, vectors: list, tokens: int) -> None:
        self.answers.append(([list(vector) for vector in vectors], tokens))

    def say(self, *vectors: float, tokens: int = 0) -> None:
        part = worker_pb2.WorkerEmbedResponse(prompt_tokens=tokens)
        for value in vectors:
            part.embeddings.add(values=[value])
        self.gathering.vectors(part)


def test_vectors_are_put_together() -> None:
    tried = Tried()
    tried.say(1)
    assert (tried.worker.in_flight, tried.worker.pending_tokens) == (1, 0), "it computes what comes next"
    tried.say(2, tokens=5)
    assert tried.answers == [([[1], [2]], 5)]
    assert tried.ends == [None]
    assert tried.worker.in_flight == 0


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_than_was_asked_for_is_the_workers_fault(count: int) -> None:
    tried = Tried()
    tried.say(*range(count), tokens=5)
    (error,) = tried.ends
    assert isinstance(error, InternalError)
    assert not tried.answers
    assert (tried.worker.in_flight, tried.worker.breaker.state.value) == (0, "open")


def test_tokens_instead_of_vectors_are_the_workers_fault() -> None:
    tried = Tried()
    tried.gathering.output([7])
    assert isinstance(tried.ends[0], InternalError)
    assert tried.worker.breaker.state.value == "open"
